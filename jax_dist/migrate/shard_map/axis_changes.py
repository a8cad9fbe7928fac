"""Expressions that add the device axis, the leading dimension of pmap, remove or keep it.

A function of the project does what all its branches do to one of its parameters.
"""

import ast
import dataclasses
import os
from collections.abc import Iterator

from jax_dist.lint.model import pmaps, scopes, stacking
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map.expressions import argument_of, results_of

_DEEPEST = 4  # functions that call each other
_KEEPING = frozenset(f"jax.numpy.{name}" for name in ("array", "asarray", "astype", "copy"))
_TO_HOST = frozenset(("jax.device_get", "numpy.array", "numpy.asarray"))


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What an expression does to the device axis of its operand `of`."""

    kind: Kind | None  # of the result; None: the axis stays as it is
    of: ast.expr
    to_host: bool = False  # whether it may give arrays of NumPy


class AxisChanges:
    """Changes of the device axis by the calls of a file, also of functions from other files."""

    def __init__(self, module: Module, project: Project):
        self._module, self._project = module, project
        self._changes: dict[ast.AST, Change | None] = {}

    def find(self, node: ast.AST | None) -> Change | None:
        """Return how a call changes the device axis; None if it keeps it or cannot be analyzed."""
        change = self._change_of(node)
        return None if change is None or change.kind is None else change

    def find_first(self, node: ast.AST | None) -> Change | None:
        """Return the change of a call such as `unreplicate(x)`, which is `x[0]`; else None."""
        change = self._change_of(node)
        return change if change is not None and change.kind is Kind.ONE else None

    def find_unchanged(self, node: ast.AST | None) -> ast.expr | None:
        """Return the argument that a call returns with the same axis, on the devices; else None."""
        change = self._change_of(node)
        return change.of if change and change.kind is None and not change.to_host else None

    def _change_of(self, node: ast.AST | None) -> Change | None:
        """Return what nested calls do to the axis of the innermost `x`: `asarray(replicate(x))`."""
        if not isinstance(node, ast.Call):
            return None
        if node not in self._changes:
            change = self._outer(self._module, node, 0)
            while change is not None and change.kind is None:
                inner = self._outer(self._module, change.of, 0)
                if inner is None:
                    break
                change = _compose(change, inner)
            self._changes[node] = change
        return self._changes[node]

    def _outer(
        self, module: Module, node: ast.expr, depth: int, *, of_array: bool = False
    ) -> Change | None:
        """Return what the outermost call of an expression does to the axis; None if unknown.

        `of_array`: the expression is of one array, in a function for `tree.map`.
        """
        stacked = stacking.stacking(module, node)
        if stacked is not None:
            return Change(stacked.kind, stacked.of)
        name = module.qualified_name(node.func) if isinstance(node, ast.Call) else None
        if of_array and name is None:
            return _read_array(node)
        if not isinstance(node, ast.Call) or not node.args:
            return None
        if name in _KEEPING or name == "jax.device_put":
            return Change(None, node.args[0])
        if name in _TO_HOST:
            return Change(None, node.args[0], to_host=True)
        if name in stacking.TREE_MAPS and len(node.args) == 2:
            home, function = self._definition(module, node.args[0])
            change = self._read_function(home, function, depth, of_array=True)
            return change and dataclasses.replace(change, of=node.args[1])
        home, function = self._definition(module, node.func)
        change = self._read_function(home, function, depth)
        if function is None or change is None or not isinstance(change.of, ast.Name):
            return None
        named = {parameter.arg: parameter for parameter in scopes.parameters(function.args)}
        argument = argument_of(home, node, function, named[change.of.id])
        return argument and dataclasses.replace(change, of=argument)

    def _definition(self, module: Module, fun: ast.expr) -> tuple[Module, scopes.Function | None]:
        """Return the file of the project that defines a function, and its def; or None for that."""
        function = pmaps.definition(module, fun)
        if function is not None:
            return module, function
        home, _, name = (module.qualified_name(fun) or "").rpartition(".")
        path = self._project.file(home, os.path.dirname(os.path.abspath(module.source.path)))
        other = self._project.opened(path) if home and path else None
        bindings = other.scopes.module.bindings.get(name, ()) if other else ()
        node = bindings[0].node if len(bindings) == 1 else None
        return (other, node) if other and isinstance(node, ast.FunctionDef) else (module, None)

    def _read_function(
        self,
        module: Module,
        function: scopes.Function | None,
        depth: int,
        *,
        of_array: bool = False,
    ) -> Change | None:
        """Return what a function does to the parameter that it returns; None if unknown.

        `Change.of` is then that parameter's name in the function. All branches must agree.
        """
        results = results_of(function) if function and depth < _DEEPEST else None
        if function is None or not results:
            return None
        names = {parameter.arg for parameter in scopes.parameters(function.args)}
        changes: list[Change] = []
        for branch in (part for result in results for part in _branches(result)):
            change: Change | None = Change(None, branch)
            while change is not None:  # from the result inwards, down to a parameter
                value = module.value(change.of)
                if value is None and getattr(change.of, "id", None) in names:
                    changes.append(change)
                    break
                inner = Change(None, value) if value is not None else None
                inner = inner or self._outer(module, change.of, depth + 1, of_array=of_array)
                change = inner and _compose(change, inner)
            if change is None:
                return None
        kinds = {change.kind for change in changes} - {None}
        if len(kinds) > 1 or len({ast.unparse(change.of) for change in changes}) != 1:
            return None
        to_host = any(change.to_host for change in changes)
        return Change(next(iter(kinds), None), changes[0].of, to_host)


def _compose(outer: Change, inner: Change) -> Change | None:
    """Return what `outer(inner(x))` does to the axis of `x`; None if both change it."""
    if outer.kind is not None and inner.kind is not None:
        return None
    return Change(outer.kind or inner.kind, inner.of, outer.to_host or inner.to_host)


def _read_array(node: ast.expr) -> Change | None:
    """Return what `x[0]`, `x.squeeze(0)`, `x.astype(t)` and the like do to an array `x`."""
    match node:
        case (
            ast.Subscript(value=array, slice=ast.Constant(value=0))
            | ast.Call(
                func=ast.Attribute(value=array, attr="squeeze"), args=[ast.Constant(value=0)]
            )
        ):
            return Change(Kind.ONE, array)
        case (
            ast.Call(func=ast.Attribute(value=array, attr="astype" | "copy" | "addressable_data"))
            | ast.Attribute(
                value=ast.Subscript(value=ast.Attribute(value=array, attr="addressable_shards")),
                attr="data",
            )
        ):
            return Change(None, array)
    return None


def _branches(node: ast.expr) -> Iterator[ast.expr]:
    """Yield `a` and `c` of `a if b else c`, at any depth; of other expressions the whole."""
    if isinstance(node, ast.IfExp):
        yield from (*_branches(node.body), *_branches(node.orelse))
    else:
        yield node
