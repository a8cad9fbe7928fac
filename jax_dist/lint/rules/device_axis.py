"""JXD201, JXD202, JXD203, JXD204, JXD205: the leading dimension over devices that pmap wants.

Where copies, batches and keys get it, and where results are used that have it.
"""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import flow, stacking
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.flow import Origin
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.lint.rules import Found, Page, rule

_REPLICATE = Page(
    code="JXD201",
    name="flax-replicate",
    summary="Flax's `replicate`",
    cost="a device axis in every shape that you save, log or compare",
    what="Finds every use of `flax.jax_utils.replicate`.",
    why="It adds a leading dimension with one copy for each device, because pmap splits its "
    "arguments along one. A replicated array needs no such dimension. With it, every shape "
    "that is saved, logged or compared has one dimension too many, which must be removed "
    "again (JXD202).",
    example="state = flax.jax_utils.replicate(state)\n",
    instead="state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))\n",
    fix="None by itself: the mapped functions that take the copies, and the code that unpacks "
    "them, must change too. `jax-dist migrate --to jax --idiomatic` changes them together.",
    since="jax 0.8.0: pmap is in maintenance mode. Before, pmap needed the copies.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured on jax 0.10.2: the copies "
    "are one array with the spec P('_device_put_sharded').",
)


@rule(_REPLICATE, triggers=(b"jax_utils",), since=(0, 8, 0))
def _flax_replicate(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.REPLICATE):
        yield Found(node, "replicate stacks one copy for each device on a new leading dimension")


_UNREPLICATE = Page(
    code="JXD202",
    name="flax-unreplicate",
    summary="Flax's `unreplicate`, or `x[0]` of a tree",
    cost="a computation over all devices to read one slice",
    what="Finds `flax.jax_utils.unreplicate`, and `tree_map(lambda x: x[0], tree)` if the file "
    "shows that the arrays come from a mapped call or were replicated.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us to "
    "read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices). The result is on "
    "all devices, and with several processes it can fail.",
    example="saved = flax.jax_utils.unreplicate(state)\n",
    instead="saved = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), state)\n",
    fix="Unsafe: the values are the same, but they are on the first device only, while `x[0]` "
    "puts them on all. Offered only if the file shows that every leaf is a jax.Array with one "
    "slice for each device.",
    since="jax 0.8.0: before, `x[0]` of a result of pmap was as cheap as reading the shard "
    "(66 us and 15 us on jax 0.7.2).",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured.",
)

_FIRST = "addressable_shards[0].data.squeeze(0)"


@rule(_UNREPLICATE, triggers=(b"jax_utils", b"*pmap*"), since=(0, 8, 0))
def _flax_unreplicate(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.UNREPLICATE):
        message = "unreplicate takes `x[0]` of sharded arrays, which computes over the whole mesh"
        yield Found(node, message, _fix_of_flax(module, node))
    for call in filter(None, map(module.call_of, module.uses(*stacking.TREE_MAPS))):
        tree = stacking.first_of_leaves(module, call)
        if tree is None or not flow.of(module).is_stacked(tree):
            continue
        if not any(origin.on_host for origin in flow.of(module).origins(tree)):
            message = "`x[0]` of sharded arrays computes over the whole mesh"
            yield Found(call, message, _fix_of_lambda(module, call.args[0], tree))


def _fix_of_flax(module: Module, function: ast.expr) -> Fix | None:
    call = module.call_of(function)
    if call is None or len(call.args) != 1 or call.keywords:
        return None
    if not _is_sliced(module, call.args[0]):
        return None
    name, imports = module.name_for("jax.tree.map", call)
    start = module.span(call.args[0])[0]
    edits = (Edit(*module.span(function), name), Edit(start, start, f"lambda x: x.{_FIRST}, "))
    return Fix("read the first shard", Safety.UNSAFE, edits, imports)


def _fix_of_lambda(module: Module, function: ast.expr, tree: ast.expr) -> Fix | None:
    body = function.body if isinstance(function, ast.Lambda) else None
    if not isinstance(body, ast.Subscript) or not _is_sliced(module, tree):
        return None
    edit = Edit(*module.span(body), f"{module.text(body.value)}.{_FIRST}")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))


