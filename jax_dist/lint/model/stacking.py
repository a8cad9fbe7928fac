"""Calls that put a dimension over devices in front of arrays, and those that take it off again.

What one expression does by itself; where its argument comes from is a matter of `flow`.
"""

import ast
import dataclasses
import enum
import re
from typing import Any

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.semantic_model import Module

TREE_MAPS = frozenset(
    f"jax.{name}" for name in ("tree.map", "tree_map", "tree_util.tree_map", "tree_multimap")
)
REPLICATE = ("flax.jax_utils.replicate",)
UNREPLICATE = ("flax.jax_utils.unreplicate",)
PREFETCH = ("flax.jax_utils.prefetch_to_device",)
SHARD = ("flax.training.common_utils.shard",)
SHARD_KEY = ("flax.training.common_utils.shard_prng_key",)

_NUMPY = ("jax.numpy", "numpy")
FIRST_SHARD = "addressable_shards[0].data.squeeze(0)"


class Kind(enum.StrEnum):
    """What a value is, as to a dimension over devices in front of its arrays."""

    MAPPED = "the result of a mapped call"
    REPLICATED = "one copy for each device"
    KEYS = "one key for each device"
    SPLIT = "a batch, split by the number of devices"
    ONE = "the part of one device"
    UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True, slots=True)
class _Stacking:
    """One expression that changes that dimension."""

    kind: Kind
    of: ast.expr  # what it is done to
    count: ast.expr | None = None  # the number of devices, where it is written


def stacking(module: Module, node: ast.expr) -> _Stacking | None:
    """Return what an expression does to the dimension over devices; None: nothing that is known.

    Taking the first element is not told here: without its origin, `x[0]` may mean anything.
    """
    if not isinstance(node, ast.Call):
        return None
    name = module.qualified_name(node.func)
    if name is None:
        return _reshape_method(module, node)
    if not node.args:
        return None
    root, _, last = name.rpartition(".")
    if name in _DIRECT:
        return _Stacking(_DIRECT[name], node.args[0])
    if name == "jax.device_put_sharded":
        return _from_shards(module, node)
    if name in TREE_MAPS:
        return _tree_map(module, node)
    if name == "jax.random.split":
        return _split(module, node)
    if root in _NUMPY and last in _BY_NUMPY:
        return _BY_NUMPY[last](module, node)
    return _reshape_method(module, node)


_DIRECT = {
    "jax.device_put_replicated": Kind.REPLICATED,
    **dict.fromkeys(REPLICATE, Kind.REPLICATED),
    **dict.fromkeys(UNREPLICATE, Kind.ONE),
    **dict.fromkeys(SHARD, Kind.SPLIT),
    **dict.fromkeys(SHARD_KEY, Kind.KEYS),
}


def _one_parameter(function: scopes.Function) -> str | None:
    """Return the name of the only parameter that a call must give."""
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args]
    needed = names[: len(names) - len(arguments.defaults)]
    return needed[0].arg if len(needed) == 1 and arguments.vararg is None else None


def returned(function: scopes.Function) -> ast.expr | None:
    """Return what a function returns, where that is its one statement."""
    if isinstance(function, ast.Lambda):
        return function.body
    body = [each for each in function.body if not isinstance(each, ast.Expr)]
    constants = [each.value for each in function.body if isinstance(each, ast.Expr)]
    match body:
        case [ast.Return(value=value)] if all(isinstance(each, ast.Constant) for each in constants):
            return value
    return None


def _takes_first(node: ast.expr | None, name: str) -> bool:
    """Return whether an expression is `name[0]`, or `name.addressable_data(0)`."""
    match node:
        case (
            ast.Subscript(value=ast.Name(id=found), slice=ast.Constant(value=0))
            | ast.Call(
                func=ast.Attribute(value=ast.Name(id=found), attr="addressable_data"),
                args=[ast.Constant(value=0)],
            )
        ):
            return found == name
    return False


