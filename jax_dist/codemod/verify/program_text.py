"""The text of one program of the user, with edits of ours that leave its lines where they are."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

_IMPORT = "import _jax_dist_recording.start as __jd__"

_Edit: TypeAlias = tuple[int, int, str]  # from, to, in bytes; the new text


@dataclass(frozen=True, slots=True)
class Spot:
    """A place that a run reports: an expression with two forms, or a statement."""

    number: int
    path: str
    line: int  # before, from 1
    end_line: int
    old: str = ""
    new: str = ""
    name: str = ""  # that an import binds, whose uses are the places


class ProgramText:
    """One file, and what is put into it.

    Args:
      text: what it holds, with `\\n` at the ends of lines.
    """

    def __init__(self, text: str):
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._edits: list[_Edit] = []

    @property
    def edited(self) -> str:
        """The new text."""
        data, end = self._bytes, len(self._bytes)
        for start, stop, new in sorted(self._edits, key=lambda edit: edit[:2], reverse=True):
            assert stop <= end  # edits lie side by side
            data, end = data[:start] + new.encode() + data[stop:], start
        return data.decode()

    def added(self) -> list[int]:
        """The lines before that an edit put a line above."""
        whole = (at for at, stop, new in self._edits if at == stop and new.endswith("\n"))
        return sorted(self._bytes.count(b"\n", 0, start) + 1 for start in whole)

    def replace(self, start: int, stop: int, new: str) -> None:
        """Adds an edit."""
        self._edits.append((start, stop, new))

    def forget(self, count: int) -> None:
        """Takes back all edits but the first ones."""
        del self._edits[count:]

    def __len__(self) -> int:
        return len(self._edits)

    def import_start(self) -> None:
        """Above all that may use it, and below what must come first."""
        for statement in self.tree.body:
            if not is_text(statement) and not is_future(statement):
                start = self.line_of(statement)
                self.replace(start, start, f"{_IMPORT}\n")
                return

    def offset(self, line: int | None, column: int | None) -> int:
        return self._starts[(line or 1) - 1] + (column or 0)

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Of an expression, without brackets around it."""
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def line_of(self, statement: ast.stmt) -> int:
        """Where its first line begins, with its decorators."""
        return self._starts[first_line(statement) - 1]

    def below(self, statement: ast.stmt) -> int:
        """Where the line after it begins; one more than there are bytes, if there is none."""
        return self._starts[statement.end_lineno or statement.lineno]

    def between(self, start: int, stop: int) -> str:
        return self._bytes[start:stop].decode()

    def decorator(self, first: ast.expr) -> int:
        """Where the `@` of a decorator is."""
        return self._bytes.rindex(b"@", 0, self.span(first)[0])

    @property
    def size(self) -> int:
        return len(self._bytes)


def first_line(statement: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return min((each.lineno for each in decorators), default=statement.lineno)


def is_text(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or another bare literal."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
