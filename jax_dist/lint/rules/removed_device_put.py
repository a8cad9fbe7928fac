"""JXD101: `jax.device_put_replicated` and `jax.device_put_sharded`, which jax 0.10 removed."""

from jax_dist.lint.rules import Findings, Module, Rule, _renames
from jax_dist.lint.rules._renames import Rename

_PLACE = "use jax.device_put with a NamedSharding, or jax-dist migrate"
_NAMES = tuple(
    Rename(f"jax.device_put_{how}", "", "0.10.0", _PLACE) for how in ("replicated", "sharded")
)


@Rule(
    "JXD101",
    what="`jax.device_put_replicated` and `jax.device_put_sharded`, under any alias.",
    why="They were removed in jax 0.10.0: an AttributeError. Brax 0.14.2 does not start on jax "
    "0.10.2 for this reason.",
    instead="state = jax.device_put(state, NamedSharding(mesh, P()))  # no leading dimension\n"
    "batch = jax.device_put(np.stack(shards), NamedSharding(mesh, P('i')))\n"
    "# jax-dist migrate puts functions of jax_dist with the old meaning in place\n"
    "https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
    triggers=(b"device_put_replicated", b"device_put_sharded"),
)
def removed_device_put(module: Module) -> Findings:
    yield from _renames.find_renamed(module, _NAMES)