def _is_sliced(module: Module, tree: ast.expr) -> bool:
    """Whether every leaf is surely a jax.Array with one slice for each device."""
    for origin in flow.of(module).origins(tree):
        if origin.on_host or not flow.is_whole(module, origin):
            return False
        if origin.kind is Kind.MAPPED and origin.site is not None:
            if "out_axes" in origin.site.arguments or origin.site.unknown:
                return False
        elif origin.kind is not Kind.REPLICATED:
            return False
        else:
            match origin.node:
                case ast.Call(func=function, args=[_], keywords=[]):
                    if module.qualified_name(function) not in stacking.REPLICATE:
                        return False
                case _:
                    return False
    return True


_INDEX = Page(
    code="JXD203",
    name="index-zero-of-sharded",
    summary="`y[0]` of what a mapped function returned",
    cost="a computation over all devices to read one slice",
    what="Finds `y[0]` if the file shows that `y` is an array that a mapped function returned, "
    "with one slice for each device. It says nothing if `y` may be a tuple.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us to "
    "read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices). In a training "
    "loop that logs each step, the devices wait during this time.",
    example="step = jax.pmap(lambda x: jnp.sum(x))\nloss = step(batch)[0]\n",
    instead="step = jax.pmap(lambda x: jnp.sum(x))\n"
    "loss = step(batch).addressable_shards[0].data.squeeze(0)\n",
    fix="Unsafe: the value is the same, but it is on the first device only, while `y[0]` puts it "
    "on all.",
    since="jax 0.8.0: before, `y[0]` of a result of pmap was cheap (66 us on jax 0.7.2).",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured.",
)


@rule(_INDEX, triggers=(b"*pmap*",), since=(0, 8, 0))
def _index_zero_of_sharded(module: Module) -> Iterator[Found]:
    values = flow.of(module)
    for node in _first_items(module) if values.mapped_calls else ():
        found = values.origins(node.value)
        if all(
            origin.kind is Kind.MAPPED
            and not origin.on_host
            and flow.is_tree(module, origin) is False
            for origin in found
        ):
            fix = _fix_of_index(module, node, found)
            yield Found(node, "[0] of a sharded array computes over the whole mesh", fix)


def _first_items(module: Module) -> Iterator[ast.Subscript]:
    """Every `y[0]` that is read; JXD202 speaks of `tree_map(lambda x: x[0], ...)`."""
    for node in module.nodes(ast.Subscript):
        match node:
            case ast.Subscript(slice=ast.Constant(value=0 as zero), ctx=ast.Load()):
                function = module.function(node)
                call = None if function is None else module.parent(function)
                of_leaf = isinstance(call, ast.Call) and stacking.first_of_leaves(module, call)
                if type(zero) is int and not of_leaf:
                    yield node


def _fix_of_index(module: Module, node: ast.Subscript, found: tuple[Origin, ...]) -> Fix | None:
    for origin in found:
        if origin.site is None or "out_axes" in origin.site.arguments or origin.site.unknown:
            return None
        if not flow.is_whole(module, origin):
            return None
    start, end = module.span(node.value)[1], module.span(node)[1]
    if module.source.code[start:end].replace(b" ", b"") != b"[0]":
        return None  # a parenthesis or a comment stands between
    return Fix("read the first shard", Safety.UNSAFE, (Edit(start, end, f".{_FIRST}"),))


