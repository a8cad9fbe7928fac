"""Cases of JXD104."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("only spoken of", "import jax\nhelp = 'jax_pmap_shmap_merge is gone'\n"),
    Negative(
        "ready for it to be missing",
        "import jax\nif hasattr(jax.config, 'jax_pmap_shmap_merge'):\n"
        "    jax.config.update('jax_pmap_shmap_merge', True)\n",
    ),
    Negative("another program's option", "import jax\noptions.update('jax_eager_pmap', 1)\n"),
    Positive("set", "import jax\njax.config.update('jax_pmap_shmap_merge', True)\nf()\n", (2,)),
    Positive(
        "set by another name",
        "from jax import config as c\ndef setup():\n    c.update('jax_eager_pmap', 0)\n",
        (3,),
    ),
    Positive(
        "in an environment",
        "import os\nenv = os.environ.copy()\nenv['JAX_PMAP_SHMAP_MERGE'] = '1'\nimport jax\n",
        (3,),
    ),
)