def first_of_leaves(module: Module, node: ast.expr) -> ast.expr | None:
    """Return `tree` of `tree_map(lambda x: x[0], tree)`; None for anything else."""
    match node:
        case ast.Call(func=mapping, args=[function, tree], keywords=[]):
            if module.qualified_name(mapping) in TREE_MAPS:
                parameter, made = _of_leaf(module, function)
                return tree if parameter and _takes_first(made, parameter) else None
    return None


def _of_leaf(module: Module, fun: ast.expr) -> tuple[str | None, ast.expr | None]:
    """Return the one parameter of a function and its one result, or None and None."""
    function = pmaps.definition(module, fun)
    if function is None:
        return None, None
    return _one_parameter(function), returned(function)


def _tree_map(module: Module, call: ast.Call) -> _Stacking | None:
    """Return what is done to each leaf is done to the tree."""
    if len(call.args) != 2:
        return None
    function, tree = call.args
    named = isinstance(function, ast.Name | ast.Attribute)
    direct = _DIRECT.get(module.qualified_name(function) or "") if named else None
    if direct is not None:
        return _Stacking(direct, tree)
    parameter, made = _of_leaf(module, function)
    done = stacking(module, made) if parameter and made else None
    if done is None or not (isinstance(done.of, ast.Name) and done.of.id == parameter):
        return None
    return _Stacking(done.kind, tree, done.count)


def _split(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `split(key, n)`; `num=` may be a keyword, and a tuple of one number."""
    match [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "num")]:
        case [ast.Tuple(elts=[count]) | ast.List(elts=[count])] | [count]:
            return _counted(module, Kind.KEYS, call.args[0], count)
    return None


def _counted(module: Module, kind: Kind, of: ast.expr, count: ast.expr | None) -> _Stacking | None:
    """Return the stacking, where the count is the number of devices."""
    is_of_devices = count is not None and counts_devices(module, count)
    return _Stacking(kind, of, count) if is_of_devices else None


def _stack(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `stack([x] * n)`, `stack([x for _ in range(n)])`."""
    copied = _copies(module, call.args[0])
    return None if copied is None else _Stacking(Kind.REPLICATED, *copied)


def _copies(module: Module, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return `(x, n)` of a list that holds `x` once for each device."""
    match node:
        case (
            ast.BinOp(left=ast.List(elts=[one]), op=ast.Mult(), right=count)
            | ast.BinOp(left=count, op=ast.Mult(), right=ast.List(elts=[one]))
        ):
            pass
        case ast.ListComp(
            elt=one, generators=[ast.comprehension(target=ast.Name(id=each), iter=over, ifs=[])]
        ):
            if any(isinstance(part, ast.Name) and part.id == each for part in ast.walk(one)):
                return None
            match over:
                case ast.Call(func=ast.Name(id="range"), args=[count]):
                    pass
                case _:
                    return (one, over) if lists_devices(module, over) else None
        case _:
            return None
    return (one, count) if counts_devices(module, count) else None


def _from_shards(module: Module, call: ast.Call) -> _Stacking | None:
    shards: Any = call.args[0]
    copied = _copies(module, shards)
    if copied is not None:
        return _Stacking(Kind.REPLICATED, *copied)
    if isinstance(shards, ast.Call) and len(shards.args) == 1:  # list(split(key, n))
        shards = shards.args[0]
    inner = stacking(module, shards)
    if inner is not None and inner.kind is Kind.KEYS:
        return inner
    return _Stacking(Kind.SPLIT, call.args[0])


def _broadcast_to(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `broadcast_to(x, (n, *x.shape))`, `broadcast_to(x, (n,) + x.shape)`."""
    shape = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "shape")]
    count = _first(module, shape[0]) if shape else None
    return _counted(module, Kind.REPLICATED, _without_new_axis(call.args[0]), count)


