"""Cases of JXD103."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "a class of one's own", "import jax\nfrom mine import PmapSharding\nPmapSharding(x)\n"
    ),
    Negative("the class of today", "import jax\nx.sharding == jax.sharding.NamedSharding(m, p)\n"),
    Positive("an attribute", "import jax\nisinstance(s, jax.sharding.PmapSharding)\n", (2,)),
    Positive(
        "an import, and not again its uses",
        "from jax.sharding import Mesh, PositionalSharding\ns = PositionalSharding(devices)\n",
        (1,),
    ),
    Fixed(
        "a renamed class",
        "import jax\nk = jax.sharding.XLACompatibleSharding\n",
        "import jax\nk = jax.sharding.Sharding\n",
    ),
    Fixed(
        "a renamed class, imported",
        "from jax.sharding import XLACompatibleSharding\n",
        "from jax.sharding import Sharding as XLACompatibleSharding\n",
    ),
)
