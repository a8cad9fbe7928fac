"""Writes one program of two: the old one, with the new form beside each edited expression.

`jax.pmap(f)` becomes `__jd__.both(3, lambda: (jax.pmap(f)), lambda: mapped(f))`, which evaluates
both, compares, and gives the old value (`recording/pairs.py`). All else stays, line by line.
"""

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax_dist.codemod.verify.program_text import (
    DEFINED,
    IMPORTS,
    INNER,
    ProgramText,
    Spot,
    blocks,
    cannot_be_moved,
    imported,
    is_text,
    opcodes,
    same,
)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ONLY_INSIDE = (ast.Starred, ast.Slice)
_PARTS = (ast.keyword, ast.comprehension, ast.withitem, ast.arguments, ast.arg)


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The merged text of one file."""

    text: str
    spots: tuple[Spot, ...]
    unmerged: tuple[tuple[int, str], ...]  # the line before, and what stands there


class _UnmergeableError(Exception):
    """Two pieces of syntax that do not correspond."""


def merged(path: str, before: str, after: str, first: int) -> Merged:
    """Merges one file.

    Args:
      path: its name, for the spots.
      before: what it held, with `\\n` at the ends of lines.
      after: what it holds when migrated.
      first: the number of its first spot.
    """
    merge = _Merge(path, before, after, first)
    merge.module()
    return Merged(merge.text.edited, tuple(merge.spots), tuple(merge.unmerged))


class _Merge:
    def __init__(self, path: str, before: str, after: str, first: int):
        self._path, self._first = path, first
        self.text = ProgramText(before)
        self._old, self._new = self.text.tree, ast.parse(after)
        self.spots: list[Spot] = []
        self.unmerged: list[tuple[int, str]] = []
        self._in_class: list[frozenset[str]] = []  # names of the class whose body this is
        self._bound = {name for name, _ in _bound(self._old)}

    def module(self) -> None:
        self._block(self._old.body, self._new.body)
        self.text.import_start()

    # --- statements

    def _block(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> None:
        for tag, i, j, k, m in opcodes(old, new):
            if tag == "equal":
                for one, other in zip(old[i:j], new[k:m], strict=True):
                    self._statement(one, other)
                continue
            for gone in old[i:j]:
                if not isinstance(gone, IMPORTS):
                    self._leave(gone)
            imports = [each for each in old if isinstance(each, IMPORTS)]
            gone = [each for each in imports if not any(same(each, other) for other in new)]
            self._added(old, i, j, new[k:m], gone)

    def _added(
        self,
        old: Sequence[ast.stmt],
        i: int,
        j: int,
        added: Sequence[ast.stmt],
        gone: Sequence[ast.stmt],
    ) -> None:
        """What only the new text has: it goes where it stands there, if it binds new names."""
        lines: list[str] = []
        for each in added:
            lines += self._addition(each, gone)
        if not lines or not old:
            return
        if j < len(old) and j == i:
            at, near = self.text.line_of(old[j]), old[j]
        else:
            near = old[j - 1]
            at = self.text.below(near)
        indent = " " * near.col_offset
        text = "".join(indent + line + "\n" for line in lines)
        if at > self.text.size:  # the file does not end with a newline
            at, text = self.text.size, "\n" + text
        self.text.replace(at, at, text)

    def _addition(self, added: ast.stmt, gone: Sequence[ast.stmt]) -> Iterator[str]:
        names = [name for name, _ in _bound(ast.Module([added], []), deep=False)]
        if isinstance(added, IMPORTS):
            for name, alias in imported(added):
                alone = ast.unparse(_only(added, alias))
                former = next((each for each in gone if name in dict(imported(each))), None)
                if any(alone == text for _, text in _bound(self._old)):
                    continue
                if name not in self._bound or isinstance(added, ast.Import):
                    yield alone
                elif former is not None:
                    self._rebound(added, alias, name, former)
                else:
                    self._leave(added)
        elif isinstance(added, (*DEFINED, ast.Assign)) and not self._bound & set(names):
            yield from ast.unparse(added).split("\n")
        elif not is_text(added):
            self._leave(added)

    def _rebound(
        self, added: ast.Import | ast.ImportFrom, alias: ast.alias, name: str, former: ast.stmt
    ) -> None:
        """`from jax import pmap` that became `from jax_dist import pmap`."""
        number = len(self.spots) + self._first
        new, old = f"__jd_new_{number}", f"__jd_old_{number}"
        last = former.end_lineno or former.lineno
        text, imported = ast.unparse(former), ast.unparse(_only(added, alias))
        self.spots.append(Spot(number, self._path, former.lineno, last, text, imported, name))
        lines = (
            ast.unparse(_only(added, ast.alias(alias.name, new))),
            f"{old} = {name}",
            f"{name} = __jd__.both({number}, lambda: {old}, lambda: {new})",
        )
        at = self.text.offset(last, former.end_col_offset)
        self.text.replace(at, at, "".join(f"; {line}" for line in lines))

    def _statement(self, old: ast.stmt, new: ast.stmt) -> None:
        if same(old, new):
            return
        undo = len(self.spots), len(self.text), len(self.unmerged)
        try:
            if isinstance(old, DEFINED):
                self._decorated(old, new)
            self._fields(old, new, INNER)
        except _UnmergeableError:
            del self.spots[undo[0] :], self.unmerged[undo[2] :]
            self.text.forget(undo[1])
            self._leave(old)
            return
        if isinstance(old, ast.ClassDef):
            self._in_class.append(frozenset(name for name, _ in _bound(old, deep=False)))
        elif isinstance(old, _FUNCTIONS):
            self._in_class.append(frozenset())
        for pair in blocks(old, new):
            self._block(*pair)
        if isinstance(old, DEFINED):
            self._in_class.pop()

    def _decorated(self, old: Any, new: Any) -> None:
        ones, others = old.decorator_list, new.decorator_list
        if [ast.dump(each) for each in ones] == [ast.dump(each) for each in others]:
            return
        if not ones:
            raise _UnmergeableError
        name = "__jd_function__"
        before = "".join(f"({ast.unparse(each)})(" for each in ones) + name + ")" * len(ones)
        after = "".join(f"({ast.unparse(each)})(" for each in others) + name + ")" * len(others)
        last = ones[-1]
        start, stop = self.text.decorator(ones[0]), self.text.span(last)[1]
        spot = self._spot(ones[0], before, after, end=last)
        lines = ("\n" * (last.end_lineno - ones[0].lineno))[:-1]
        own = self._own_names(before, after)
        both = f"@lambda {name}{own}: __jd__.both({spot.number}, lambda: {before}, lambda: {after})"
        self.text.replace(start, stop, both + lines)

    def _leave(self, statement: ast.stmt) -> None:
        self.unmerged.append((statement.lineno, ast.unparse(statement).partition("\n")[0]))

    # --- expressions

    def _node(self, old: Any, new: Any) -> None:
        if isinstance(old, list):
            if not isinstance(new, list) or len(old) != len(new):
                raise _UnmergeableError
            for one, other in zip(old, new, strict=True):
                self._node(one, other)
        elif isinstance(old, ast.expr) and isinstance(new, ast.expr):
            self._expression(old, new)
        elif isinstance(old, _PARTS) and type(old) is type(new):
            self._fields(old, new)
        elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
            if not same(old, new):
                raise _UnmergeableError
        elif old != new:
            raise _UnmergeableError

    def _fields(self, old: ast.AST, new: ast.AST, skipped: Sequence[str] = ()) -> None:
        if type(old) is not type(new):
            raise _UnmergeableError
        for name in old._fields:
            if name not in skipped and name != "type_comment":
                self._node(getattr(old, name, None), getattr(new, name, None))

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        """Both forms of the smallest expression that holds the change, evaluated once each."""
        if same(old, new):
            return
        undo = len(self.spots), len(self.text)
        if type(old) is type(new) and self._goes_inside(old, new):
            try:
                self._fields(old, new)
                return
            except _UnmergeableError:
                del self.spots[undo[0] :]
                self.text.forget(undo[1])
        if isinstance(old, _ONLY_INSIDE) or isinstance(getattr(old, "ctx", None), ast.Store):
            raise _UnmergeableError
        if cannot_be_moved(old) or cannot_be_moved(new):
            raise _UnmergeableError
        start, stop = self.text.span(old)
        one, other = self.text.between(start, stop), ast.unparse(new)
        spot = self._spot(old, one, other)
        own = self._own_names(one, other).removeprefix(", ")
        first, second = (f"lambda{' ' if own else ''}{own}: {each}" for each in (f"({one})", other))
        self.text.replace(start, stop, f"__jd__.both({spot.number}, {first}, {second})")

    def _goes_inside(self, old: ast.expr, new: ast.expr) -> bool:
        """Whether a part of the expression may be the place; else it is the whole."""
        if isinstance(old, ast.Call) and isinstance(new, ast.Call):
            names = [word.arg for word in old.keywords] == [word.arg for word in new.keywords]
            given = names and len(old.args) == len(new.args)
            # What is mapped is part of the place: `pmap(f)` is one thing, `pmap(f)(x)` is two.
            alike = [same(x, y) for x, y in zip(_given(old), _given(new), strict=False)]
            return given and (same(old.func, new.func) or all(alike))
        if isinstance(old, ast.Attribute) and isinstance(new, ast.Attribute):
            return old.attr == new.attr and not isinstance(old.value, ast.Name)
        if isinstance(old, ast.Lambda) and isinstance(new, ast.Lambda):
            return same(old.args, new.args)
        return not isinstance(old, ast.Name | ast.Constant | ast.JoinedStr | ast.FormattedValue)

    def _spot(self, node: Any, old: str, new: str, end: Any = None) -> Spot:
        last = (end or node).end_lineno
        spot = Spot(self._first + len(self.spots), self._path, node.lineno, last, old, new)
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


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _only(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(statement.module, [alias], statement.level)


def _bound(node: Any, *, deep: bool = True) -> Iterator[tuple[str, str]]:
    """`(name, text of the import)` of what statements bind; at any depth, or in this body alone."""
    inner = ast.walk(node) if deep else iter(node.body)
    for each in inner:
        if isinstance(each, DEFINED):
            yield each.name, ""
        elif isinstance(each, IMPORTS):
            for name, alias in imported(each):
                yield name, ast.unparse(_only(each, alias))
        elif not deep and isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from _stored(ast.walk(each))
        elif deep:
            yield from _stored([each])


def _stored(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, ""
