"""The text of one program of the user, with edits of ours that leave its lines where they are.

With marks, it tells more of its run: which places ran, what was mapped there, and what host edits
gave. An expression `jax.pmap` becomes `__jd__.place(2, (jax.pmap))`, and a host edit, such as
`unreplicate(x)`, `__jd__.host(3, lambda v: unreplicate(v), x)`. All else stays, and the lines in
their order.
"""

import ast
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_IMPORT = "import _jax_dist_recording.start as __jd__"
_VALUE = "__jd_value__"


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
            if not comes_first(statement):
                start = self.line_of(statement)
                self.replace(start, start, f"{_IMPORT}\n")
                return

    def offset(self, line: int | None, column: int | None) -> int:
        return self._starts[(line or 1) - 1] + (column or 0)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Of an expression, without brackets around it, or of a statement."""
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def spans(self, line: int, what: str) -> list[tuple[int, int]]:
        """Where the expressions are that begin in this line and read like this."""
        nodes = (each for each in ast.walk(self.tree) if isinstance(each, ast.expr))
        found = {self.span(each) for each in nodes if each.lineno == line and _has_value(each)}
        return sorted(each for each in found if self.between(*each) == what)

    def extents(self, line: int, what: str) -> list[tuple[int, int]]:
        """The same; of what is called, with the call: what `pmap` maps is a part of its place."""
        calls = [each for each in ast.walk(self.tree) if isinstance(each, ast.Call)]
        around = {self.span(each.func): self.span(each) for each in calls}
        return [around.get(each, each) for each in self.spans(line, what)]

    def entry(self, line: int) -> tuple[int, str] | None:
        """Where a call is made as soon as the statement at a line runs, and what is put there.

        Returns:
          None where there is no such statement. In the text, braces stand for the call.
        """
        found = [
            each
            for each in ast.walk(self.tree)
            if isinstance(each, ast.stmt) and _first_line(each) <= line <= (each.end_lineno or 0)
        ]
        if not found or comes_first(found[-1]):
            return None
        statement = max(found, key=lambda each: (_first_line(each), each.col_offset))
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function or (isinstance(statement, ast.If) and self._is_elif(statement)):
            rest = [each for each in statement.body if not comes_first(each)]
            statement = rest[0] if rest else statement
        if not isinstance(statement, ast.Match) and not hasattr(statement, "body"):
            return self.offset(statement.lineno, statement.col_offset), "{}; "
        start = self.line_of(statement)
        indent = self.between(start, start + statement.col_offset)
        return start, f"{indent}{{}}\n"

    def _is_elif(self, statement: ast.If) -> bool:
        """Whether no statement may stand above it."""
        start, _ = self.span(statement)
        return self.between(start, start + 4) == "elif"

    def line_of(self, statement: ast.stmt) -> int:
        """Where its first line begins, with its decorators."""
        return self._starts[_first_line(statement) - 1]

    def between(self, start: int, stop: int) -> str:
        return self._bytes[start:stop].decode()


def _first_line(statement: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return min((each.lineno for each in decorators), default=statement.lineno)


def _has_value(node: ast.expr) -> bool:
    """Whether a call may stand around it."""
    is_part = isinstance(node, ast.Starred | ast.Slice)
    return not is_part and isinstance(getattr(node, "ctx", None), ast.Load | None)


def comes_first(statement: ast.stmt) -> bool:
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
      text: what it holds, with `\n` at the ends of lines.
      places: the lines and the texts of what is to tell that it ran; of an import, with the name
        that it binds.
      first: the number of the first place.
      hosts: the expressions whose values are to be told, by number; of the syntax tree of `text`,
        as `edits.host_edits` gives them.
    """

    def __init__(
        self,
        text: str,
        places: Iterable[tuple[int, str, str]],
        first: int,
        hosts: Mapping[int, HostForm],
    ):
        self.count: int = first  # the number of the next place
        # The numbers of what begins in a line and reads alike, in order; statements have lines.
        self.numbers: dict[tuple[int, str], list[int]] = {}
        self.by_line: set[tuple[int, str]] = set()
        self._program = program = ProgramText(text)
        # By the length of what they are around: the edits of each.
        marks: list[tuple[int, list[tuple[int, int, str]]]] = []
        for number, form in hosts.items():  # the value keeps its place; what goes leaves its lines
            (start, stop), (inner, end) = program.span(form.node), program.span(form.of)
            before, after = program.between(start, inner), program.between(end, stop)
            head = f"__jd__.host({number}, lambda {_VALUE}: {form.around(_VALUE)}, "
            head, tail = head + "\n" * before.count("\n"), "\n" * after.count("\n") + ")"
            marks.append((stop - start, [(start, inner, head), (end, stop, tail)]))
        hosted = [edit for _, edits in marks for edit in edits]  # these tell by what they record
        compared = {
            program.span(each)
            for node in ast.walk(program.tree)
            if isinstance(node, ast.Compare)
            for each in (node.left, *node.comparators)
        }
        for line, what, name in dict.fromkeys(places):
            numbers = self.numbers.setdefault((line, what), [])
            for start, stop in program.spans(line, what):
                if any(a < at < b for a, b, _ in hosted for at in (start, stop)):
                    continue
                # What is compared stays the object that it is.
                call = "ran({}) or" if (start, stop) in compared else "place({},"
                head, tail = f"(__jd__.{call.format(self.count)} (", "))" if "or" in call else ")))"
                marks.append((stop - start, [(start, start, head), (stop, stop, tail)]))
                numbers.append(self._next())
            if not numbers:
                self._mark_statement(line, what, name)
        for _, edits in sorted(marks, key=lambda mark: mark[0]):  # the inner ones first
            program.edits += edits
        program.import_start()
        self.text: str = program.edited
        self._added = program.added()

    def _mark_statement(self, line: int, what: str, name: str) -> None:
        """It tells as soon as it runs; an import, when it has bound its name."""
        program = self._program
        if name:
            former = next(e for e in ast.walk(program.tree) if getattr(e, "lineno", 0) == line)
            at = program.offset(former.end_lineno, former.end_col_offset)  # pyright: ignore
            self.numbers[line, what].append(self._next())
            program.replace(at, at, f"; {name} = __jd__.place({self.count - 1}, {name})")
        elif (entry := program.entry(line)) is not None:
            self.by_line.add((line, what))
            self.numbers[line, what].append(self._next())
            at, text = entry
            program.replace(at, at, text.format(f"__jd__.place({self.count - 1}, None)"))

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def line_before(self, line: int) -> int:
        """The line of the program without marks that a line of this one was."""
        return line - sum(above + number < line for number, above in enumerate(self._added))