_FAKE = Page(
    code="JXD204",
    name="fake-device-axis",
    summary="a batch, a key or a copy with a device axis made by hand",
    cost="data moves between devices at each call, if the cut does not fit",
    what="Finds arrays that get a leading device dimension for pmap: `x.reshape((n, -1))` and "
    "`jax.random.split(key, n)` with the number of devices as `n`, stacks of `n` copies, and "
    "Flax's `shard`, `shard_prng_key`, `prefetch_to_device` and `pad_shard_unpad`.",
    why="Under `jit(shard_map)` a batch is one global array, and its spec says how it is sharded. "
    "An array that is cut by hand has one dimension too many. If the cut disagrees with the "
    "spec, the array is moved between devices at each call, or refused.",
    example="batch = batch.reshape((jax.local_device_count(), -1) + batch.shape[1:])\n",
    instead="batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P('i')), batch)\n",
    fix="None by itself: the mapped functions that take the array must change too. `jax-dist "
    "migrate --to jax --idiomatic` changes them together.",
    since="jax 0.8.0: pmap is in maintenance mode. Before, pmap needed the dimension.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)

_WHAT = {
    Kind.SPLIT: "a batch is cut by the number of devices",
    Kind.KEYS: "one key for each device is made",
    Kind.REPLICATED: "one copy for each device is stacked",
}
_OF_FLAX = {
    stacking.PREFETCH[0]: "prefetch_to_device puts batches on devices that are cut for pmap",
    "flax.jax_utils.pad_shard_unpad": "pad_shard_unpad cuts its arguments for pmap",
    stacking.SHARD[0]: _WHAT[Kind.SPLIT],
    stacking.SHARD_KEY[0]: _WHAT[Kind.KEYS],
}
_METHODS = ("reshape", "split", "stack", "broadcast_to", "repeat", "tile", "map", "tree_map")


@rule(
    _FAKE,
    triggers=(b"local_device_count", b"prefetch_to_device", b"pad_shard_unpad", b"*pmap*")
    + (b"common_utils.shard*", b"common_utils import", b"common_utils as"),
    since=(0, 8, 0),
)
def _fake_device_axis(module: Module) -> Iterator[Found]:
    for name, message in _OF_FLAX.items():
        for node in module.uses(name):
            yield Found(node, message)
    by_name = b"pmap" in module.source.code
    for call in _candidates(module):
        done = stacking.stacking(module, call)
        if done is None or done.count is None or done.kind not in _WHAT:
            continue
        if stacking.counts_devices(module, done.count, by_name=by_name):
            yield Found(call, f"{_WHAT[done.kind]}, on a new leading dimension")


def _candidates(module: Module) -> list[ast.Call]:
    """Calls that may cut or stack, without those in the function of a `tree_map` that does."""
    found: list[ast.Call] = []
    for node in module.nodes(ast.Call):
        match node.func:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in _METHODS:
                found.append(node)
    outer = {
        each
        for node in found
        if node.args and module.qualified_name(node.func) in stacking.TREE_MAPS
        if stacking.stacking(module, node) is not None
        for each in ast.walk(node.args[0])
    }
    return [node for node in found if node not in outer]


_REDUCE = Page(
    code="JXD205",
    name="reduce-outside-jit",
    summary="`jnp.sum` or its like of a mapped result, outside `jit`",
    cost="one more program over all devices; may fail with several processes",
    what="Finds `jnp.sum`, `mean`, `max` and similar reductions of the result of a mapped "
    "function, outside any traced function.",
    why="Each is a program over the whole mesh, compiled and dispatched separately. With several "
    "processes it may fail, or change its meaning, because the array is now global. JAX's "
    "guide says that such reductions may be silently wrong; in one process we could not "
    "reproduce it (496.0 both ways, jax 0.10.2).",
    example="losses = jax.pmap(step)(batch)\nloss = jnp.mean(losses)\n",
    instead="losses = jax.pmap(step)(batch)\nloss = np.mean(jax.device_get(losses))\n",
    fix="None: the text does not show whether the mean of this process or of all is wanted.",
    since="jax 0.8.0: the result of a mapped function is one global array.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; not reproduced in one process.",
    default=False,
)

_REDUCTIONS = tuple(
    f"jax.numpy.{name}"
    for name in ("sum", "mean", "max", "min", "prod", "std", "var", "average", "median", "all")
)


@rule(_REDUCE, triggers=(b"*pmap*",), since=(0, 8, 0))
def _reduce_outside_jit(module: Module) -> Iterator[Found]:
    values = flow.of(module)
    for call in module.calls(*_REDUCTIONS) if values.mapped_calls else ():
        if not call.args or isinstance(module.function(call), ast.Lambda):
            continue  # a lambda is written for something that may trace it
        found = values.origins(call.args[0])
        if all(origin.kind is Kind.MAPPED and not origin.on_host for origin in found):
            message = "a reduction over devices outside jit may be slow, or wrong in many processes"
            yield Found(call, message)
