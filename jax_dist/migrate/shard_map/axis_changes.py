"""Expressions that add the device axis, the leading dimension of pmap, remove or keep it."""

import ast
import dataclasses
import os
from typing import Any, NamedTuple

from jax_dist.lint.model import pmaps, scopes, stacking
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map import flow

_MAX_DEPTH = 4  # of functions that call each other
_KEEP_AXIS = frozenset(
    ("jax.device_put", *(f"jax.numpy.{name}" for name in ("array", "asarray", "astype", "copy")))
)
_TO_HOST = frozenset(("jax.device_get", "numpy.array", "numpy.asarray"))


@dataclasses.dataclass(frozen=True, slots=True)
class AxisChange:
    """Change of the device axis of an operand `x` by an expression.

    `replicate(x)` adds the axis (Kind.REPLICATED), `unreplicate(x)` removes it (Kind.ONE), and
    `jnp.asarray(x)` keeps it (None).
    """

    kind: Kind | None
    operand: Any  # of an expression, `x`; of a function, its parameter
    to_host: bool = False  # whether it may give NumPy arrays


class _Function(NamedTuple):
    module: Module  # the file of the project that defines it
    node: scopes.Function


class AxisChanges:
    """Changes of the device axis by the calls of a file, also of functions from other files."""

    def __init__(self, module: Module, project: Project):
        self._module, self._project = module, project
        self._changes: dict[ast.AST, AxisChange | None] = {}

    def find(self, node: ast.AST | None) -> AxisChange | None:
        """Return how a call changes the device axis; None if it keeps it or cannot be analyzed."""
        change = self._find_change(node)
        return None if change is None or change.kind is None else change

    def find_unreplicate(self, node: ast.AST | None) -> AxisChange | None:
        """Return the change of a call such as `unreplicate(x)`, which gives `x[0]`; else None."""
        change = self._find_change(node)
        return change if change is not None and change.kind is Kind.ONE else None

    def find_converted(self, node: ast.AST | None) -> ast.expr | None:
        """Return `x` of `jnp.asarray(x)`, which keeps the device axis on the devices; else None."""
        change = self._find_change(node)
        return change.operand if change and change.kind is None and not change.to_host else None

    def _find_change(self, node: ast.AST | None) -> AxisChange | None:
        """Return what nested calls do to the device axis of the `x` inside; None if unknown."""
        # `jnp.asarray(replicate(x))` adds the axis: `asarray` keeps what `replicate` adds to `x`.
        if not isinstance(node, ast.Call):
            return None
        if node not in self._changes:
            change = self._read_call(self._module, node, depth=0)
            if change is not None and change.kind is None:  # the outer call keeps the axis
                inner = self._find_change(change.operand)
                change = change if inner is None else _compose(change, inner)
            self._changes[node] = change
        return self._changes[node]

    def _read_call(
        self, module: Module, node: ast.expr, depth: int, *, is_leaf: bool = False
    ) -> AxisChange | None:
        """Return what the outermost call of an expression does to the device axis; None if unknown.

        `is_leaf`: of `f` in `tree.map(f, tree)`, where `x[0]` and methods of arrays count as well.
        """
        stacked = stacking.read_stacking(module, node)
        if stacked is not None and stacked.splits_rows:
            return AxisChange(stacked.kind, stacked.operand)
        name = module.qualified_name(node.func) if isinstance(node, ast.Call) else None
        if is_leaf and name is None:
            return _read_method(node)
        match node:
            case ast.Call(args=[x, *_]) if name in _KEEP_AXIS or name in _TO_HOST:
                return AxisChange(None, x, to_host=name in _TO_HOST)  # `jnp.asarray(x)`
            case ast.Call(args=[fun, tree]) if name in stacking.TREE_MAPS:  # `tree.map(fun, tree)`
                function = self._find_function(module, fun)
                change = self._read_function(function, depth, is_leaf=True) if function else None
                return dataclasses.replace(change, operand=tree) if change else None
            case ast.Call(func=fun, args=[_, *_]):  # `fun(x)`, with a function of the project
                function = self._find_function(module, fun)
                change = self._read_function(function, depth) if function else None
                if function is not None and change is not None:
                    x = flow.argument_of(function.module, node, function.node, change.operand)
                    return dataclasses.replace(change, operand=x) if x else None
        return None

    def _find_function(self, module: Module, fun: ast.expr) -> _Function | None:
        """Return the def or lambda that a name means, in this file or another of the project."""
        function = pmaps.definition(module, fun)
        if function is not None:
            return _Function(module, function)
        dotted_module, _, name = (module.qualified_name(fun) or "").rpartition(".")
        folder = os.path.dirname(os.path.abspath(module.source.path))
        path = self._project.file(dotted_module, folder)
        other = self._project.opened(path) if dotted_module and path else None
        bindings = other.scopes.module.bindings.get(name, ()) if other else ()
        node = bindings[0].node if len(bindings) == 1 else None
        return _Function(other, node) if other and isinstance(node, ast.FunctionDef) else None

    def _read_function(
        self, function: _Function, depth: int, *, is_leaf: bool = False
    ) -> AxisChange | None:
        """Return what a function does to the axis of its parameter `x`; None if unknown."""
        # All results have to be of one parameter; some may keep its axis: `if n == 1: return x`.
        if depth >= _MAX_DEPTH:
            return None
        results = flow.results_of(function.node)
        changes = [self._read_branch(function, x, depth, is_leaf=is_leaf) for x in results]
        known = [change for change in changes if change is not None]
        kinds = {change.kind for change in known} - {None}  # None: a branch keeps the axis
        parameters = {change.operand for change in known}
        if len(known) < len(changes) or len(kinds) > 1 or len(parameters) != 1:
            return None
        to_host = any(change.to_host for change in known)
        return AxisChange(next(iter(kinds), None), parameters.pop(), to_host)

    def _read_branch(
        self, function: _Function, result: ast.expr, depth: int, *, is_leaf: bool
    ) -> AxisChange | None:
        """Return what a result does to the axis of the parameter inside of it; None if unknown."""
        # The result `replicate(y)` below `y = jnp.asarray(x)` is followed from `replicate(y)` to
        # `y`, to `asarray(x)` and to the parameter `x`: it adds the axis.
        parameters = {x.arg: x for x in scopes.parameters(function.node.args)}
        change: AxisChange | None = AxisChange(None, result)  # what is known so far
        while change is not None:
            operand = change.operand
            value = function.module.value(operand)  # of a variable
            parameter = parameters.get(getattr(operand, "id", ""))
            if value is not None:
                change = dataclasses.replace(change, operand=value)
            elif parameter is not None:
                return dataclasses.replace(change, operand=parameter)
            else:
                inner = self._read_call(function.module, operand, depth + 1, is_leaf=is_leaf)
                change = None if inner is None else _compose(change, inner)
        return None


def _compose(outer: AxisChange, inner: AxisChange) -> AxisChange | None:
    """Return what `outer(inner(x))` does to the axis of `x`; None if both change it."""
    if outer.kind is not None and inner.kind is not None:
        return None
    return AxisChange(outer.kind or inner.kind, inner.operand, outer.to_host or inner.to_host)


def _read_method(node: ast.expr) -> AxisChange | None:
    """Return what `x[0]`, `x.squeeze(0)`, `x.astype(t)` and the like do to an array `x`."""
    match node:
        case ast.Subscript(value=array, slice=ast.Constant(value=0)):
            return AxisChange(Kind.ONE, array)
        case ast.Call(
            func=ast.Attribute(value=array, attr="squeeze"), args=[ast.Constant(value=0)]
        ):
            return AxisChange(Kind.ONE, array)
        case ast.Call(func=ast.Attribute(value=array, attr="astype" | "copy" | "addressable_data")):
            return AxisChange(None, array)
        case ast.Attribute(value=ast.Subscript(value=ast.Attribute() as shards), attr="data"):
            return AxisChange(None, shards.value) if shards.attr == "addressable_shards" else None
    return None
