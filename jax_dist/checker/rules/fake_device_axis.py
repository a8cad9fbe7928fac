"""JXD204: batches and keys that are split by the number of devices."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker.model import semantic_model, stacking
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD204",
    name="fake-device-axis",
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

_PAD = ("flax.jax_utils.pad_shard_unpad",)
_WHAT = {
    Kind.SPLIT: "a batch is cut by the number of devices",
    Kind.KEYS: "one key for each device is made",
    Kind.REPLICATED: "one copy for each device is stacked",
}
_OF_FLAX = {
    stacking.PREFETCH[0]: "prefetch_to_device puts batches on devices that are cut for pmap",
    _PAD[0]: "pad_shard_unpad cuts its arguments for pmap",
    stacking.SHARD[0]: _WHAT[Kind.SPLIT],
    stacking.SHARD_KEY[0]: _WHAT[Kind.KEYS],
}
_METHODS = ("reshape", "split", "stack", "broadcast_to", "repeat", "tile", "map", "tree_map")
_CALLS = re.compile(rb"\b(?:reshape|split|stack|broadcast_to|repeat|tile|(?:tree_)?map)\b")


@rule(
    PAGE,
    triggers=(b"local_device_count", b"prefetch_to_device", b"pad_shard_unpad", b"*pmap*")
    + (b"common_utils.shard*", b"common_utils import", b"common_utils as"),
    since=(0, 8, 0),
)
def check(module: Module) -> Iterator[Found]:
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
    found = [
        node
        for node in semantic_model.of_kind(module, ast.Call, _CALLS)
        if _last_name(node.func) in _METHODS
    ]
    outer = {
        each
        for node in found
        if node.args and module.qualified_name(node.func) in stacking.TREE_MAPS
        if stacking.stacking(module, node) is not None
        for each in ast.walk(node.args[0])
    }
    return [node for node in found if node not in outer]


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
