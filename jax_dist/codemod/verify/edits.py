"""What differs between two texts of one program: merged into one program, or as host edits.

Merged, the old program has the new form beside each edited expression. `jax.pmap(f)` becomes
`__jd__.both(3, lambda: (jax.pmap(f)), lambda: mapped(f))`, which evaluates both, compares, and
gives the old value (`recording/pairs.py`). A place that another edit migrates, as that of an import
does with each use of `pmap`, becomes `__jd__.use(4, pmap)`: its calls are its own. All else stays,
line by line.
"""

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_dist.codemod.verify.program_text import HostForm, ProgramText, Spot

_BLOCKS = ("body", "orelse", "finalbody")
_WITH_BLOCKS = ("handlers", "cases")
_INNER = (*_BLOCKS, *_WITH_BLOCKS, "decorator_list")  # of a statement, no part of its head
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINED = (*_FUNCTIONS, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_ONLY_INSIDE = (ast.Starred, ast.Slice)
_PARTS = (ast.keyword, ast.comprehension, ast.withitem, ast.arguments, ast.arg)
_DEEPEST = 2  # calls around the value of a host edit


# --- two pieces of syntax side by side


class _UnlikeSyntaxError(Exception):
    """Two pieces of syntax do not correspond."""


class _Walk:
    """Goes through two pieces of syntax together, down to the expressions that differ.

    Args:
      *found: lists that get what is found, and lose it again where that turns out to be too little.
    """

    def __init__(self, *found: list[Any]):
        self._found = found

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        """Finds what differs; raises an _UnlikeSyntaxError where it cannot be told."""
        raise NotImplementedError

    def _tried(self, step: Callable[..., None], *arguments: Any) -> bool:
        """Whether a step finds all that differs; else it finds nothing."""
        counts = [len(each) for each in self._found]
        try:
            step(*arguments)
        except _UnlikeSyntaxError:
            for each, count in zip(self._found, counts, strict=True):
                del each[count:]
            return False
        return True

    def _fields(self, old: ast.AST, new: ast.AST, skipped: Sequence[str] = ()) -> None:
        if type(old) is not type(new):
            raise _UnlikeSyntaxError
        for name in old._fields:
            if name not in (*skipped, "type_comment"):
                self._node(getattr(old, name, None), getattr(new, name, None))

    def _node(self, old: Any, new: Any) -> None:
        if isinstance(old, list):
            if not isinstance(new, list) or len(old) != len(new):
                raise _UnlikeSyntaxError
            for one, other in zip(old, new, strict=True):
                self._node(one, other)
        elif isinstance(old, ast.expr) and isinstance(new, ast.expr):
            if not _same(old, new):
                self._expression(old, new)
        elif isinstance(old, _PARTS) and type(old) is type(new):
            self._fields(old, new)
        elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
            if not _same(old, new):
                raise _UnlikeSyntaxError
        elif old != new:
            raise _UnlikeSyntaxError


def _opcodes(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[Any]:
    """As difflib gives them, of the statements of two blocks."""

    def key(statement: ast.stmt) -> tuple[str, str]:
        if isinstance(statement, _IMPORTS):
            return "import", ast.dump(statement)
        return type(statement).__name__, statement.name if isinstance(statement, _DEFINED) else ""

    ones, others = ([key(each) for each in block] for block in (old, new))
    return difflib.SequenceMatcher(None, ones, others, autojunk=False).get_opcodes()


def _blocks(old: ast.stmt, new: ast.stmt) -> Iterator[tuple[Any, Any]]:
    """The blocks inside of two statements that correspond."""
    for name in _BLOCKS:
        ones, others = getattr(old, name, None), getattr(new, name, None)
        if isinstance(ones, list) and isinstance(others, list):
            yield ones, others
    for name in _WITH_BLOCKS:
        for one, other in zip(getattr(old, name, ()), getattr(new, name, ()), strict=False):
            yield one.body, other.body


def _imported(node: ast.AST) -> list[tuple[str, ast.alias]]:
    """What an import binds; `import a.b, a.c` binds one name twice."""
    aliases = node.names if isinstance(node, _IMPORTS) else []
    return [(alias.asname or alias.name.partition(".")[0], alias) for alias in aliases]


def _same(old: ast.AST, new: ast.AST) -> bool:
    return ast.dump(old) == ast.dump(new)


def _cannot_be_moved(expression: ast.expr) -> bool:
    """Whether it means something else, or happens twice, inside a lambda."""
    for each in ast.walk(expression):
        match each:
            case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                return True
            case ast.Call(func=ast.Name(id="super" | "locals"), args=[]):
                return True  # it looks at the function that it stands in
    return False


# --- one program of two


class Merged(_Walk):
    """One file, merged; `text` is what became of it.

    Args:
      path: its name, for the spots.
      before: what it held, with `\\n` at the ends of lines.
      after: what it holds when migrated.
      first: the number of its first spot.
      places: the lines and the texts of what was migrated.
    """

    def __init__(
        self,
        path: str,
        before: str,
        after: str,
        first: int,
        places: Iterable[tuple[int, str]] = (),
    ):
        self._path, self._first = path, first
        self._program = ProgramText(before)
        self.spots: list[Spot] = []
        self.unmerged: list[tuple[int, str]] = []  # the line before, and what stands there
        self.imported: dict[int, str] = {}  # by spot: the name that an edited import binds
        super().__init__(self.spots, self.unmerged, self._program.edits)
        self._in_class: list[frozenset[str]] = []  # names of the class whose body this is
        self._old = self._program.tree
        self._bound = {name for name, _ in _bound(self._old)}
        self._block(self._old.body, ast.parse(after).body)
        self._uses(dict.fromkeys(places))
        self._program.import_start()
        self.text: str = self._program.edited

    def spots_of(self, line: int, what: str) -> list[list[Spot]]:
        """The spots of each expression that begins in this line and reads like this, in order.

        There may be none of these, as of an import; then the spots of the line are those of one.
        """
        spans = self._program.spans(line, what)
        if not spans:
            return [[spot for spot in self.spots if spot.line == line]]
        return [
            [each for each in self.spots if each.start < stop and start < each.stop]
            for start, stop in spans
        ]

    def _uses(self, places: Iterable[tuple[int, str]]) -> None:
        """What no edit of its own changes has the calls that go through it for its own."""
        for line, what in places:
            for start, stop in self._program.spans(line, what):
                if not any(a < stop and start < b for a, b, _ in self._program.edits):
                    number = self._spot(line, (start, stop), what, "").number
                    self._program.replace(start, stop, f"__jd__.use({number}, {what})")

    # --- statements

    def _block(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> None:
        for tag, i, j, k, m in _opcodes(old, new):
            if tag == "equal":
                for one, other in zip(old[i:j], new[k:m], strict=True):
                    self._statement(one, other)
                continue
            for each in old[i:j]:
                if not isinstance(each, _IMPORTS):
                    self._leave(each)
            imports = [each for each in old if isinstance(each, _IMPORTS)]
            gone = [each for each in imports if not any(_same(each, other) for other in new)]
            lines = [line for each in new[k:m] for line in self._addition(each, gone)]
            if not lines or not old:
                continue
            # It goes where it stands in the new text.
            if i == j < len(old):
                at, near = self._program.line_of(old[j]), old[j]
            else:
                at, near = self._program.below(old[j - 1]), old[j - 1]
            text = "".join(" " * near.col_offset + line + "\n" for line in lines)
            if at > self._program.size:  # the file does not end with a newline
                at, text = self._program.size, "\n" + text
            self._program.replace(at, at, text)

    def _addition(self, added: ast.stmt, gone: Sequence[ast.stmt]) -> Iterator[str]:
        """The lines of what only the new text has, if it binds new names."""
        names = [name for name, _ in _bound(ast.Module([added], []), deep=False)]
        if isinstance(added, _IMPORTS):
            for name, alias in _imported(added):
                alone = ast.unparse(_only(added, alias))
                former = next((each for each in gone if name in dict(_imported(each))), None)
                if any(alone == text for _, text in _bound(self._old)):
                    continue
                if name not in self._bound or isinstance(added, ast.Import):
                    yield alone
                elif former is not None:
                    self._rebound(added, alias, name, former)
                else:
                    self._leave(added)
        elif isinstance(added, (*_DEFINED, ast.Assign)) and not self._bound & set(names):
            yield from ast.unparse(added).split("\n")
        elif not (isinstance(added, ast.Expr) and isinstance(added.value, ast.Constant)):
            self._leave(added)

    def _rebound(
        self, added: ast.Import | ast.ImportFrom, alias: ast.alias, name: str, former: ast.stmt
    ) -> None:
        """`from jax import pmap` that became `from jax_dist import pmap`."""
        last = former.end_lineno or former.lineno
        at = self._program.offset(last, former.end_col_offset)
        span = self._program.offset(former.lineno, former.col_offset), at
        text, imported = ast.unparse(former), ast.unparse(_only(added, alias))
        number = self._spot(former.lineno, span, text, imported).number
        self.imported[number] = name
        new, old = f"__jd_new_{number}", f"__jd_old_{number}"
        lines = (
            ast.unparse(_only(added, ast.alias(alias.name, new))),
            f"{old} = {name}",
            f"{name} = __jd__.both({number}, lambda: {old}, lambda: {new})",
        )
        self._program.replace(at, at, "".join(f"; {line}" for line in lines))

    def _statement(self, old: ast.stmt, new: ast.stmt) -> None:
        if _same(old, new):
            return
        if not self._tried(self._head, old, new):
            self._leave(old)
            return
        if isinstance(old, ast.ClassDef):
            self._in_class.append(frozenset(name for name, _ in _bound(old, deep=False)))
        elif isinstance(old, _FUNCTIONS):
            self._in_class.append(frozenset())
        for pair in _blocks(old, new):
            self._block(*pair)
        if isinstance(old, _DEFINED):
            self._in_class.pop()

    def _head(self, old: Any, new: Any) -> None:
        """What a statement has besides its blocks."""
        ones, others = (getattr(each, "decorator_list", []) for each in (old, new))
        if [ast.dump(each) for each in ones] != [ast.dump(each) for each in others]:
            if not ones:
                raise _UnlikeSyntaxError
            name = "__jd_function__"
            before, after = (
                "".join(f"({ast.unparse(each)})(" for each in forms) + name + ")" * len(forms)
                for forms in (ones, others)
            )
            first, last = ones[0], ones[-1]
            start, stop = self._program.decorator(first), self._program.span(last)[1]
            spot = self._spot(first.lineno, (start, stop), before, after)
            lines = ("\n" * (last.end_lineno - first.lineno))[:-1]
            function = f"@lambda {name}{self._own_names(before, after)}"
            both = f"__jd__.both({spot.number}, lambda: {before}, lambda: {after})"
            self._program.replace(start, stop, f"{function}: {both}{lines}")
        self._fields(old, new, _INNER)

    def _leave(self, statement: ast.stmt) -> None:
        self.unmerged.append((statement.lineno, ast.unparse(statement).partition("\n")[0]))

    # --- expressions

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        """Both forms of the smallest expression that holds the change, evaluated once each."""
        if (
            type(old) is type(new)
            and self._goes_inside(old, new)
            and self._tried(self._fields, old, new)
        ):
            return
        if isinstance(old, _ONLY_INSIDE) or isinstance(getattr(old, "ctx", None), ast.Store):
            raise _UnlikeSyntaxError
        if _cannot_be_moved(old) or _cannot_be_moved(new):
            raise _UnlikeSyntaxError
        start, stop = self._program.span(old)
        one, other = self._program.between(start, stop), ast.unparse(new)
        spot = self._spot(old.lineno, (start, stop), one, other)
        own = self._own_names(one, other).removeprefix(", ")
        first, second = (f"lambda{' ' if own else ''}{own}: {each}" for each in (f"({one})", other))
        self._program.replace(start, stop, f"__jd__.both({spot.number}, {first}, {second})")

    def _goes_inside(self, old: ast.expr, new: ast.expr) -> bool:
        """Whether a part of the expression may be the place; else it is the whole."""
        if isinstance(old, ast.Call) and isinstance(new, ast.Call):
            names = [word.arg for word in old.keywords] == [word.arg for word in new.keywords]
            given = names and len(old.args) == len(new.args)
            # What is mapped is part of the place: `pmap(f)` is one thing, `pmap(f)(x)` is two.
            parts = ([*each.args, *each.keywords] for each in (old, new))
            alike = all(_same(x, y) for x, y in zip(*parts, strict=False))
            return given and (_same(old.func, new.func) or alike)
        if isinstance(old, ast.Attribute) and isinstance(new, ast.Attribute):
            return old.attr == new.attr and not isinstance(old.value, ast.Name)
        if isinstance(old, ast.Lambda) and isinstance(new, ast.Lambda):
            return _same(old.args, new.args)
        return not isinstance(old, ast.Name | ast.Constant | ast.JoinedStr | ast.FormattedValue)

    def _spot(self, line: int, span: tuple[int, int], old: str, new: str) -> Spot:
        spot = Spot(self._first + len(self.spots), self._path, line, *span, old, new)
        self.spots.append(spot)
        return spot

    def _own_names(self, *texts: str) -> str:
        """What a lambda in the body of a class cannot see, as defaults."""
        names = self._in_class[-1] if self._in_class else frozenset()
        if not names:
            return ""
        nodes = ast.walk(ast.parse(f"({', '.join(texts)})"))
        used = {each.id for each in nodes if isinstance(each, ast.Name)}
        return "".join(f", {name}={name}" for name in sorted(names & used))


def _only(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(statement.module, [alias], statement.level)


def _bound(node: Any, *, deep: bool = True) -> Iterator[tuple[str, str]]:
    """`(name, text of the import)` of what statements bind; at any depth, or in this body alone."""
    inner = ast.walk(node) if deep else iter(node.body)
    for each in inner:
        if isinstance(each, _DEFINED):
            yield each.name, ""
        elif isinstance(each, _IMPORTS):
            for name, alias in _imported(each):
                yield name, ast.unparse(_only(each, alias))
        elif not deep and isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from _stored(ast.walk(each))
        elif deep:
            yield from _stored([each])


def _stored(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, ""


# --- host edits


def host_edits(before: ast.Module, after: ast.Module) -> list[tuple[HostForm, HostForm]]:
    """The host edits between two texts of a program, in both forms, the outer ones first.

    One puts something else around the same value: `jax_utils.unreplicate(state)` that became
    `state` puts nothing around it. What is around it is a small program of its own, so it can be
    traced and compared; the value goes on being computed where it was.

    Args:
      before: its syntax tree.
      after: that of what it became.
    """
    search = _HostEdits(before)
    search.block(before.body, after.body)
    return search.edits


class _HostEdits(_Walk):
    def __init__(self, tree: ast.Module):
        self.edits: list[tuple[HostForm, HostForm]] = []
        super().__init__(self.edits)
        # No values.
        self._imported = {name for each in ast.walk(tree) for name, _ in _imported(each)}

    def block(self, before: Sequence[Any], after: Sequence[Any], *, in_class: bool = False) -> None:
        for tag, i, j, k, m in _opcodes(before, after):
            for one, other in zip(before[i:j], after[k:m], strict=True) if tag == "equal" else ():
                if _same(one, other):
                    continue
                if not in_class:  # a lambda in the body of a class does not see its names
                    self._tried(self._fields, one, other, _INNER)
                inner = isinstance(one, ast.ClassDef) or (
                    in_class and not isinstance(one, _FUNCTIONS)
                )
                for pair in _blocks(one, other):
                    self.block(*pair, in_class=inner)

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        if self._tried(self._fields, old, new):
            return
        if isinstance(old, _ONLY_INSIDE) or _cannot_be_moved(old):
            raise _UnlikeSyntaxError
        ones, others = self._values(old), list(self._values(new))
        pairs = [(d + e, x, y) for d, x in ones for e, y in others if d + e]
        for _, x, y in sorted(pairs, key=lambda pair: pair[0]):
            self.edits.append((HostForm(old, x), HostForm(new, y)))
            if _same(x, y) or self._tried(self._fields, x, y):
                return
            self.edits.pop()
        raise _UnlikeSyntaxError

    def _values(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[int, ast.expr]]:
        """What an expression may put something around, and how deep it lies."""
        if isinstance(node, ast.Constant):  # the value only where there is no other
            depth += _DEEPEST
        inner: list[ast.expr] = []
        match node:
            case ast.Lambda() | ast.Starred():
                return
            case ast.Name() if node.id in self._imported:
                return
            case ast.Call(func=ast.Attribute(value=value)):
                inner = [*node.args, value]
            case ast.Call():
                inner = node.args
            case ast.Subscript():
                inner = [node.value]
        yield depth, node
        for each in inner if depth < _DEEPEST else ():
            yield from self._values(each, depth + 1)
