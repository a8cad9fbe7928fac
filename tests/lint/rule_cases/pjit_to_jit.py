"""Cases of JXD106."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "ready for it to be missing",
        "try:\n    from jax.experimental.pjit import pjit\nexcept ImportError:\n"
        "    from jax import jit as pjit\n",
    ),
    Negative("the module alone is still there", "from jax.experimental import pjit\n"),
    Positive(
        "a spec needs a mesh",
        "from jax.experimental.pjit import pjit\nfrom jax.sharding import PartitionSpec as P\n"
        "f = pjit(g, in_shardings=(P('i'), None))\n",
        (1,),
    ),
    Positive(
        "an old keyword of the constraint",
        "from jax.experimental import pjit\npjit.with_sharding_constraint(x, axis_resources=s)\n",
        (2,),
    ),
    Positive("a value", "from jax.experimental.pjit import pjit\nf = {'jit': pjit}\n", (1,)),
    Fixed(
        "without shardings",
        "from jax.experimental.pjit import pjit\nf = pjit(g, donate_argnums=0)\n",
        "from jax import jit as pjit\nf = pjit(g, donate_argnums=0)\n",
    ),
    Fixed(
        "the constraint",
        "from jax.experimental.pjit import with_sharding_constraint as wsc\ny = wsc(x, s)\n",
        "from jax.lax import with_sharding_constraint as wsc\ny = wsc(x, s)\n",
    ),
    Fixed(
        "no shardings, as said",
        "from jax.experimental.pjit import pjit\nf = pjit(g, in_shardings=None)\n",
        "from jax import jit as pjit\nf = pjit(g, in_shardings=None)\n",
    ),
)
