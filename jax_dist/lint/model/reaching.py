"""Reaching definitions: which bindings of a name may hold where it is read.

One pass over the statements that bind or read a name, for each name with several bindings that
somebody asks for. A set of more than `LIMIT` bindings is not known, which keeps the work linear.
"""

import ast
import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model.scopes import Binding, NameScope, Scopes, place

LIMIT = 48
_Set: TypeAlias = "tuple[Binding, ...] | None"  # None: more than LIMIT

_TARGETS_LAST = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PARTS = (ast.ExceptHandler, ast.match_case)  # blocks that are no statements


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
        reached = self._name(scope, node.id).reads.get(node)
        return None if reached is None else list(reached)

    def reads_of(self, scope: NameScope, name: str, binding: Binding) -> Sequence[ast.Name]:
        """Return the reads of a name of `scope` that may see one of its bindings."""
        if len(scope.bindings[name]) == 1:
            return self._tree.loads.get((scope, name), ())
        return self._name(scope, name).seen_by.get(binding, ())

    def _name(self, scope: NameScope, name: str) -> "_Name":
        if (scope, name) not in self._names:
            self._names[scope, name] = _Name(self._tree, scope, name)
        return self._names[scope, name]


@dataclasses.dataclass(slots=True)
class _Events:
    """Effects of one statement on a name, without the statements in it."""

    reads: list[ast.Name] = dataclasses.field(default_factory=list)
    bindings: list[Binding] = dataclasses.field(default_factory=list)
    inner: list[ast.Name] = dataclasses.field(default_factory=list)  # in functions made here


