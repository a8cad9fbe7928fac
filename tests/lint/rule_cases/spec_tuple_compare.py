"""Cases of JXD207."""

from rule_cases import Case, Fixed, Negative

CASES: tuple[Case, ...] = (
    Negative(
        "two specs",
        "from jax.sharding import PartitionSpec as P\nassert x.sharding.spec == P('i')\n",
    ),
    Negative("another spec", "import jax\nok = importlib.spec == ('a',)\n"),
    Negative("a parameter may be a tuple", "import jax\ndef f(spec):\n    return spec == ('i',)\n"),
    Negative(
        "made a tuple before",
        "import jax\nok = tuple(x.sharding.spec) == ('i',)\nspec = 1\nspec == (1,)\n",
    ),
    Fixed(
        "of an array",
        "import jax\nassert x.sharding.spec == ('i', None)\n",
        "import jax\nassert x.sharding.spec == jax.sharding.PartitionSpec('i', None)\n",
    ),
    Fixed(
        "a name, from the right, one axis",
        "from jax.sharding import PartitionSpec as P\nspec = P('i')\nsame = ('i',) != spec\n",
        "from jax.sharding import PartitionSpec as P\nspec = P('i')\nsame = P('i') != spec\n",
    ),
)
