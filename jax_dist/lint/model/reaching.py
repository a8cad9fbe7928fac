"""Reaching definitions: which bindings of a name may hold where it is read.

From a read the search goes back and out, to the statements above it in each block around it, until
one surely binds the name. More than `LIMIT` bindings are given up, so the work stays linear.

    x = 1
    if c: x = 2
    y = x  # sees both bindings: the `if` may not run, so the search goes on above it
"""

import ast
import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax_dist.lint.model.scopes import Binding, NameScope, Scopes, place

LIMIT = 48

_Bindings: TypeAlias = dict[Binding, None]  # an ordered set
_Block: TypeAlias = tuple[ast.AST, str]  # a list of statements: a node and its field, "orelse"


class _Search(NamedTuple):  # what it comes to in one block
    bindings: _Bindings
    is_complete: bool  # nothing above the block can hold: one surely ran, or they are too many


_WITH_BODIES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# A read inside of one of these may see any binding in it, later ones too; not so in an `if`.
_UNSURE = (ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


class Reaching:
    """The reaching definitions of one file, computed for each name when it is first asked for."""

    def __init__(self, tree: Scopes):
        self._tree = tree
        self._flow = functools.cache(functools.partial(_NameFlow, tree))  # by scope and name

    def bindings_of(self, node: ast.Name) -> list[Binding] | None:
        """Return the bindings that may hold at a read; None if there are none or too many."""
        scope_and_bindings = self._tree.scope(node).lookup(node.id)
        if scope_and_bindings is None:
            return None
        scope, bindings = scope_and_bindings
        return bindings if len(bindings) == 1 else self._flow(scope, node.id).reads.get(node)

    def reads_of(self, scope: NameScope, name: str, binding: Binding) -> Sequence[ast.Name]:
        """Return the reads of a name of `scope` that may see one of its bindings."""
        if len(scope.bindings[name]) == 1:
            return self._tree.loads.get((scope, name), ())
        return self._flow(scope, name).seen_by.get(binding, ())


class _NameFlow:
    """One name of one scope: for each read the bindings that reach it, and the other way round."""

    def __init__(self, tree: Scopes, scope: NameScope, name: str):
        self._tree = tree
        self._scope = scope
        bindings = scope.bindings[name]
        parameters = dict.fromkeys(item for item in bindings if item.kind == "parameter")
        inner = (item for item in bindings if item.kind not in ("outer", "parameter"))
        self._ordered = sorted(inner, key=lambda binding: place(binding.node))
        self._places = [place(binding.node) for binding in self._ordered]  # (line, column)
        self._last_bound: dict[ast.AST, Binding] = {}  # by statement, without those in its blocks
        self._binders: dict[_Block, list[Any]] = {}  # statements that bind the name, by block
        self._after_binders: dict[_Block, list[_Search]] = {}  # see `_after`
        self._known_before: dict[ast.AST, _Bindings] = {scope.node: parameters}  # by statement
        self.reads: dict[ast.Name, list[Binding] | None] = {}  # None: more than LIMIT
        self.seen_by: dict[Binding, list[ast.Name]] = {}
        has_statements = isinstance(scope.node, _WITH_BODIES)
        if has_statements:
            self._collect_binders()
        outer = dict.fromkeys(item for item in bindings if item.kind == "outer")
        for load in tree.loads.get((scope, name), ()):
            reaching = self._reaching(load) if has_statements else {}
            # A read that no binding reaches may still run after one, in a way that is not seen.
            reaching = (reaching or self._between(0, len(self._places))) | outer
            self.reads[load] = list(reaching) if len(reaching) <= LIMIT else None
            for binding in self.reads[load] or ():
                self.seen_by.setdefault(binding, []).append(load)

    def _collect_binders(self) -> None:
        """List for each block the statements that bind the name, or hold one that does."""
        tree = self._tree
        seen: set[ast.AST] = {self._scope.node}
        for binding in self._ordered:
            node: Any = tree.statement(binding.node)
            self._last_bound[node] = binding
            while node not in seen:
                seen.add(node)
                self._binders.setdefault(self._block_of(node), []).append(node)
                node = self._statement_around(node)

    def _reaching(self, load: ast.Name) -> _Bindings:
        """Return the bindings that reach a read; if there are more than LIMIT, only some."""
        reader = self._tree.scope(load).around_comprehensions
        if reader is self._scope:
            statement = self._tree.statement(load)
            # The test of a `while` also runs after its body.
            later = self._within(statement) if isinstance(statement, ast.While) else {}
            return self._before(statement) | later
        # A function runs at any time once it is made, so later bindings count too.
        while reader.parent and reader.parent.around_comprehensions is not self._scope:
            reader = reader.parent.around_comprehensions
        made = self._tree.statement(reader.node)
        start = bisect.bisect_left(self._places, place(made))
        return self._before(made) | self._between(start, len(self._places))

    def _before(self, node: Any) -> _Bindings:
        """Return the bindings that may hold where a statement begins, from the caches."""
        unknown = []  # the statements around, from the inside out, up to the first that is known
        while node is not self._scope.node and node not in self._known_before:
            unknown.append(node)
            node = self._statement_around(node)
        for statement in reversed(unknown):
            self._known_before[statement] = self._before_in(statement)
        return self._known_before[unknown[0] if unknown else node]

    def _statement_around(self, node: Any) -> Any:
        """Return the statement whose block holds a statement, or the node of the scope."""
        around = self._tree.parents[node]  # perhaps a handler or case
        return around if around is self._scope.node else self._tree.statement(around)

    def _before_in(self, node: Any) -> _Bindings:
        """Return the bindings before a statement, from the cached ones of the one around."""
        block, around = self._block_of(node), self._statement_around(node)
        count = bisect.bisect_left(self._binders.get(block, []), place(node), key=place)
        reaching, is_complete = self._after(block, count)
        if is_complete:
            return reaching
        # What the statement around binds itself, such as the target of its `for` or `with`.
        is_target = isinstance(around, ast.For | ast.AsyncFor) and block[1] == "body"
        if around in self._last_bound and (is_target or not isinstance(around, _UNSURE)):
            return reaching | {self._last_bound[around]: None}
        if isinstance(around, _UNSURE):
            reaching = reaching | self._within(around)
        return reaching | self._known_before[around]

    def _block_of(self, statement: Any) -> _Block:
        return self._tree.parents[statement], self._tree.fields[statement]

    def _after(self, block: _Block, count: int) -> _Search:
        """Return the bindings that may hold after the first `count` binders of a block."""
        known = self._after_binders.setdefault(block, [_Search({}, is_complete=False)])
        binders = self._binders.get(block, [])
        while len(known) <= count:
            known.append(self._after_next(binders[len(known) - 1], known[-1]))
        return known[count]

    def _after_next(self, statement: Any, before: _Search) -> _Search:
        """Return what may hold after one more binder; `before` is what may hold before it."""
        if isinstance(statement, (ast.If, *_UNSURE)):
            bindings = self._within(statement) | before.bindings
            first = dict.fromkeys(itertools.islice(bindings, LIMIT + 1))
            return _Search(first, before.is_complete or len(bindings) > LIMIT)
        bindings: _Bindings = {}
        if isinstance(statement, ast.With | ast.AsyncWith):
            body = statement, "body"
            inside = self._after(body, len(self._binders.get(body, [])))
            if inside.is_complete:
                return inside
            bindings = inside.bindings
        if statement in self._last_bound:
            return _Search(bindings | {self._last_bound[statement]: None}, is_complete=True)
        return _Search(bindings | before.bindings, before.is_complete)

    def _within(self, node: Any) -> _Bindings:
        """Return all bindings inside a statement."""
        start = bisect.bisect_left(self._places, place(node))
        end = bisect.bisect_left(self._places, (node.end_lineno, node.end_col_offset))
        return self._between(start, end)

    def _between(self, start: int, end: int) -> _Bindings:
        """Return bindings `start` to `end` of the name, by line; at most LIMIT + 1 of them."""
        return dict.fromkeys(self._ordered[start : min(end, start + LIMIT + 1)])