class _Name:
    """The flow of one name of one scope."""

    def __init__(self, tree: Scopes, scope: NameScope, name: str):
        self._tree = tree
        bindings = scope.bindings[name]
        self._outer = tuple(each for each in bindings if each.kind == "outer")
        ordered = [each for each in bindings if each.kind != "outer"]
        self._ordered = sorted(ordered, key=lambda each: place(each.node))
        self._places = [place(each.node) for each in self._ordered]
        self._events: dict[ast.AST, _Events] = {}
        self._inside: dict[tuple[ast.AST, str], list[ast.AST]] = {}  # what matters, by block
        self.reads: dict[ast.Name, _Set] = {}
        self.seen_by: dict[Binding, list[ast.Name]] = {}
        loads = tree.loads.get((scope, name), [])
        if isinstance(scope.node, (ast.Module, *_DEFINITIONS)):
            self._collect(scope, loads)
            parameters = tuple(each for each in self._ordered if each.kind == "parameter")
            self._block(scope.node, "body", parameters)
        everything = _union([self._ordered[: LIMIT + 1]])
        for load in loads:
            reached = self.reads.get(load, ())
            # A read that no binding reaches may still run after one, in a way that is not seen.
            reached = everything if reached == () else reached
            reached = _union([reached, self._outer])
            self.reads[load] = reached
            for binding in reached or ():
                self.seen_by.setdefault(binding, []).append(load)

    def _collect(self, scope: NameScope, loads: Iterable[ast.Name]) -> None:
        tree, home = self._tree, scope.node
        for binding in self._ordered:
            if binding.kind != "parameter":
                self._events_at(binding.node).bindings.append(binding)
        for load in loads:
            reader = tree.scope(load)
            if reader is scope or reader.around_comprehensions is scope:
                self._events_at(load).reads.append(load)
                continue
            while reader.parent is not None and reader.parent.around_comprehensions is not scope:
                reader = reader.parent
            self._events_at(reader.node).inner.append(load)
        marked = {home}
        for statement in self._events:
            node: ast.AST = statement
            while node not in marked:
                marked.add(node)
                around = tree.parents[node]
                field = tree.fields.get(node) or _field_of_part(node)  # type: ignore[arg-type]
                self._inside.setdefault((around, field), []).append(node)
                node = around
        for parts in self._inside.values():
            parts.sort(key=_first_place)

    def _events_at(self, node: ast.AST) -> _Events:
        """Return the events of the innermost statement, handler or case around a node."""
        owner: ast.AST = self._tree.statement(node)
        if owner is not node and isinstance(owner, ast.Try | ast.TryStar | ast.Match):
            part = node
            while part is not owner and not isinstance(part, _PARTS):
                part = self._tree.parents[part]
            owner = part
        return self._events.setdefault(owner, _Events())

    # --- the pass

    def _block(self, owner: ast.AST, field: str, state: _Set) -> _Set:
        """Follow a list of statements; () behind one that always leaves it."""
        for statement in self._inside.get((owner, field), ()):
            state = self._statement(statement, state)
        block = getattr(owner, field)
        return () if block and isinstance(block[-1], _LEAVES) else state

    def _statement(self, node: Any, state: _Set) -> _Set:
        match node:
            case ast.If():
                return self._branches(node, state)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, state)
            case ast.Try() | ast.TryStar():
                return self._try(node, state)
            case ast.Match():
                state = self._header(node, state)
                return _union([state, *(self._case(each, state) for each in node.cases)])
            case ast.With() | ast.AsyncWith():
                return self._block(node, "body", self._header(node, state))
        return self._header(node, state)

    def _header(self, node: ast.AST, state: _Set) -> _Set:
        """Follow what a statement itself does; the state behind it."""
        events = self._events.get(node)
        if events is None:
            return state
        before = state
        last = isinstance(node, (*_TARGETS_LAST, *_DEFINITIONS))
        steps: list[tuple[Any, ast.Name | Binding]] = [(place(read), read) for read in events.reads]
        steps += [(_time_of(each, last=last), each) for each in events.bindings]
        for _, step in sorted(steps, key=lambda each: each[0]):
            if isinstance(step, Binding):
                state = (step,)
            else:
                self.reads[step] = state
        if events.inner:
            # A function runs at any time once it is made, so later bindings count too.
            start = bisect.bisect_right(self._places, place(node))
            later = self._ordered[start : start + LIMIT + 1]
            inside = _union([before, state, later])
            self.reads.update(dict.fromkeys(events.inner, inside))
        return state

    def _branches(self, node: ast.If, state: _Set) -> _Set:
        ends: list[_Set] = []
        while True:  # not recursive: `elif` may go deeper than Python's stack
            state = self._header(node, state)
            ends.append(self._block(node, "body", state))
            match node.orelse:
                case [ast.If() as below] if below in self._inside.get((node, "orelse"), ()):
                    node = below
                case _:
                    ends.append(self._block(node, "orelse", state))
                    return _union(ends)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, state: _Set) -> _Set:
        within = self._between(node, node)
        if isinstance(node, ast.While):
            state = self._header(node, _union([state, within]))
            self._block(node, "body", state)
        else:
            # The iterable is computed once; the target is bound anew in each iteration.
            first = self._header(node, state)
            is_target = first is not state
            self._block(node, "body", first if is_target else _union([state, within]))
            state = _union([state, within])
        return self._block(node, "orelse", state)

    def _try(self, node: ast.Try | ast.TryStar, state: _Set) -> _Set:
        raised = _union([state, self._between(node.body[0], node.body[-1])])
        done = self._block(node, "orelse", self._block(node, "body", state))
        ends = [done]
        marked = self._inside.get((node, "handlers"), ())
        for handler in node.handlers:
            if handler in marked:
                ends.append(self._block(handler, "body", self._header(handler, raised)))
            elif not isinstance(handler.body[-1], _LEAVES):
                ends.append(raised)
        if node.finalbody:
            anywhere = _union([*ends, raised])
            final = self._block(node, "finalbody", anywhere)
            return _union(ends) if final is anywhere else final
        return _union(ends)

    def _case(self, case: ast.match_case, state: _Set) -> _Set:
        return self._block(case, "body", self._header(case, state))

    def _between(self, first: Any, last: Any) -> _Set:
        """Return all bindings from the beginning of one statement to the end of another."""
        start = bisect.bisect_left(self._places, place(first))
        end = bisect.bisect_left(self._places, (last.end_lineno, last.end_col_offset))
        return _union([self._ordered[start : min(end, start + LIMIT + 1)]])


def _union(sets: Sequence[Sequence[Binding] | None]) -> _Set:
    found: dict[Binding, None] = {}
    for each in sets:
        if each is None or len(each) > LIMIT:
            return None
        found.update(dict.fromkeys(each))
    return tuple(found) if len(found) <= LIMIT else None


def _field_of_part(node: ast.AST) -> str:
    return "handlers" if isinstance(node, ast.ExceptHandler) else "cases"


def _first_place(node: Any) -> tuple[int, int]:
    return place(node.pattern if isinstance(node, ast.match_case) else node)


def _time_of(binding: Binding, *, last: bool) -> tuple[float, float]:
    """Return when a binding happens within its statement, as a place."""
    node: Any = binding.node
    if isinstance(node, ast.NamedExpr):
        return node.end_lineno or 0, node.end_col_offset or 0
    return (float("inf"), 0) if last else place(node)
