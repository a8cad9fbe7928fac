"""JXD103: classes of shardings that left jax."""

from collections.abc import Iterator

from jax_dist.checker import renames, renaming
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, Mend, rule

PAGE = Page(
    code="JXD103",
    name="removed-sharding-class",
    what="Finds `PmapSharding`, `PositionalSharding`, `GSPMDSharding` and other removed classes of "
    "`jax.sharding`.",
    why="Using the name raises an AttributeError or ImportError, even in an `isinstance`. The "
    "answer of such a test had changed earlier: on jax 0.9.2, results of pmap have a "
    "`NamedSharding`, so a test for `PmapSharding` was False.",
    example="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.PmapSharding)\n",
    instead="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.NamedSharding)\n",
    fix="Safe for `MeshPspecSharding` and `XLACompatibleSharding`, which were renamed. None for "
    "the others: a `NamedSharding` needs a mesh and a spec, and a test has to check something "
    "else.",
    since="jax 0.7.1: PositionalSharding removed; 0.10.0: PmapSharding and GSPMDSharding removed.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)


@rule(
    PAGE,
    triggers=(
        b"PmapSharding",
        b"PositionalSharding",
        b"GSPMDSharding",
        b"XLACompatibleSharding",
        b"MeshPspecSharding",
        b"OpShardingSharding",
    ),
)
def check(module: Module) -> Iterator[Found]:
    yield from renaming.renamed(module, renames.SHARDINGS)


CASES: tuple[Case, ...] = (
    Keep("a class of one's own", "import jax\nfrom mine import PmapSharding\nPmapSharding(x)\n"),
    Keep(
        "asked for before",
        "import jax\nif hasattr(jax.sharding, 'PmapSharding'):\n"
        "    kinds = (jax.sharding.PmapSharding,)\n",
    ),
    Flag("an attribute", "import jax\nisinstance(s, jax.sharding.PmapSharding)\n", (2,)),
    Flag(
        "an import, and not again its uses",
        "from jax.sharding import Mesh, PositionalSharding\ns = PositionalSharding(devices)\n",
        (1,),
    ),
    Flag("another name of the module", "from jax import sharding as S\nS.GSPMDSharding\n", (2,)),
    Mend(
        "renamed classes",
        "import jax\nk = (jax.sharding.XLACompatibleSharding, jax.sharding.MeshPspecSharding)\n",
        "import jax\nk = (jax.sharding.Sharding, jax.sharding.NamedSharding)\n",
    ),
    Mend(
        "a renamed class, imported",
        "from jax.sharding import XLACompatibleSharding\n",
        "from jax.sharding import Sharding as XLACompatibleSharding\n",
    ),
)
