"""Python text as a tree, or the one error that says why not."""

import ast
import warnings


class ParseError(ValueError):
    """Python cannot parse the file; carries the line and column, from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message, line, column)
        self.message, self.line, self.column = message, line, column


def parse(code: bytes) -> ast.Module:
    """Raises ParseError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own invalid escapes
            return ast.parse(code.decode())
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        raise ParseError(error.msg or "invalid syntax", line, column) from error
    except (ValueError, RecursionError, MemoryError, SystemError) as error:
        raise ParseError(str(error) or type(error).__name__) from error
