"""JXD101: `jax.device_put_replicated`, which jax 0.10 removed."""

from jax_dist.lint.rules import Findings, Module, Rule, _renames
from jax_dist.lint.rules._old_names import PLACEMENTS


@Rule(
    "JXD101",
    "removed-device-put-replicated",
    what="`jax.device_put_replicated`, under any alias.",
    why="It was removed in jax 0.10.0: an AttributeError. Brax 0.14.2 does not start on jax "
    "0.10.2 for this reason.",
    instead="state = jax.device_put(state, NamedSharding(mesh, P()))  # no leading device "
    "dimension\n"
    "`jax_dist.device_put_replicated` has the old meaning; `jax-dist migrate` puts it in place.\n"
    "https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
    triggers=(b"device_put_replicated",),
)
def removed_device_put_replicated(module: Module) -> Findings:
    yield from _renames.renamed(module, PLACEMENTS[:1])
