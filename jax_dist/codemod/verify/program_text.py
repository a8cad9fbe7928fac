"""The text of one program of the user, with edits of ours that leave its lines where they are.

With marks, it tells more of its run: which statements ran, and what host edits gave. A statement
gets a line above it; the expression of a host edit, such as `unreplicate(x)`, becomes
`__jd__.host(3, lambda v: unreplicate(v), x)`. All else stays, and the lines in their order.
"""

import ast
import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_IMPORT = "import _jax_dist_recording.start as __jd__"

_RECORD_HELPER = "__import__('_jax_dist_recording.start').start.record_helper(globals())\n"
_VALUE = "__jd_value__"
_DEEPEST = 2  # calls around the value
_BLOCKS = ("body", "orelse", "finalbody")
_PARTS = ("handlers", "cases")  # that have a block
INNER = (*_BLOCKS, *_PARTS, "decorator_list")  # fields of a statement that are no part of its head
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
_NOT_TWICE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)

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
            if not is_text(statement) and not _is_future(statement):
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


def is_text(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or another bare literal."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


# --- host edits


@dataclass(frozen=True, slots=True)
class HostForm:
    """An expression, and the value in it."""

    node: ast.expr
    of: ast.expr

    def around(self, name: str) -> str:
        """The expression with a name in the place of the value, in one line."""
        memo = {id(self.of): ast.Name(name, ast.Load())}
        return ast.unparse(copy.deepcopy(self.node, memo))


@dataclass(frozen=True, slots=True)
class _HostEdit:
    """Both forms of one."""

    before: HostForm
    after: HostForm

    @property
    def line(self) -> int:
        """Before, from 1."""
        return self.before.node.lineno


def host_edits(before: ast.Module, after: ast.Module) -> list[_HostEdit]:
    """The host edits between two texts of a program, the outer ones first.

    One puts something else around the same value: `jax_utils.unreplicate(state)` that became
    `state` puts nothing around it. What is around it is a small program of its own, so it can be
    traced and compared; the value goes on being computed where it was.

    Args:
      before: its syntax tree.
      after: that of what it became.
    """
    return list(_Search(before).block(before.body, after.body))


class _Search:
    def __init__(self, tree: ast.Module):
        # No values.
        self._imported = {name for each in ast.walk(tree) for name, _ in imported(each)}

    def block(
        self, before: Sequence[Any], after: Sequence[Any], *, in_class: bool = False
    ) -> Iterator[_HostEdit]:
        for one, other in _paired(before, after):
            if same(one, other):
                continue
            if not in_class:  # a lambda in the body of a class does not see its names
                yield from self._fields(one, other, INNER) or ()
            defines = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = isinstance(one, ast.ClassDef) or (in_class and not defines)
            for pair in blocks(one, other):
                yield from self.block(*pair, in_class=inner)

    def _fields(
        self, one: ast.AST, other: ast.AST, skipped: Sequence[str] = ()
    ) -> list[_HostEdit] | None:
        """The host edits below two nodes; None where they differ in more than that."""
        if type(one) is not type(other):
            return None
        found: list[_HostEdit] = []
        for name in one._fields:
            if name not in (*skipped, "type_comment", "ctx"):
                below = self._between(getattr(one, name, None), getattr(other, name, None))
                if below is None:
                    return None
                found += below
        return found

    def _between(self, one: object, other: object) -> list[_HostEdit] | None:
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return None
            parts = [self._between(*pair) for pair in zip(one, other, strict=True)]
            return None if None in parts else [edit for part in parts if part for edit in part]
        if isinstance(one, ast.expr) and isinstance(other, ast.expr):
            return self._expression(one, other)
        if isinstance(one, ast.AST) and isinstance(other, ast.AST):
            return self._fields(one, other)
        return [] if one == other else None

    def _expression(self, one: ast.expr, other: ast.expr) -> list[_HostEdit] | None:
        if same(one, other):
            return []
        if (found := self._fields(one, other)) is not None:
            return found
        if isinstance(one, ast.Starred | ast.Slice) or cannot_be_moved(one):
            return None
        ones, others = self._values(one), list(self._values(other))
        pairs = [(d + e, x, y) for d, x in ones for e, y in others if d + e]
        for _, x, y in sorted(pairs, key=lambda pair: pair[0]):
            if (below := [] if same(x, y) else self._fields(x, y)) is not None:
                return [_HostEdit(HostForm(one, x), HostForm(other, y)), *below]
        return None

    def _values(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[int, ast.expr]]:
        """What an expression may put something around, and how deep it lies."""
        if isinstance(node, ast.Lambda | ast.Starred):
            return
        if isinstance(node, ast.Constant):  # the value only where there is no other
            depth += _DEEPEST
        if isinstance(node, ast.Name) and node.id in self._imported:
            return
        yield depth, node
        if depth >= _DEEPEST:
            return
        inner: list[ast.expr] = []
        if isinstance(node, ast.Call):
            inner = [
                *node.args,
                *([node.func.value] if isinstance(node.func, ast.Attribute) else ()),
            ]
        elif isinstance(node, ast.Subscript):
            inner = [node.value]
        for each in inner:
            yield from self._values(each, depth + 1)


# --- marks


@dataclass(frozen=True, slots=True)
class Marked:
    """The marked text of one file."""

    text: str
    spots: tuple[Spot, ...]  # statements that tell that they ran
    added: tuple[int, ...]  # lines before that have one more line above them, in order

    def line_before(self, line: int) -> int:
        """The line of the program without marks that a line of this one was."""
        return line - sum(above + number < line for number, above in enumerate(self.added))


def marked(
    path: str, text: str, lines: Sequence[int], first: int, hosts: Mapping[int, HostForm]
) -> Marked:
    """Marks one file.

    Args:
      path: its name, for the spots.
      text: what it holds, with `\\n` at the ends of lines.
      lines: of the statements that are to tell that they ran.
      first: the number of the first spot.
      hosts: the expressions whose values are to be told, by number; of the syntax tree of `text`,
        as `host_edits` gives them.
    """
    program, spots = ProgramText(text), []
    for line in lines:
        start = _statement(program, line)
        if start is not None:
            indent, at = start
            spots.append(Spot(first + len(spots), path, line, line))
            program.replace(at, at, f"{indent}__jd__.ran({spots[-1].number})\n")
    for number, form in hosts.items():
        _tell(program, number, form)
    program.import_start()
    return Marked(program.edited, tuple(spots), tuple(program.added()))


def _statement(program: ProgramText, line: int) -> tuple[str, int] | None:
    """The indentation and the start of the innermost statement at a line."""
    found = [
        each
        for each in ast.walk(program.tree)
        if isinstance(each, ast.stmt) and _first_line(each) <= line <= (each.end_lineno or 0)
    ]
    if not found or _is_future(found[-1]) or is_text(found[-1]):
        return None
    statement = max(found, key=lambda each: (_first_line(each), -(each.end_lineno or 0)))
    start = program.line_of(statement)
    indent = program.between(start, start + statement.col_offset)
    if indent.strip():  # something stands before it: `if x: f()`
        return None
    return indent, start


def _tell(program: ProgramText, number: int, form: HostForm) -> None:
    """The function around a value, which keeps its place; lines of what goes stay as empty ones."""
    (start, stop), (inner, end) = program.span(form.node), program.span(form.of)
    before, after = program.between(start, inner), program.between(end, stop)
    head = f"__jd__.host({number}, lambda {_VALUE}: {form.around(_VALUE)}, "
    program.replace(start, inner, head + "\n" * before.count("\n"))
    program.replace(end, stop, "\n" * after.count("\n") + ")")


def with_helper_recorded(data: bytes) -> bytes:
    """A file in which the helper `mapped` of `--to jax` is recorded, where the file has it.

    It may lie inside a script, which nobody imports, so the script itself has to tell.
    """
    if b"def mapped(" not in data or b"class _Program" not in data:
        return data
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return data
    ends = [
        each.end_lineno
        for each in body
        if isinstance(each, ast.FunctionDef) and each.name == "mapped"
    ]
    if not ends:
        return data
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: ends[-1]], _RECORD_HELPER.encode(), *lines[ends[-1] :]])


