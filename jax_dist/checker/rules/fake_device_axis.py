"""JXD204: batches and keys that are split by the number of devices."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker import counting, nodes, stacking
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule
from jax_dist.checker.stacking import Kind

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
        if counting.counts_devices(module, done.count, by_name=by_name):
            yield Found(call, f"{_WHAT[done.kind]}, on a new leading dimension")


def _candidates(module: Module) -> list[ast.Call]:
    """Calls that may cut or stack, without those in the function of a `tree_map` that does."""
    found = [
        node
        for node in nodes.of_kind(module, ast.Call, _CALLS)
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


CASES: tuple[Case, ...] = (
    Keep(
        "devices that are put into a mesh",
        "import jax\nimport numpy as np\nn = jax.local_device_count()\n"
        "grid = np.asarray(jax.devices()).reshape(n, 1)\n",
    ),
    Keep("keys for something else", "import jax\nf = jax.pmap(g)\nks = jax.random.split(key, 4)\n"),
    Keep(
        "a batch cut by something else",
        "import jax\nf = jax.pmap(g)\ny = x.reshape((num_envs, -1))\n",
    ),
    Keep(
        "a size that only carries the name, in a file without pmap",
        "import jax\nn = jax.local_device_count()\ndef cut(x, num_devices):\n"
        "    return x.reshape((num_devices, -1))\n",
    ),
    Flag(
        "a batch, cut by name",
        "import jax\nn = jax.local_device_count()\nb = b.reshape((n, -1) + b.shape[1:])\n",
        (3,),
    ),
    Flag(
        "each array of a batch",
        "import jax\nn = len(jax.local_devices())\nf = jax.pmap(g)\n"
        "b = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), b)\n",
        (4,),
    ),
    Flag(
        "keys",
        "import jax\nf = jax.pmap(g)\nks = jax.random.split(key, num=jax.device_count())\n",
        (3,),
    ),
    Flag(
        "copies",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(g)\nn = jax.local_device_count()\n"
        "a = jnp.stack([x] * n)\nb = jnp.broadcast_to(x, (n,) + x.shape)\n"
        "c = jnp.stack([x for _ in range(n)])\n",
        (5, 6, 7),
    ),
    Flag(
        "a number that a parameter's name tells, beside pmap",
        "import jax\ndef cut(x, num_devices):\n    return x.reshape((num_devices, -1))\n"
        "f = jax.pmap(g)\n",
        (3,),
    ),
    Flag(
        "flax's helpers",
        "import flax.jax_utils\nfrom flax.training import common_utils\n"
        "it = flax.jax_utils.prefetch_to_device(map(common_utils.shard, it), 2)\n",
        (3, 3),
    ),
)
