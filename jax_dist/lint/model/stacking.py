"""Dimensions over devices in front of arrays: the expressions that put them there."""

import ast
import dataclasses
import enum
import re
from typing import TypeAlias

from jax_dist.lint.model import pmaps
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


class Kind(enum.StrEnum):
    """Kinds of values, by the dimension over devices in front of their arrays."""

    REPLICATED = "one copy for each device"
    KEYS = "one key for each device"
    SPLIT = "a batch, split by the number of devices"
    ONE = "the part of one device"


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
    name = module.qualified_name(node.func) or ""
    if name in _DIRECT and node.args:
        return _Stacking(_DIRECT[name], node.args[0])
    if name in TREE_MAPS:
        return _tree_map(module, node)
    done = _written(module, node, name)
    if done is None or done.count is None or not counts_devices(module, done.count):
        return None
    return None if _is_of_mesh(module, done) else done


def _is_of_mesh(module: Module, done: _Stacking) -> bool:
    """Return whether it is devices that are put into a shape, for a mesh."""
    names = [each for each in ast.walk(done.of) if isinstance(each, ast.Name | ast.Attribute)]
    return done.kind is Kind.SPLIT and any(
        module.qualified_name(each) in _LISTS or lists_devices(module, each) for each in names
    )


_DIRECT = {
    "jax.device_put_replicated": Kind.REPLICATED,
    **dict.fromkeys(REPLICATE, Kind.REPLICATED),
    **dict.fromkeys(UNREPLICATE, Kind.ONE),
    **dict.fromkeys(SHARD, Kind.SPLIT),
    **dict.fromkeys(SHARD_KEY, Kind.KEYS),
}


def first_of_leaves(module: Module, node: ast.expr) -> ast.expr | None:
    """Return `tree` of `tree_map(lambda x: x[0], tree)`; None for anything else."""
    match node:
        case ast.Call(func=mapping, args=[function, tree], keywords=[]):
            parameter, made = _of_leaf(module, function)
            match made:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)):
                    is_tree_map = module.qualified_name(mapping) in TREE_MAPS
                    return tree if name == parameter and is_tree_map else None
    return None


def _of_leaf(module: Module, fun: ast.expr) -> tuple[str | None, ast.expr | None]:
    """Return the one parameter that a function needs and its one result, or None and None."""
    function = pmaps.definition(module, fun)
    if function is None:
        return None, None
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args]
    needed = names[: len(names) - len(arguments.defaults)]
    if len(needed) != 1 or arguments.vararg is not None:
        return None, None
    match function.body:
        case ast.expr() as result:  # of a lambda
            return needed[0].arg, result
        case [ast.Return(value=result)] | [ast.Expr(), ast.Return(value=result)]:
            return needed[0].arg, result
    return None, None


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


def _written(module: Module, call: ast.Call, name: str) -> _Stacking | None:
    """Return what a call would do if its count, as it is written, were that of the devices."""
    root, _, last = name.rpartition(".")
    keywords = {each.arg: each.value for each in call.keywords}
    count: ast.expr | None
    match last if root in _NUMPY else name, call.args:
        case "jax.random.split", [key, *rest]:
            count = [*rest, keywords.get("num")][0]
            if isinstance(count, ast.Tuple | ast.List) and len(count.elts) == 1:
                count = count.elts[0]
            return _Stacking(Kind.KEYS, key, count)
        case (("stack" | "array" | "asarray"), [copies, *_]):
            copied = _copies(copies)
            return None if copied is None else _Stacking(Kind.REPLICATED, *copied)
        case "broadcast_to", [array, *rest]:
            shape = [*rest, keywords.get("shape")][0]
            return _Stacking(Kind.REPLICATED, _without_new_axis(array), _first(module, shape))
        case (("repeat" | "tile"), [array, count, *_]) if _without_new_axis(array) is not array:
            count = _first(module, count) or count
            return _Stacking(Kind.REPLICATED, _without_new_axis(array), count)
        case "reshape", [array, shape]:
            return _Stacking(Kind.SPLIT, array, _first(module, shape))
    match call:  # `x.reshape((n, -1))`, `x.reshape(n, -1)`
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[shape]):
            return _Stacking(Kind.SPLIT, array, _first(module, shape))
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[count, _, *_]):
            return _Stacking(Kind.SPLIT, array, count)
    return None


def _copies(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return `(x, n)` of `[x] * n` and `[x for _ in range(n)]`."""
    match node:
        case (
            ast.BinOp(left=ast.List(elts=[one]), op=ast.Mult(), right=count)
            | ast.BinOp(left=count, op=ast.Mult(), right=ast.List(elts=[one]))
        ):
            return one, count
        case ast.ListComp(
            elt=one,
            generators=[
                ast.comprehension(
                    target=ast.Name(id=each),
                    iter=ast.Call(func=ast.Name(id="range"), args=[count]),
                    ifs=[],
                )
            ],
        ) if each not in {part.id for part in ast.walk(one) if isinstance(part, ast.Name)}:
            return one, count
    return None


def _without_new_axis(node: ast.expr) -> ast.expr:
    """Return `x` of `x[None]`; anything else as it is."""
    match node:
        case ast.Subscript(value=inner, slice=ast.Constant(value=None)):
            return inner
    return node


def _first(module: Module, shape: ast.expr | None) -> ast.expr | None:
    """Return the first size of `(n, ...)`, `[n, ...]`, `(n,) + rest`, `prefix + rest`."""
    while isinstance(shape, ast.BinOp) and isinstance(shape.op, ast.Add):
        shape = shape.left
        value = module.value(shape) if isinstance(shape, ast.Name) else None
        shape = value if isinstance(value, ast.Tuple) and module.holds(value) else shape
    return shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else None


_Seen: TypeAlias = frozenset[ast.expr]
_COUNTS = frozenset(("jax.device_count", "jax.local_device_count"))
_LISTS = frozenset(("jax.devices", "jax.local_devices"))
# Parameters and settings that say by their name that they count devices.
_COUNT_NAME = re.compile(r"(n|num|number_of)_(local_)?devices?|(local_)?device_count|n_?dev")


def counts_devices(
    module: Module, node: ast.expr, seen: _Seen = frozenset(), *, by_name: bool = True
) -> bool:
    """Return whether an expression is the number of devices.

    `by_name`: whether `num_devices` counts where nothing shows its value.
    """
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
        return all(counts_devices(module, value, seen, by_name=by_name) for value in values)
    last = getattr(node, "id", "") or getattr(node, "attr", "")
    return by_name and _COUNT_NAME.fullmatch(last.lower()) is not None


def lists_devices(
    module: Module, node: ast.expr, seen: _Seen = frozenset(), *, all_of_them: bool = False
) -> bool:
    """Return whether an expression is a list of devices; or of all of them."""
    if node in seen:
        return False
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in _LISTS
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and not all_of_them:
        return lists_devices(module, node.value, seen)
    if isinstance(node, ast.BoolOp) and not all_of_them:  # `devices or jax.local_devices()`
        return lists_devices(module, node.values[-1], seen)
    values, seen = module.values(node) or [], seen | {node}
    return bool(values) and all(
        lists_devices(module, value, seen, all_of_them=all_of_them) for value in values
    )
