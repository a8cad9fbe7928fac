"""JXD102: `jax.device_put_sharded`."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _rename_edits, _renames, rule

PAGE = Page(
    code="JXD102",
    name="removed-device-put-sharded",
    what="Finds `jax.device_put_sharded`, under any alias.",
    why="It was removed: jax 0.10.2 raises an AttributeError.",
    example="import jax\n\nbatch = jax.device_put_sharded(shards, jax.local_devices())\n",
    instead="import jax\nimport jax_dist\n\n"
    "batch = jax_dist.device_put_sharded(shards, jax.local_devices())\n",
    fix="Safe: `jax_dist.device_put_sharded` gives the same shapes and values on the same "
    "devices. In plain JAX, `jax.device_put(np.stack(shards), NamedSharding(mesh, P('i')))` "
    "is similar.",
    since="jax 0.8.1: deprecated; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
)


@rule(PAGE, triggers=(b"device_put_sharded",))
def check(module: Module) -> Iterator[Found]:
    yield from _rename_edits.renamed(module, _renames.PLACEMENTS[1:])
