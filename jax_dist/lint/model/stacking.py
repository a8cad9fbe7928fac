"""Dimensions over devices in front of arrays: what puts them there, and where values have them.

`stacking` looks at one expression. `Flow` follows a value back through names, unpacked tuples,
`self.` attributes and the functions of the file, until it meets what is known or not followed.
What is not followed is UNKNOWN: code that needs to be sure looks for it.
"""

import ast
import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.functions import Path
from jax_dist.lint.model.pmaps import Site
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
            parameter, made = _of_leaf(module, function)
            is_first = parameter is not None and _takes_first(made, parameter)
            return tree if is_first and module.qualified_name(mapping) in TREE_MAPS else None
    return None


def _of_leaf(module: Module, fun: ast.expr) -> tuple[str | None, ast.expr | None]:
    """Return the one parameter of a function and its one result, or None and None."""
    function = pmaps.definition(module, fun)
    if function is None:
        return None, None
    return functions.one_parameter(function), returned(function)


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
            | ast.Call(func=ast.Attribute(attr="expand_dims"), args=[inner, ast.Constant(value=0)])
        ):
            return inner
    return node


def _reshape(module: Module, call: ast.Call) -> _Stacking | None:
    """Return `jnp.reshape(x, (n, -1))`."""
    array, *shape = call.args
    return _as_batch(module, array, _first(module, shape[0])) if len(shape) == 1 else None


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
        shape = shape.left
        value = module.value(shape) if isinstance(shape, ast.Name) else None
        shape = value if isinstance(value, ast.Tuple) and module.holds(value) else shape
    return shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else None


_BY_NUMPY = {
    "stack": _stack,
    "array": _stack,
    "asarray": _stack,
    "broadcast_to": _broadcast_to,
    "repeat": _repeat,
    "tile": _repeat,
    "reshape": _reshape,
}


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


def lists_devices(module: Module, node: ast.expr, seen: _Seen = frozenset()) -> bool:
    """Return whether an expression is a list of devices."""
    if node in seen:
        return False
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in _LISTS
    values = module.values(node) or []
    return bool(values) and all(lists_devices(module, each, seen | {node}) for each in values)


_STACKED = frozenset((Kind.MAPPED, Kind.REPLICATED, Kind.KEYS, Kind.SPLIT))


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """One way in which a value may have come about."""

    kind: Kind
    node: ast.expr  # what made it, or what could not be followed further
    path: Path = ()  # from the whole that `node` made down to the value
    site: Site | None = None  # of a mapped call
    on_host: bool = False  # whether it went through `device_get` or NumPy

    @property
    def is_stacked(self) -> bool:
        """Return whether its arrays have a dimension over devices in front."""
        return self.kind in _STACKED


def is_tree(module: Module, origin: Origin) -> bool | None:
    """Return whether a stacked value is a tuple or dict; None if it may be either."""
    if origin.kind is Kind.KEYS:
        return False
    if origin.site is not None:
        return functions.result_is_tree(module, origin.site, origin.path)
    name = module.qualified_name(origin.node.func) if isinstance(origin.node, ast.Call) else None
    by_numpy = name is not None and name.rpartition(".")[0] in ("jax.numpy", "numpy")
    return False if by_numpy and not origin.path else None


_STEPS = 300  # before a value is given up: files where everything flows everywhere
_DEEPEST = 40  # steps on the way to a value, for each takes some of Python's stack
_LONGEST = 8  # of a path: `node = node.next` would make it longer without end
_SAME = frozenset(("jax.device_put", "jax.block_until_ready"))
_TO_HOST = frozenset(("jax.device_get", "numpy.asarray", "numpy.array"))
_NOT_ARRAYS = frozenset(("shape", "dtype", "ndim", "size", "sharding", "aval", "nbytes", "at", "T"))


