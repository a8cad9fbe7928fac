"""The text of one program of the user, with edits of ours that leave its lines where they are.

With marks, it tells more of its run: which statements ran, and what host edits gave. A statement
gets a line above it; the expression of a host edit, such as `unreplicate(x)`, becomes
`__jd__.host(3, lambda v: unreplicate(v), x)`. All else stays, and the lines in their order.
"""

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_IMPORT = "import _jax_dist_recording.start as __jd__"
_VALUE = "__jd_value__"


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
        self.tree: ast.Module = ast.parse(text)
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.edits: list[tuple[int, int, str]] = []  # from, to, in bytes; the new text

    @property
    def edited(self) -> str:
        """The new text."""
        data, end = self._bytes, len(self._bytes)
        for start, stop, new in sorted(self.edits, key=lambda edit: edit[:2], reverse=True):
            assert stop <= end  # edits lie side by side
            data, end = data[:start] + new.encode() + data[stop:], start
        return data.decode()

    def added(self) -> list[int]:
        """The lines before that an edit put a line above, in order."""
        whole = (at for at, stop, new in self.edits if at == stop and new.endswith("\n"))
        return sorted(self._bytes.count(b"\n", 0, start) + 1 for start in whole)

    def replace(self, start: int, stop: int, new: str) -> None:
        self.edits.append((start, stop, new))

    def import_start(self) -> None:
        """Above all that may use it, and below what must come first."""
        for statement in self.tree.body:
            if not _comes_first(statement):
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
        return self._starts[_first_line(statement) - 1]

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


def _first_line(statement: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return min((each.lineno for each in decorators), default=statement.lineno)


def _comes_first(statement: ast.stmt) -> bool:
    """Whether it is a bare literal, such as a docstring, or an import from `__future__`."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
            return True
    return False


# --- marks


@dataclass(frozen=True, slots=True)
class HostForm:
    """An expression, and the value in it."""

    node: ast.expr
    of: ast.expr

    def around(self, name: str) -> str:
        """The expression with a name in the place of the value, in one line."""
        memo = {id(self.of): ast.Name(name, ast.Load())}
        return ast.unparse(copy.deepcopy(self.node, memo))


class Marked:
    """One file with marks; `text` is what became of it.

    Args:
      path: its name, for the spots.
      text: what it holds, with `\\n` at the ends of lines.
      lines: of the statements that are to tell that they ran.
      first: the number of the first spot.
      hosts: the expressions whose values are to be told, by number; of the syntax tree of `text`,
        as `edits.host_edits` gives them.
    """

    def __init__(
        self, path: str, text: str, lines: Sequence[int], first: int, hosts: Mapping[int, HostForm]
    ):
        program = ProgramText(text)
        self.spots: list[Spot] = []  # statements that tell that they ran
        for line in lines:
            start = _statement(program, line)
            if start is not None:
                indent, at = start
                number = first + len(self.spots)
                self.spots.append(Spot(number, path, line, line))
                program.replace(at, at, f"{indent}__jd__.ran({number})\n")
        for number, form in hosts.items():  # the value keeps its place; what goes leaves its lines
            (start, stop), (inner, end) = program.span(form.node), program.span(form.of)
            before, after = program.between(start, inner), program.between(end, stop)
            head = f"__jd__.host({number}, lambda {_VALUE}: {form.around(_VALUE)}, "
            program.replace(start, inner, head + "\n" * before.count("\n"))
            program.replace(end, stop, "\n" * after.count("\n") + ")")
        program.import_start()
        self.text: str = program.edited
        self._added = program.added()

    def line_before(self, line: int) -> int:
        """The line of the program without marks that a line of this one was."""
        return line - sum(above + number < line for number, above in enumerate(self._added))


def _statement(program: ProgramText, line: int) -> tuple[str, int] | None:
    """The indentation and the start of the innermost statement at a line."""
    found = [
        each
        for each in ast.walk(program.tree)
        if isinstance(each, ast.stmt) and _first_line(each) <= line <= (each.end_lineno or 0)
    ]
    if not found or _comes_first(found[-1]):
        return None
    statement = max(found, key=lambda each: (_first_line(each), -(each.end_lineno or 0)))
    start = program.line_of(statement)
    indent = program.between(start, start + statement.col_offset)
    if indent.strip():  # something stands before it: `if x: f()`
        return None
    return indent, start
