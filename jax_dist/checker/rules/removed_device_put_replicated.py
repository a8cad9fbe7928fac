"""JXD101: `jax.device_put_replicated`."""

from collections.abc import Iterator

from jax_dist.checker import renames, renaming
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Found, Keep, Mend, rule

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
    yield from renaming.renamed(module, renames.PLACEMENTS[:1])


CASES: tuple[Case, ...] = (
    Keep("ours", "import jax_dist\nx = jax_dist.device_put_replicated(x, devices)\n"),
    Keep(
        "ready for it to be missing",
        "import jax\nif hasattr(jax, 'device_put_replicated'):\n"
        "    put = jax.device_put_replicated\nelse:\n    put = mine\n",
    ),
    Mend(
        "passed on",
        "import jax\nput = jax.device_put_replicated\nput(x, d)\n",
        "import jax\nimport jax_dist\nput = jax_dist.device_put_replicated\nput(x, d)\n",
    ),
    Mend(
        "an attribute",
        "import jax\nx = jax.device_put_replicated(x, d)  # to all\n",
        "import jax\nimport jax_dist\nx = jax_dist.device_put_replicated(x, d)  # to all\n",
    ),
    Mend(
        "the import, under another name",
        "from jax import device_put_replicated as put\nx = put(x, d)\n",
        "from jax_dist import device_put_replicated as put\nx = put(x, d)\n",
    ),
)
