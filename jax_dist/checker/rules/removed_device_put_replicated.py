"""JXD101: `jax.device_put_replicated`."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _rename_edits, _renames, rule

PAGE = Page(
    code="JXD101",
    name="removed-device-put-replicated",
    what="Finds `jax.device_put_replicated`, under any alias.",
    why="It was removed: jax 0.10.2 raises an AttributeError. Brax 0.14.2 does not start on that "
    "version for this reason.",
    example="import jax\n\nstate = jax.device_put_replicated(state, jax.local_devices())\n",
    instead="import jax\nimport jax_dist\n\n"
    "state = jax_dist.device_put_replicated(state, jax.local_devices())\n",
    fix="Safe: `jax_dist.device_put_replicated` gives the same shapes and values on the same "
    "devices, without a copy on the host for each device. In plain JAX, "
    "`jax.device_put(state, NamedSharding(mesh, P()))` has no leading device dimension, so "
    "the mapped function has to change too: `jax-dist migrate` does that.",
    since="jax 0.8.1: deprecated; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
)


@rule(PAGE, triggers=(b"device_put_replicated",))
def check(module: Module) -> Iterator[Found]:
    yield from _rename_edits.renamed(module, _renames.PLACEMENTS[:1])
