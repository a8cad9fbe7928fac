"""JXD201: `flax.jax_utils.replicate`."""

from collections.abc import Iterator

from jax_dist.checker.model import stacking
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD201",
    name="flax-replicate",
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


@rule(PAGE, triggers=(b"jax_utils",), since=(0, 8, 0))
def check(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.REPLICATE):
        yield Found(node, "replicate stacks one copy for each device on a new leading dimension")
