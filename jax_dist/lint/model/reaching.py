"""Reaching definitions: which bindings of a name may hold where it is read.

From a read the way goes back and out, to the statements above it in each block around it, until one
surely binds the name. More than `LIMIT` bindings are not known, which keeps the work linear.
"""

import ast
import bisect
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model.scopes import Binding, NameScope, Scopes, place

LIMIT = 48

_Bindings: TypeAlias = dict[Binding, None]  # an ordered set

_WITH_BODIES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# All bindings in one of these may hold, in it and behind it; those in an `if` only behind it.
_UNSURE = (ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


class Reaching:
    """The reaching definitions of one file.

    Args:
      tree: the scopes of the file.
    """

    def __init__(self, tree: Scopes):
        self._tree = tree
        self._names: dict[tuple[NameScope, str], _Name] = {}

    def bindings_of(self, node: ast.Name) -> list[Binding] | None:
        """Return the bindings that may hold at a read; None if there are none or too many."""
        home = self._tree.scope(node).lookup(node.id)
        if home is None:
            return None
        scope, bindings = home
        if len(bindings) == 1:
            return bindings
        return self._name(scope, node.id).reads.get(node)

    def reads_of(self, scope: NameScope, name: str, binding: Binding) -> Sequence[ast.Name]:
        """Return the reads of a name of `scope` that may see one of its bindings."""
        if len(scope.bindings[name]) == 1:
            return self._tree.loads.get((scope, name), ())
        return self._name(scope, name).seen_by.get(binding, ())

    def _name(self, scope: NameScope, name: str) -> "_Name":
        if (scope, name) not in self._names:
            self._names[scope, name] = _Name(self._tree, scope, name)
        return self._names[scope, name]


class _Name:
    """One name of one scope: by read, the bindings that reach it, and the other way round."""

    def __init__(self, tree: Scopes, scope: NameScope, name: str):
        self._tree = tree
        self._scope = scope
        bindings = scope.bindings[name]
        self._parameters = dict.fromkeys(each for each in bindings if each.kind == "parameter")
        inner = (each for each in bindings if each.kind not in ("outer", "parameter"))
        self._ordered = sorted(inner, key=lambda each: place(each.node))
        self._places = [place(each.node) for each in self._ordered]
        self._own: dict[ast.AST, Binding] = {}  # by statement: the last that is its own
        self._binding: dict[tuple[ast.AST, str], list[Any]] = {}  # what binds it, by block
        self._known_behind: dict[tuple[ast.AST, str], list[tuple[_Bindings, bool]]] = {}
        self._known_before: dict[ast.AST, _Bindings] = {scope.node: self._parameters}
        self.reads: dict[ast.Name, list[Binding] | None] = {}  # None: more than LIMIT
        self.seen_by: dict[Binding, list[ast.Name]] = {}
        is_block = isinstance(scope.node, _WITH_BODIES)
        if is_block:
            self._collect()
        outer = dict.fromkeys(each for each in bindings if each.kind == "outer")
        for load in tree.loads.get((scope, name), ()):
            # A read that no binding reaches may still run after one, in a way that is not seen.
            reaching = (self._at(load) if is_block else {}) or self._between(0, len(self._places))
            reaching = reaching | outer
            self.reads[load] = list(reaching) if len(reaching) <= LIMIT else None
            for binding in self.reads[load] or ():
                self.seen_by.setdefault(binding, []).append(load)

    def _collect(self) -> None:
        """Note which statements bind the name, in all blocks around them."""
        tree, home = self._tree, self._scope.node
        seen: set[ast.AST] = {home}
        for binding in self._ordered:
            node: Any = tree.statement(binding.node)
            self._own[node] = binding
            while node not in seen:
                seen.add(node)
                around = tree.parents[node]
                self._binding.setdefault((around, tree.fields[node]), []).append(node)
                node = self._around(node)

    # --- from a read back

    def _at(self, load: ast.Name) -> _Bindings:
        """Return the bindings that reach a read; more than LIMIT are not all of them."""
        reader = self._tree.scope(load).around_comprehensions
        if reader is self._scope:
            statement = self._tree.statement(load)
            again = self._within(statement) if isinstance(statement, ast.While) else {}
            return self._before(statement) | again
        # A function runs at any time once it is made, so later bindings count too.
        while reader.parent and reader.parent.around_comprehensions is not self._scope:
            reader = reader.parent.around_comprehensions
        made = self._tree.statement(reader.node)
        start = bisect.bisect_left(self._places, place(made))
        return self._before(made) | self._between(start, len(self._places))

    def _before(self, node: Any) -> _Bindings:
        """Return the bindings that may hold where a statement begins."""
        inside = []  # of the first that is known: the statements around, from within
        while node is not self._scope.node and node not in self._known_before:
            inside.append(node)
            node = self._around(node)
        for statement in reversed(inside):
            self._known_before[statement] = self._before_in(statement)
        return self._known_before[inside[0] if inside else node]

    def _around(self, node: Any) -> Any:
        around = self._tree.parents[node]  # perhaps a handler or case
        return around if around is self._scope.node else self._tree.statement(around)

    def _before_in(self, node: Any) -> _Bindings:
        """Return the bindings before a statement, for which those before its block are known."""
        parent, field, block = self._tree.parents[node], self._tree.fields[node], self._around(node)
        siblings = self._binding.get((parent, field), [])
        above = bisect.bisect_left(siblings, place(node), key=place)
        reaching, is_sure = self._behind((parent, field), above)
        if is_sure:
            return reaching
        is_target = isinstance(block, ast.For | ast.AsyncFor) and field == "body"
        if block in self._own and (is_target or not isinstance(block, _UNSURE)):
            return reaching | {self._own[block]: None}
        if isinstance(block, _UNSURE):
            reaching = reaching | self._within(block)
        return reaching | self._known_before[block]

    def _behind(self, block: tuple[ast.AST, str], count: int) -> tuple[_Bindings, bool]:
        """Return the bindings behind the first statements of a block, and whether one is sure.

        Only statements that bind the name count. Bindings before the block are left out.
        """
        known = self._known_behind.setdefault(block, [({}, False)])
        siblings = self._binding.get(block, [])
        while len(known) <= count:
            known.append(self._behind_next(siblings[len(known) - 1], known[-1]))
        return known[count]

    def _behind_next(self, statement: Any, known: tuple[_Bindings, bool]) -> tuple[_Bindings, bool]:
        """Return the bindings behind a statement, given those before it."""
        before, is_sure = known
        if isinstance(statement, (ast.If, *_UNSURE)):
            bindings = self._within(statement) | before
            is_full = len(bindings) > LIMIT
            return dict.fromkeys(itertools.islice(bindings, LIMIT + 1)), is_sure or is_full
        bindings: _Bindings = {}
        if isinstance(statement, ast.With | ast.AsyncWith):
            body = statement, "body"
            bindings, is_sure_inside = self._behind(body, len(self._binding.get(body, [])))
            if is_sure_inside:
                return bindings, True
        if statement in self._own:
            return bindings | {self._own[statement]: None}, True
        return bindings | before, is_sure

    def _within(self, node: Any) -> _Bindings:
        """Return all bindings in a statement."""
        start = bisect.bisect_left(self._places, place(node))
        end = bisect.bisect_left(self._places, (node.end_lineno, node.end_col_offset))
        return self._between(start, end)

    def _between(self, start: int, end: int) -> _Bindings:
        return dict.fromkeys(self._ordered[start : min(end, start + LIMIT + 1)])
