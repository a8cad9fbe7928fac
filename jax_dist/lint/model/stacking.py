"""Calls that stack arrays for pmap: they add a leading dimension over devices, or change it."""

import ast
import dataclasses
import enum
import re
from typing import TypeAlias

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.semantic_model import Module

TREE_MAPS = frozenset(
    f"jax.{name}" for name in ("tree.map", "tree_map", "tree_util.tree_map", "tree_multimap")
)
REPLICATE = "flax.jax_utils.replicate"
UNREPLICATE = "flax.jax_utils.unreplicate"
HOST_LOCAL_TO_GLOBAL = "orbax.checkpoint.utils.fully_replicated_host_local_array_to_global_array"
PREFETCH = "flax.jax_utils.prefetch_to_device"
SHARD = "flax.training.common_utils.shard"
SHARD_KEY = "flax.training.common_utils.shard_prng_key"


class Kind(enum.StrEnum):
    """Kinds of values, by what lies along the leading dimension of their arrays."""

    REPLICATED = "one copy for each device"
    KEYS = "one key for each device"
    SPLIT = "a batch, split by the number of devices"
    ONE = "the part of one device"


@dataclasses.dataclass(frozen=True, slots=True)
class Stacking:
    """One call that adds, splits or removes a leading dimension over devices."""

    kind: Kind  # of the result: SPLIT of `x.reshape((n, -1))`
    operand: ast.expr  # the `x`
    count: ast.expr | None = None  # the number of devices, where it is written
    splits_rows: bool = True  # of SPLIT: it changes the first dimension alone


def read_stacking(module: Module, node: ast.expr) -> Stacking | None:
    """Return how a call changes the leading dimension over devices; None for other expressions.

    Such calls are `flax.jax_utils.replicate(x)`, `x.reshape((jax.device_count(), -1))` or
    `jax.tree.map(replicate, x)`. `x[0]` is not among them: only where `x` comes from can show
    whether it takes the part of one device.
    """
    if not isinstance(node, ast.Call):
        return None
    name = module.qualified_name(node.func) or ""
    if name in _KIND_OF_RESULT and node.args:
        return Stacking(_KIND_OF_RESULT[name], node.args[0])
    if name in TREE_MAPS:
        return _read_tree_map(module, node)
    change = _read_call_with_count(module, node, name)
    if change is None or change.count is None or not counts_devices(module, change.count):
        return None
    if change.kind is Kind.SPLIT:  # but a list of devices that is reshaped to a mesh is no batch
        names = [x for x in ast.walk(change.operand) if isinstance(x, ast.Name | ast.Attribute)]
        is_list = lambda name: module.qualified_name(name) in _LIST_DEVICES
        if any(is_list(name) or lists_devices(module, name) for name in names):
            return None
    return change


_KIND_OF_RESULT = {
    "jax.device_put_replicated": Kind.REPLICATED,
    HOST_LOCAL_TO_GLOBAL: Kind.ONE,
    REPLICATE: Kind.REPLICATED,
    UNREPLICATE: Kind.ONE,
    SHARD: Kind.SPLIT,
    SHARD_KEY: Kind.KEYS,
}


def first_of_leaves(module: Module, call: ast.Call) -> ast.expr | None:
    """Return `tree` of `jax.tree.map(lambda x: x[0], tree)`; None for any other call."""
    is_tree_map = module.qualified_name(call.func) in TREE_MAPS
    if not is_tree_map or len(call.args) != 2 or call.keywords:
        return None
    function, tree = call.args
    parameter, result = _leaf_function(module, function)
    return tree if result is not None and ast.unparse(result) == f"{parameter}[0]" else None


def _leaf_function(module: Module, fun: ast.expr) -> tuple[str | None, ast.expr | None]:
    """Return `("x", node of x[0])` of `lambda x: x[0]`, or of a def that only returns that.

    `(None, None)` for a function with other required parameters or more statements.
    """
    function = pmaps.definition(module, fun)
    if function is None:
        return None, None
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    if len(required) != 1 or arguments.vararg is not None:
        return None, None
    match function.body:
        case ast.expr() as result:  # of a lambda
            return required[0].arg, result
        # Of a def, perhaps below a docstring.
        case [ast.Return(value=result)] | [ast.Expr(), ast.Return(value=result)]:
            return required[0].arg, result
    return None, None


def _read_tree_map(module: Module, call: ast.Call) -> Stacking | None:
    """Return how a call such as `tree_map(replicate, tree)` changes each leaf of the tree.

    The function is a library's, such as Flax's `replicate`, or one of this file that changes its
    only parameter: `lambda x: x.reshape((n, -1))`. None for any other function.
    """
    if len(call.args) != 2:
        return None
    function, tree = call.args
    if kind := _KIND_OF_RESULT.get(module.qualified_name(function) or ""):
        return Stacking(kind, tree)
    parameter, result = _leaf_function(module, function)  # "x", and the node that is returned
    change = read_stacking(module, result) if parameter and result else None
    is_parameter = change is not None and getattr(change.operand, "id", "") == parameter
    return dataclasses.replace(change, operand=tree) if change and is_parameter else None