def _repeat(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `repeat(x[None], n, axis=0)`, `tile(x[None], (n, 1))`."""
    inner = _without_new_axis(call.args[0])
    if inner is call.args[0] or len(call.args) < 2:
        return None
    return _counted(module, Kind.REPLICATED, inner, _first(module, call.args[1]) or call.args[1])


def _without_new_axis(node: ast.expr) -> ast.expr:
    match node:
        case (
            ast.Subscript(value=inner, slice=ast.Constant(value=None))
            | ast.Call(
                func=ast.Attribute(attr="expand_dims"),
                args=[inner, ast.Constant(value=0)],
                keywords=[],
            )
            | ast.Call(
                func=ast.Attribute(attr="expand_dims"),
                args=[inner],
                keywords=[ast.keyword(arg="axis", value=ast.Constant(value=0))],
            )
        ):
            return inner
    return node


def _reshape(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `jnp.reshape(x, (n, -1))`."""
    return (
        _as_batch(module, call.args[0], _first(module, call.args[1]))
        if len(call.args) == 2
        else None
    )


def _reshape_method(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `x.reshape((n, -1))`, `x.reshape(n, -1)`."""
    match call:
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[shape]):
            return _as_batch(module, array, _first(module, shape))
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[count, _, *_]):
            return _as_batch(module, array, count)
    return None


def _as_batch(module: Module, array: ast.expr, count: ast.expr | None) -> _Stacking | None:
    done = _counted(module, Kind.SPLIT, array, count)
    names = [each for each in ast.walk(array) if isinstance(each, ast.Name | ast.Attribute)]
    # Devices are put into a shape for a mesh.
    is_mesh = done is not None and any(
        module.qualified_name(each) in _LISTS or lists_devices(module, each) for each in names
    )
    return None if is_mesh else done


def _first(module: Module, shape: ast.expr) -> ast.expr | None:
    """Return the first size of `(n, ...)`, `[n, ...]`, `(n,) + rest`, `prefix + rest`."""
    while isinstance(shape, ast.BinOp) and isinstance(shape.op, ast.Add):
        shape = named_tuple(module, shape.left)
    if isinstance(shape, ast.Tuple | ast.List) and shape.elts:
        return shape.elts[0]
    return None


def named_tuple(module: Module, node: ast.expr) -> ast.expr:
    """Return the tuple that a name of this file holds; any other expression as it is."""
    value = module.value(node) if isinstance(node, ast.Name) else None
    return value if isinstance(value, ast.Tuple) and module.holds(value) else node


_BY_NUMPY = {
    "stack": _stack,
    "array": _stack,
    "asarray": _stack,
    "broadcast_to": _broadcast_to,
    "repeat": _repeat,
    "tile": _repeat,
    "reshape": _reshape,
}


_COUNTS = frozenset(("jax.device_count", "jax.local_device_count"))
_LISTS = frozenset(("jax.devices", "jax.local_devices"))
# Parameters and settings that say by their name that they count devices.
_COUNT_NAME = re.compile(r"(n|num|number_of)_(local_)?devices?|(local_)?device_count|n_?dev")


def counts_devices(module: Module, node: ast.expr, *, by_name: bool = True) -> bool:
    """Return whether an expression is the number of devices.

    `by_name`: whether `num_devices` counts where nothing shows its value.
    """
    return _counts(module, node, frozenset(), by_name=by_name)


def _counts(module: Module, node: ast.expr, seen: frozenset[ast.expr], *, by_name: bool) -> bool:
    if node in seen:
        return False
    seen |= {node}
    if isinstance(node, ast.Call):
        if module.qualified_name(node.func) in _COUNTS:
            return True
        is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1
        return is_len and lists_devices(module, node.args[0], seen)
    values = module.values(node)
    if values:
        return all(_counts(module, value, seen, by_name=by_name) for value in values)
    last = getattr(node, "id", "") or getattr(node, "attr", "")
    return by_name and _COUNT_NAME.fullmatch(last.lower()) is not None


def lists_devices(module: Module, node: ast.expr, seen: frozenset[ast.expr] = frozenset()) -> bool:
    """Return whether an expression is a list of devices."""
    if node in seen:
        return False
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in _LISTS
    values = module.values(node) or []
    return bool(values) and all(lists_devices(module, each, seen | {node}) for each in values)