class Flow:
    """The origins of values in one file."""

    def __init__(self, module: Module):
        self._module = module
        # The calls of mapped functions that this file shows, with what mapped them.
        self.mapped_calls: dict[ast.Call, Site] = {
            call: site
            for site in pmaps.applications(module)
            for call in pmaps.mapped_calls(module, site)
        }
        self._known: dict[ast.expr, tuple[Origin, ...]] = {}
        self._open: set[tuple[ast.AST, Path]] = set()
        self._steps = 0

    def origins(self, node: ast.expr) -> tuple[Origin, ...]:
        """Return all ways in which the value of an expression may have come about; at least one."""
        if node not in self._known:
            self._open.clear()
            self._steps = _STEPS
            found = tuple(dict.fromkeys(self._follow(node, ())))
            self._known[node] = found or (Origin(Kind.UNKNOWN, node),)
        return self._known[node]

    def is_stacked(self, node: ast.expr) -> bool:
        """Return whether a value surely has a dimension over devices in front."""
        return all(origin.is_stacked for origin in self.origins(node))

    def _follow(self, node: ast.expr, path: Path) -> list[Origin]:
        self._steps -= 1
        if (node, path) in self._open:
            return []  # a loop: what else flows in decides
        if self._steps < 0 or len(self._open) > _DEEPEST or len(path) > _LONGEST:
            return [Origin(Kind.UNKNOWN, node, path)]
        self._open.add((node, path))
        found = list(self._by_type(node, path))
        self._open.discard((node, path))
        return found

    def _by_type(self, node: ast.expr, path: Path) -> Iterable[Origin]:
        match node:
            case ast.Name():
                return self._of_name(node, path)
            case ast.Attribute():
                return self._of_attribute(node, path)
            case ast.Subscript():
                return self._of_subscript(node, path)
            case ast.Call():
                return self._of_call(node, path)
            case ast.NamedExpr(value=value):
                return self._follow(value, path)
            case ast.IfExp(body=one, orelse=other):
                return [*self._follow(one, path), *self._follow(other, path)]
            case ast.Constant(value=None):
                return []  # a name that has no value yet
        part = functions.part_of(node, path)
        return [Origin(Kind.UNKNOWN, node, path)] if part is None else self._follow(part, path[1:])

    def _of_name(self, node: ast.Name, path: Path) -> Iterator[Origin]:
        for binding in self._module.reaching(node) or (None,):
            target = None if binding is None else binding.node
            name = target if isinstance(target, ast.Name) else None
            unpacked = None if name is None else functions.unpacked(self._module, name)
            if binding is not None and binding.kind == "assign" and binding.value is not None:
                yield from self._follow(binding.value, path)
            elif name is not None and isinstance(name.ctx, ast.Del):
                pass
            elif unpacked is not None:
                yield from self._follow(unpacked[0], (*unpacked[1], *path))
            else:
                yield Origin(Kind.UNKNOWN, node, path)

    def _of_attribute(self, node: ast.Attribute, path: Path) -> Iterable[Origin]:
        module = self._module
        owner = module.class_of(node)
        stores: list[ast.Attribute] = []  # where the class sets `self.x`, in tuples too
        if owner is not None and (module.attribute_values(node) or pmaps.is_self(node)):
            stores = pmaps.self_attributes(module, owner, node.attr, ast.Store)
        if stores:
            found: list[Origin] = []
            for store in stores:
                unpacked = functions.unpacked(module, store)
                if unpacked is None:
                    return [Origin(Kind.UNKNOWN, node, path)]
                found += self._follow(unpacked[0], (*unpacked[1], *path))
            return found
        if node.attr in _NOT_ARRAYS or module.qualified_name(node) is not None:
            return [Origin(Kind.UNKNOWN, node, path)]
        return self._follow(node.value, (f".{node.attr}", *path))

    def _of_subscript(self, node: ast.Subscript, path: Path) -> Iterator[Origin]:
        match node.slice:
            case ast.Constant(value=str() as key):
                yield from self._follow(node.value, (key, *path))
            case ast.Constant(value=int() as position):
                for origin in self._follow(node.value, ()):
                    yield from self._item(node, origin, position, path)
            case _:
                yield Origin(Kind.UNKNOWN, node, path)

    def _item(
        self, node: ast.Subscript, whole: Origin, position: int, path: Path
    ) -> Iterable[Origin]:
        """Return what an item of a value is: of a tuple, a part; of an array, one device's."""
        tree = is_tree(self._module, whole) if whole.is_stacked else None
        part = functions.part_of(whole.node, (position,)) if not whole.is_stacked else None
        if part is not None and not whole.path:
            return self._follow(part, path)
        if tree:
            return [replace(whole, path=(*whole.path, position, *path))]
        if tree is False and position == 0:
            return [Origin(Kind.ONE, node, path, on_host=whole.on_host)]
        return [Origin(Kind.UNKNOWN, node, path)]

    def _of_call(self, call: ast.Call, path: Path) -> Iterable[Origin]:
        module = self._module
        site = self.mapped_calls.get(call)
        if site is not None:
            return [Origin(Kind.MAPPED, call, path, site)]
        done = stacking(module, call)
        if done is not None:
            # `a, b = split(key, n)`: no stack any more
            is_unpacked = done.kind is Kind.KEYS and path
            return [Origin(Kind.UNKNOWN if is_unpacked else done.kind, call, path)]
        tree = first_of_leaves(module, call)
        if tree is not None:  # the part of one device only where the tree is stacked
            found = self._follow(tree, ())
            is_one = found and all(origin.is_stacked for origin in found)
            on_host = all(origin.on_host for origin in found)
            return [Origin(Kind.ONE if is_one else Kind.UNKNOWN, call, path, on_host=on_host)]
        name = module.qualified_name(call.func)
        if call.args and name in _SAME:
            return self._follow(call.args[0], path)
        if call.args and name in _TO_HOST:
            return [replace(each, on_host=True) for each in self._follow(call.args[0], path)]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
            return self._follow(call.func.value, path)
        function = pmaps.definition(module, call.func)  # one of this file
        results = None if function is None else functions.results_of(function)
        if not results:
            return [Origin(Kind.UNKNOWN, call, path)]
        return [origin for result in results for origin in self._follow(result, path)]


def flow(module: Module) -> Flow:
    """Return the flow of a file, made once."""
    return module.once(Flow)
