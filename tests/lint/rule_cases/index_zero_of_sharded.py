"""Cases of JXD203."""

from rule_cases import Case, Fixed, Negative, Positive

_STEP = (
    "import jax\nimport jax.numpy as jnp\nf = jax.pmap(lambda x: {'loss': jnp.sum(x), 'n': x})\n"
)

CASES: tuple[Case, ...] = (
    Negative(
        "one of several results",
        "import jax\ndef g(x):\n    return x, x\nf = jax.pmap(g)\nstate = f(x)[0]\n",
    ),
    Negative(
        "what a mapped function of another file returns", "import jax\ny = jax.pmap(g)(x)[0]\n"
    ),
    Negative(
        "already on the host",
        "import jax\nimport numpy as np\nimport jax.numpy as jnp\n"
        "y = np.asarray(jax.pmap(lambda x: jnp.sum(x))(x))[0]\n",
    ),
    Negative("the second slice may be wanted for itself", _STEP + "y = f(x)['loss'][1]\n"),
    Negative(
        "a tuple, put together by adding",
        "import jax\nf = jax.pmap(lambda *args: args[1:] + (args[0] + 1,))\na = f(x, y)[0]\n",
    ),
    Positive(
        "out_axes says another dimension: no fix",
        "import jax\nimport jax.numpy as jnp\ny = jax.pmap(lambda x: x * 2, out_axes=1)(x)[0]\n",
        (3,),
    ),
    Fixed(
        "an entry of a dict, through a name",
        _STEP + "\ndef result():\n    m = f(jnp.ones((8, 3)))\n    return m['loss'][0]\n",
        _STEP + "\ndef result():\n    m = f(jnp.ones((8, 3)))\n"
        "    return m['loss'].addressable_shards[0].data.squeeze(0)\n",
        runs=True,
    ),
)