def _read_call_with_count(module: Module, call: ast.Call, name: str) -> Stacking | None:
    """Return what a call does to the leading dimension if its count is the number of devices.

    `x.reshape((n, -1))` splits a batch over devices only if `n` counts them: that is for the caller
    to check. `name` is the qualified name of the called function, "" if that is unknown.
    """
    home, _, last = name.rpartition(".")
    function = last if home in ("jax.numpy", "numpy") else name
    match function, call.args:
        case "jax.random.split", [key, *_]:
            return Stacking(Kind.KEYS, key, _argument(call, 1, "num"))
        case "stack" | "array" | "asarray", [copies, *_]:  # `[x] * n`
            copied = _copied_value(copies)
            return None if copied is None else Stacking(Kind.REPLICATED, *copied)
        # Both of `broadcast_to(x[None], shape)` and `broadcast_to(x, shape)`, x is copied.
        case "broadcast_to", [ast.Subscript(value=x, slice=ast.Constant(value=None)) | x, *_]:
            shape = _argument(call, 1, "shape")
            return Stacking(Kind.REPLICATED, x, _first_size(module, shape))
        # `repeat(x[None], n, 0)`, `tile(x[None], (n, 1))`
        case "repeat" | "tile", [ast.Subscript(value=x, slice=ast.Constant(value=None)), n, *_]:
            return Stacking(Kind.REPLICATED, x, _first_size(module, n) or n)
        case "reshape", [x, shape]:
            return Stacking(Kind.SPLIT, x, _first_size(module, shape), _splits_rows(shape))
    match call.func, call.args:
        case ast.Attribute(value=x, attr="reshape"), [first, *others]:
            shape = ast.Tuple(call.args) if others else first  # `x.reshape(n, -1)`, or `((n, -1))`
            return Stacking(Kind.SPLIT, x, _first_size(module, shape), _splits_rows(shape))
    return None


def _splits_rows(shape: ast.expr) -> bool:
    """Return whether a shape is `(n, -1)` or `(n, k) + rest`, but not `(n, k, -1) + rest`."""
    head = shape.left if isinstance(shape, ast.BinOp) else shape
    items = head.elts if isinstance(head, ast.Tuple | ast.List) else []
    sizes = [x for x in items if not isinstance(x, ast.Starred)]
    has_rest = head is not shape or len(sizes) < len(items)
    return len(sizes) <= 2 if has_rest else "-1" not in map(ast.unparse, sizes[2:])


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return the argument of a call at a position, or else by its name."""
    if position < len(call.args):
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _copied_value(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return `(x, n)` of `[x] * n` and of `[x for _ in range(n)]`; None for anything else."""
    match node:
        case (
            ast.BinOp(left=ast.List(elts=[value]), op=ast.Mult(), right=count)
            | ast.BinOp(left=count, op=ast.Mult(), right=ast.List(elts=[value]))
        ):
            return value, count
        case ast.ListComp(
            elt=value,
            generators=[
                ast.comprehension(
                    target=ast.Name(id=index),
                    iter=ast.Call(func=ast.Name(id="range"), args=[count]),
                    ifs=[],
                )
            ],
        ):
            names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
            return None if index in names else (value, count)
    return None


def _first_size(module: Module, shape: ast.expr | None) -> ast.expr | None:
    """Return `n` of a shape `(n, ...)`, `[n, ...]`, `(n,) + rest`, `prefix + rest`; or None."""
    while isinstance(shape, ast.BinOp) and isinstance(shape.op, ast.Add):
        shape = shape.left
        value = module.value(shape) if isinstance(shape, ast.Name) else None
        if isinstance(value, ast.Tuple) and module.holds(value):
            shape = value  # of `prefix = (n, 2)`
    return shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else None


_Seen: TypeAlias = frozenset[ast.expr]  # expressions followed so far, to stop at `n = n` in a loop
_COUNT_DEVICES = frozenset(("jax.device_count", "jax.local_device_count"))
_LIST_DEVICES = frozenset(("jax.devices", "jax.local_devices"))
# Names of parameters and settings that count devices.
_COUNT_NAME = re.compile(r"(n|num|number_of)_(local_)?devices?|(local_)?device_count|n_?dev")


def counts_devices(
    module: Module, node: ast.expr, seen: _Seen = frozenset(), *, by_name: bool = True
) -> bool:
    """Return whether an expression, such as `jax.device_count()`, is the number of devices.

    A variable is the number if all values that it may have are; with `by_name`, also if its values
    are not known, and its name is such as `num_devices`. `seen` has the expressions that led here.
    """
    if node in seen:
        return False
    seen |= {node}
    if isinstance(node, ast.Call):
        if module.qualified_name(node.func) in _COUNT_DEVICES:
            return True
        is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1
        return is_len and lists_devices(module, node.args[0], seen)
    if values := module.values(node):
        return all(counts_devices(module, value, seen, by_name=by_name) for value in values)
    return by_name and _COUNT_NAME.fullmatch(scopes.last_name(node).lower()) is not None


def lists_devices(
    module: Module, node: ast.expr, seen: _Seen = frozenset(), *, all_of_them: bool = False
) -> bool:
    """Return whether an expression, such as `jax.devices()`, is a list of devices.

    `all_of_them`: neither a slice of one nor the default in `devices or jax.devices()` counts.
    """
    if node in seen:
        return False
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in _LIST_DEVICES
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and not all_of_them:
        return lists_devices(module, node.value, seen)
    if isinstance(node, ast.BoolOp) and not all_of_them:  # `devices or jax.local_devices()`
        return lists_devices(module, node.values[-1], seen)
    values, seen = module.values(node) or [], seen | {node}
    return bool(values) and all(
        lists_devices(module, value, seen, all_of_them=all_of_them) for value in values
    )
