"""JXD201: `flax.jax_utils.replicate`."""

from collections.abc import Iterator

from jax_dist.checker import stacking
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule

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


CASES: tuple[Case, ...] = (
    Keep(
        "another library's replicate",
        "import jax\nfrom mesh import jax_utils\ns = jax_utils.replicate(s)\n",
    ),
    Keep(
        "the file's own replicate",
        "from flax import jax_utils\ndef replicate(x): return x\ns = replicate(s)\n",
    ),
    Flag("a call", "from flax import jax_utils\ns = jax_utils.replicate(s)\n", (2,)),
    Flag("the whole path", "import flax\ns = flax.jax_utils.replicate(s)\n", (2,)),
    Flag("the function itself", "from flax.jax_utils import replicate as r\ns = r(s)\n", (2,)),
    Flag("a value", "from flax import jax_utils\nss = map(jax_utils.replicate, ss)\n", (2,)),
)
