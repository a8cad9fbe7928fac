"""Cases of JXD104."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("only spoken of", "import jax\nhelp = 'jax_pmap_shmap_merge is gone'\n"),
    Negative(
        "ready for it to be missing",
        "import jax\nif hasattr(jax.config, 'jax_pmap_shmap_merge'):\n"
        "    jax.config.update('jax_pmap_shmap_merge', True)\n",
    ),
    Negative("another program's option", "import jax\noptions.update('jax_eager_pmap', 1)\n"),
    Positive("read", "import jax\nif jax.config.jax_pmap_shmap_merge:\n    f()\n", (2,)),
    Positive("computed", "import jax\njax.config.update('jax_eager_pmap', ask())\n", (2,)),
    Fixed(
        "set",
        "import jax\njax.config.update('jax_pmap_shmap_merge', True)\nf()\n",
        "import jax\nf()\n",
    ),
    Fixed(
        "set by another name, alone in its block",
        "from jax import config as c\n\ndef setup():\n    c.update('jax_pmap_shmap_merge', 0)\n",
        "from jax import config as c\n\ndef setup():\n    pass\n",
    ),
    Fixed(
        "in the environment",
        "import os\nos.environ['JAX_PMAP_SHMAP_MERGE'] = '1'\nimport jax\n",
        "import os\nimport jax\n",
    ),
)
