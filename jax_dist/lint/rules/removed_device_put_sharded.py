"""JXD102: `jax.device_put_sharded`, which jax 0.10 removed."""

from jax_dist.lint.rules import Findings, Module, Rule, _renames
from jax_dist.lint.rules._old_names import PLACEMENTS


@Rule(
    "JXD102",
    "removed-device-put-sharded",
    what="`jax.device_put_sharded`, under any alias.",
    why="It was removed in jax 0.10.0: an AttributeError.",
    instead="batch = jax.device_put(np.stack(shards), NamedSharding(mesh, P('i')))\n"
    "`jax_dist.device_put_sharded` has the old meaning; `jax-dist migrate` puts it in "
    "place.\n"
    "https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
    triggers=(b"device_put_sharded",),
)
def removed_device_put_sharded(module: Module) -> Findings:
    yield from _renames.renamed(module, PLACEMENTS[1:])
