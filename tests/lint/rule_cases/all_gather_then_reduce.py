"""Cases of JXD301."""

from rule_cases import Case, Fixed, Negative

_RUN = (
    "import jax\nimport jax.numpy as jnp\n\ndef result():\n"
    "    return jax.pmap(f, axis_name='i')(jnp.arange(16.0).reshape(8, 2))\n\ndef f(x):\n"
)

CASES: tuple[Case, ...] = (
    Negative(
        "the mean of each block is taken before it is gathered",
        "import jax\nimport jax.numpy as jnp\ny = jax.lax.all_gather(jnp.mean(x, axis=0), 'i')\n",
    ),
    Negative(
        "the mean over another dimension",
        "import jax\ny = jax.lax.all_gather(x, 'i').mean(axis=1)\n",
    ),
    Negative("the mean over all dimensions", "import jax\ny = jax.lax.all_gather(x, 'i').mean()\n"),
    Negative(
        "blocks joined along their own dimension",
        "import jax\ny = jax.lax.all_gather(x, 'i', tiled=True).mean(0)\n",
    ),
    Negative(
        "what is gathered is used again",
        "import jax\ng = jax.lax.all_gather(x, 'i')\ny = g.mean(0) + g.max()\n",
    ),
    Negative(
        "only some are counted",
        "import jax\nimport jax.numpy as jnp\n"
        "y = jnp.mean(jax.lax.all_gather(x, 'i'), axis=0, where=m)\n",
    ),
    Fixed(
        "the mean as a method",
        _RUN + "    return jax.lax.all_gather(x, 'i').mean(axis=0)  # all\n",
        _RUN + "    return jax.lax.pmean(x, 'i')  # all\n",
        runs=True,
    ),
    Fixed(
        "the sum as a function, the axis by keyword",
        _RUN + "    return 2 * jnp.sum(jax.lax.all_gather(x, axis_name='i'), 0)\n",
        _RUN + "    return 2 * jax.lax.psum(x, axis_name='i')\n",
        runs=True,
    ),
    Fixed(
        "the function itself was imported",
        "from jax.lax import all_gather, pmax\ny = all_gather(x, 'i').max(0)\n",
        "from jax.lax import all_gather, pmax\ny = pmax(x, 'i')\n",
    ),
)
