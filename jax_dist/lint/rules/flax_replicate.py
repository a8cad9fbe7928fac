"""JXD201: Flax's `replicate`."""

from jax_dist.lint.model import stacking
from jax_dist.lint.rules import Findings, Found, Module, Rule


@Rule(
    "JXD201",
    "flax-replicate",
    what="`flax.jax_utils.replicate`.",
    why="It adds a leading dimension with one copy for each device, because pmap splits its "
    "arguments along one. A replicated array needs none; with it, every shape that is saved, "
    "logged or compared is wrong by one dimension.",
    instead="state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))\n"
    "# together with the mapped functions: jax-dist migrate --to shard_map changes them",
    triggers=(b"jax_utils",),
    since=(0, 8, 0),
)
def flax_replicate(module: Module) -> Findings:
    for node in module.uses(*stacking.REPLICATE):
        yield Found(node, "replicate stacks one copy for each device on a new leading dimension")
