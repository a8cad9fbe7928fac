"""Reaching definitions: which bindings of a name may hold where it is read.

From a read the search goes back and out, to the statements above it in each block around it, until
one surely binds the name. More than `LIMIT` bindings are given up, so the work stays linear.

    x = 1
    if c: x = 2
    y = x  # sees both bindings: the `if` may not run, so the search goes on above it
"""

import ast
import bisect
import itertools
from typing import Any, NamedTuple, TypeAlias

from jax_dist.lint.model.scopes import Binding, NameScope, Scopes, place

LIMIT = 48

_Bindings: TypeAlias = dict[Binding, None]  # an ordered set
_Block: TypeAlias = tuple[ast.AST, str]  # a list of statements: a node and its field, "orelse"


class _State(NamedTuple):  # what may hold the name at one point of a block
    bindings: _Bindings  # only those in the block
    hides_earlier: bool  # none above the block may: one of these surely ran, or they are too many


_WITH_BODIES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# A read inside of one of these may see any binding in it, later ones too; not so in an `if`.
_LOOP_TRY_OR_MATCH = (ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


class NameFlow:
    """One name of one scope: for each read the bindings that reach it, and the other way round.

    A "binding statement" binds the name itself, `x = 1`, or contains one that does.
    """

    def __init__(self, tree: Scopes, scope: NameScope, name: str):
        """Find the bindings that reach each read of `name`, a name that `scope` binds."""
        self._tree, self._scope = tree, scope
        bindings = scope.bindings[name]
        parameters = dict.fromkeys(item for item in bindings if item.kind == "parameter")
        # Made by functions that declare the name global or nonlocal, and may run at any time.
        from_functions = dict.fromkeys(item for item in bindings if item.kind == "outer")
        local = [item for item in bindings if item.kind not in ("outer", "parameter")]
        self._ordered = sorted(local, key=lambda binding: place(binding.node))
        self._positions = [place(binding.node) for binding in self._ordered]  # (line, column)
        self._last_binding: dict[ast.AST, Binding] = {}  # by statement, without those in its blocks
        self._binding_statements: dict[_Block, list[Any]] = {}  # by block, in order of line
        self._states: dict[_Block, list[_State]] = {}  # by block, after its first n of these
        self._before_cache: dict[ast.AST, _Bindings] = {scope.node: parameters}  # by statement
        self.reads: dict[ast.Name, list[Binding] | None] = {}  # None: more than LIMIT
        self.seen_by: dict[Binding, list[ast.Name]] = {}
        has_blocks = isinstance(scope.node, _WITH_BODIES)  # a lambda has none
        if has_blocks:
            self._collect_binding_statements()
        for load in tree.loads.get((scope, name), ()):
            reaching = self._find_reaching(load) if has_blocks else {}
            # A read that no binding reaches may still run after one, in a way that is not seen.
            reaching = (reaching or dict.fromkeys(self._ordered[: LIMIT + 1])) | from_functions
            self.reads[load] = list(reaching) if len(reaching) <= LIMIT else None
            for binding in self.reads[load] or ():
                self.seen_by.setdefault(binding, []).append(load)

    def _collect_binding_statements(self) -> None:
        """List the statements of each block that bind the name: `if c: x = 1`, and its `x = 1`."""
        listed: set[ast.AST] = {self._scope.node}
        for binding in self._ordered:
            statement: Any = self._tree.statement(binding.node)
            self._last_binding[statement] = binding
            while statement not in listed:  # else those around it are listed, too
                listed.add(statement)
                block = self._block_of(statement)
                self._binding_statements.setdefault(block, []).append(statement)
                statement = self._statement_around(statement)

    def _find_reaching(self, load: ast.Name) -> _Bindings:
        """Return the bindings that reach a read; if there are more than LIMIT, only some.

        A read in an inner function sees what holds where that function is made, and all that is
        bound below, for the function may be called at any time after.
        """
        function = self._tree.scope(load).around_comprehensions  # whose code reads
        if function is self._scope:
            statement = self._tree.statement(load)
            # The test of a `while` also runs after its body.
            before = self._bindings_before(statement)
            is_while = isinstance(statement, ast.While)
            return before | self._bindings_inside(statement) if is_while else before
        # Of functions in functions, take the one that the scope of the name itself holds.
        while function.parent and function.parent.around_comprehensions is not self._scope:
            function = function.parent.around_comprehensions
        definition = self._tree.statement(function.node)
        first_later = bisect.bisect_left(self._positions, place(definition))
        later = dict.fromkeys(self._ordered[first_later : first_later + LIMIT + 1])
        return self._bindings_before(definition) | later

    def _bindings_before(self, statement: Any) -> _Bindings:
        """Return the bindings that may hold where a statement begins, and cache them.

        Those of the statements around it are computed first, from the outside in.
        """
        unknown = []  # the statement and those around it, innermost first
        while statement not in self._before_cache:  # the scope's own node is known
            unknown.append(statement)
            statement = self._statement_around(statement)
        for inner in reversed(unknown):
            self._before_cache[inner] = self._compute_before(inner)
        return self._before_cache[unknown[0] if unknown else statement]

    def _statement_around(self, statement: Any) -> Any:
        """Return the statement whose block holds a statement, or the node of the scope."""
        around = self._tree.parents[statement]  # perhaps a handler or case
        return around if around is self._scope.node else self._tree.statement(around)

    def _compute_before(self, statement: Any) -> _Bindings:
        """Return the bindings before a statement; those before the one around it are cached.

        In the body of `for x in xs`, a read sees the target of the `for` alone; in the body of
        `while c`, all that the body binds, in an earlier iteration, and all from above the `while`.
        """
        block, around = self._block_of(statement), self._statement_around(statement)
        statements = self._binding_statements.get(block, [])
        count_above = bisect.bisect_left(statements, place(statement), key=place)
        bindings, hides_earlier = self._state_after(block, count_above)  # of this block alone
        if hides_earlier:
            return bindings
        in_any_order = isinstance(around, _LOOP_TRY_OR_MATCH)
        is_for_body = isinstance(around, ast.For | ast.AsyncFor) and block[1] == "body"
        binds_before_block = is_for_body or not in_any_order  # `for x in xs:`, `with f as x:`
        if around in self._last_binding and binds_before_block:
            return bindings | {self._last_binding[around]: None}
        inside = self._bindings_inside(around) if in_any_order else {}
        return bindings | inside | self._before_cache[around]

    def _block_of(self, statement: Any) -> _Block:  # such as (if_node, "orelse")
        return self._tree.parents[statement], self._tree.fields[statement]

    def _state_after(self, block: _Block, count: int) -> _State:
        """Return what holds after the first `count` binding statements of a block, and cache it."""
        states = self._states.setdefault(block, [_State({}, hides_earlier=False)])
        statements = self._binding_statements.get(block, [])
        while len(states) <= count:
            states.append(self._after_statement(statements[len(states) - 1], before=states[-1]))
        return states[count]

    def _after_statement(self, statement: Any, before: _State) -> _State:
        """Return what holds after a binding statement; `before` is what holds before it.

        After `x = 1` it is only that binding; after `if c: x = 1`, that one and those in `before`,
        for the `if` may not run.
        """
        if isinstance(statement, (ast.If, *_LOOP_TRY_OR_MATCH)):
            bindings = self._bindings_inside(statement) | before.bindings
            kept = dict.fromkeys(itertools.islice(bindings, LIMIT + 1))  # too many: none is used
            return _State(kept, before.hides_earlier or len(bindings) > LIMIT)
        from_body: _Bindings = {}
        if isinstance(statement, ast.With | ast.AsyncWith):  # its body surely runs
            body = statement, "body"
            count = len(self._binding_statements.get(body, []))
            from_body, hides_earlier = self._state_after(body, count)
            if hides_earlier:
                return _State(from_body, hides_earlier=True)
        if statement in self._last_binding:
            return _State(from_body | {self._last_binding[statement]: None}, hides_earlier=True)
        return _State(from_body | before.bindings, before.hides_earlier)

    def _bindings_inside(self, statement: Any) -> _Bindings:
        """Return all bindings inside a statement; at most LIMIT + 1 of them."""
        start = bisect.bisect_left(self._positions, place(statement))
        end = bisect.bisect_left(self._positions, (statement.end_lineno, statement.end_col_offset))
        return dict.fromkeys(self._ordered[start : min(end, start + LIMIT + 1)])
