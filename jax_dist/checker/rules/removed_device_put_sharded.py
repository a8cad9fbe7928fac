"""JXD102: `jax.device_put_sharded`."""

from collections.abc import Iterator

from jax_dist.checker import renames, renaming
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Found, Keep, Mend, rule

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
    yield from renaming.renamed(module, renames.PLACEMENTS[1:])


CASES: tuple[Case, ...] = (
    Keep("ours", "import jax_dist\nx = jax_dist.device_put_sharded(x, devices)\n"),
    Keep(
        "ready for it to be missing",
        "import jax\nif hasattr(jax, 'device_put_sharded'):\n"
        "    put = jax.device_put_sharded\nelse:\n    put = mine\n",
    ),
    Mend(
        "passed on",
        "import jax\nput = jax.device_put_sharded\nput(x, d)\n",
        "import jax\nimport jax_dist\nput = jax_dist.device_put_sharded\nput(x, d)\n",
    ),
    Mend(
        "an attribute",
        "import jax\nx = jax.device_put_sharded(x, d)  # one each\n",
        "import jax\nimport jax_dist\nx = jax_dist.device_put_sharded(x, d)  # one each\n",
    ),
    Mend(
        "the import, under another name",
        "from jax import device_put_sharded as put\nx = put(x, d)\n",
        "from jax_dist import device_put_sharded as put\nx = put(x, d)\n",
    ),
)