# --- syntax


def _paired(
    old: Sequence[ast.stmt], new: Sequence[ast.stmt]
) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """The statements of two blocks that correspond."""
    for tag, i, j, k, m in opcodes(old, new):
        if tag == "equal":
            yield from zip(old[i:j], new[k:m], strict=True)


def opcodes(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[Any]:
    """As difflib gives them, of the statements of two blocks."""
    return difflib.SequenceMatcher(None, _keys(old), _keys(new), autojunk=False).get_opcodes()


def _keys(statements: Sequence[ast.stmt]) -> list[tuple[str, str]]:
    """What two statements share that correspond."""
    found = []
    for each in statements:
        if isinstance(each, DEFINED):
            found.append((type(each).__name__, each.name))
        elif isinstance(each, IMPORTS):
            found.append(("import", ast.dump(each)))
        else:
            found.append((type(each).__name__, ""))
    return found


def blocks(old: ast.stmt, new: ast.stmt) -> Iterator[tuple[Any, Any]]:
    """The blocks inside of two statements that correspond."""
    for name in _BLOCKS:
        ones, others = getattr(old, name, None), getattr(new, name, None)
        if isinstance(ones, list) and isinstance(others, list):
            yield ones, others
    for name in _PARTS:
        for one, other in zip(getattr(old, name, ()), getattr(new, name, ()), strict=False):
            yield one.body, other.body


def imported(node: ast.AST) -> list[tuple[str, ast.alias]]:
    """What an import binds; `import a.b, a.c` binds one name twice."""
    aliases = node.names if isinstance(node, IMPORTS) else []
    return [(alias.asname or alias.name.partition(".")[0], alias) for alias in aliases]


def same(old: ast.AST, new: ast.AST) -> bool:
    """Whether two pieces of syntax mean the same."""
    return ast.dump(old) == ast.dump(new)


def cannot_be_moved(expression: ast.expr) -> bool:
    """Whether it means something else, or happens twice, inside a lambda."""
    return any(isinstance(each, _NOT_TWICE) or _asks_frame(each) for each in ast.walk(expression))


def _asks_frame(node: ast.AST) -> bool:
    """`super()`, which looks at the function that it stands in."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        return False
    return node.func.id in ("super", "locals")
