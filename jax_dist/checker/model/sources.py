"""A file as text that can be parsed and edited, and back to the very same bytes."""

import ast
import bisect
import codecs
import dataclasses
import functools
import io
import itertools
import re
import tokenize
import warnings

from jax_dist.checker.model.findings import Position

# Plain text means something else in these.
_OF_NO_FILES = {"idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"}
_LINE_END = re.compile(rb"\r\n|\r|\n")


class UnreadableError(ValueError):
    """A file whose bytes are not text in the encoding that it declares."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file.

    `code` is UTF-8 without a byte order mark, whatever the file's encoding; `python` is what is
    parsed, of the same length (a notebook hides its magics there).
    """

    path: str
    code: bytes
    python: bytes
    encoding: str = "utf-8"
    bom: bool = False

    @functools.cached_property
    def line_starts(self) -> list[int]:
        """The offset at which each line begins."""
        lines = self.code.splitlines(keepends=True)
        if not lines or lines[-1].endswith((b"\n", b"\r")):
            lines.append(b"")
        return list(itertools.accumulate(map(len, lines[:-1]), initial=0))

    def position(self, offset: int) -> Position:
        line = bisect.bisect_right(self.line_starts, offset) - 1
        before = self.code[self.line_starts[line] : offset]
        return Position(line + 1, len(before.decode("utf-8", "replace")) + 1)

    def line_text(self, offset: int) -> str:
        """The line that holds `offset`, without its end."""
        line = bisect.bisect_right(self.line_starts, offset) - 1
        start = self.line_starts[line]
        end = _LINE_END.search(self.code, start)
        return self.code[start : end.start() if end else None].decode("utf-8", "replace")

    def written(self, code: bytes) -> bytes:
        """The file's bytes once `code` is in the place of its code."""
        if self.encoding == "utf-8":
            return codecs.BOM_UTF8 + code if self.bom else code
        return code.decode("utf-8").encode(self.encoding)

    def edited(self, code: bytes) -> "Source":
        """The file as it will be read once `code` is in the place of its code."""
        return dataclasses.replace(self, code=code, python=code)

    def new_cell(self, offset: int) -> tuple[int, str] | None:
        """Where a new cell below that of `offset` begins, and what begins it; None: no notebook."""
        del offset
        return None


def read(path: str, data: bytes) -> Source:
    """Raises UnreadableError where the bytes are not what they say they are."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
    if encoding in ("utf-8", "utf-8-sig"):
        bom = data.startswith(codecs.BOM_UTF8)
        code = data[len(codecs.BOM_UTF8) :] if bom else data
        _check(code, "utf-8")
        return Source(path, code, code, bom=bom)
    _check(data, encoding)
    code = data.decode(encoding).encode("utf-8")
    return Source(path, code, code, encoding)


def holds(word: bytes, data: bytes) -> bool:
    """Whether a word is in a file, also in one of UTF-16."""
    return word in data or b"\0".join(word[i : i + 1] for i in range(len(word))) in data


def _check(data: bytes, encoding: str) -> None:
    try:
        is_of_files = codecs.lookup(encoding).name not in _OF_NO_FILES
        data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        raise UnreadableError(f"the file is not {encoding}: {error}") from error
    if not is_of_files:
        raise UnreadableError(f"the file says that it is {encoding}, which is for short strings")


class ParseError(ValueError):
    """Python cannot parse the file; carries the line and column, from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message, line, column)
        self.message: str = message
        self.line: int = line
        self.column: int = column


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
