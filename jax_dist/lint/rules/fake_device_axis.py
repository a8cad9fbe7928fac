"""JXD204: a device axis that is made by hand."""

import ast

from jax_dist.lint.model import scopes, stacking
from jax_dist.lint.model.stacking import Kind
from jax_dist.lint.rules import Findings, Found, Module, Rule

_MESSAGES = {
    Kind.SPLIT: "a batch is cut by the number of devices",
    Kind.KEYS: "one key for each device is made",
    Kind.REPLICATED: "one copy for each device is stacked",
}

_MESSAGES_FOR_FLAX = {
    stacking.REPLICATE: "replicate stacks one copy for each device on a new leading dimension",
    stacking.PREFETCH: "prefetch_to_device puts batches on devices that are cut for pmap",
    "flax.jax_utils.pad_shard_unpad": "pad_shard_unpad cuts its arguments for pmap",
    stacking.SHARD: _MESSAGES[Kind.SPLIT],
    stacking.SHARD_KEY: _MESSAGES[Kind.KEYS],
}

_MAY_STACK = ("reshape", "split", "stack", "broadcast_to", "repeat", "tile", "map", "tree_map")


@Rule(
    "JXD204",
    what="Arrays that get a leading device dimension for pmap: `x.reshape((n, -1))` and "
    "`jax.random.split(key, n)` with the number of devices as `n`, stacks of `n` copies, and "
    "Flax's `replicate`, `shard`, `shard_prng_key`, `prefetch_to_device` and `pad_shard_unpad`.",
    why="Under `jit(shard_map)` a batch is one global array, and its spec says how it is "
    "sharded. One reshaped by hand has a dimension too many, and is moved between devices at "
    "each call, or rejected, if it disagrees with the spec. Replicated arrays need none.",
    instead="state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))\n"
    "batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P('i')), batch)\n"
    "# together with the mapped functions: jax-dist migrate --to shard_map changes them",
    triggers=(b"local_device_count", b"jax_utils", b"prefetch_to_device", b"pad_shard_unpad")
    + (b"pmap", b"common_utils"),
    since=(0, 8, 0),
)
def fake_device_axis(module: Module) -> Findings:
    for name, message in _MESSAGES_FOR_FLAX.items():
        for node in module.uses(name):
            yield Found(node, message)
    calls = [call for call in module.nodes(ast.Call) if scopes.last_name(call.func) in _MAY_STACK]
    changes = {call: stacking.read_stacking(module, call) for call in calls}
    # Of `tree_map(lambda x: x.reshape((n, -1)), batch)`, only the outer call is reported.
    in_tree_maps: set[ast.AST] = set()
    for call, change in changes.items():
        if change is not None and module.qualified_name(call.func) in stacking.TREE_MAPS:
            in_tree_maps.update(ast.walk(call.args[0]))
    has_pmap = b"pmap" in module.source.code  # where a name such as `num_devices` is enough
    for call, change in changes.items():
        if call in in_tree_maps or not change or not change.count or change.kind not in _MESSAGES:
            continue
        if stacking.counts_devices(module, change.count, by_name=has_pmap):
            yield Found(call, f"{_MESSAGES[change.kind]}, on a new leading dimension")
