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
    Negative(
        "a trajectory whose first dimension is time",
        "import jax\nf = jax.pmap(g)\n"
        "def start(traj):\n    return jax.tree.map(lambda x: x[0], traj.hidden)\n",
    ),
    Negative(
        "already on the host",
        "import jax\nf = jax.pmap(g)\n"
        "m = jax.device_get(f(x))\nm = jax.tree.map(lambda x: x[0], m)\n",
    ),
    Negative(
        "a function that may be called with anything",
        "import jax\nf = jax.pmap(g)\n"
        "def first(tree):\n    return jax.tree.map(lambda x: x[0], tree)\ny = first(f(x))\n",
    ),
    Positive(
        "out_axes says another dimension: no fix",
        "import jax\nimport jax.numpy as jnp\ny = jax.pmap(lambda x: x * 2, out_axes=1)(x)[0]\n",
        (3,),
    ),
    Positive(
        "a state whose origin is in another file",
        "from flax import jax_utils\ndef save(state):\n    write(jax_utils.unreplicate(state))\n",
        (3,),
    ),
    Fixed(
        "an entry of a dict, through a name",
        _STEP + "\ndef result():\n    m = f(jnp.ones((8, 3)))\n    return m['loss'][0]\n",
        _STEP + "\ndef result():\n    m = f(jnp.ones((8, 3)))\n"
        "    return m['loss'].addressable_shards[0].data.squeeze(0)\n",
        runs=True,
    ),
    Fixed(
        "what was replicated, and went through a loop",
        "import jax\nfrom flax import jax_utils\nf = jax.pmap(g)\ns = jax_utils.replicate(s)\n"
        "for b in data:\n    s, m = f(s, b)\nlast = jax.tree.map(lambda x: x[0], s)\n",
        "import jax\nfrom flax import jax_utils\nf = jax.pmap(g)\ns = jax_utils.replicate(s)\n"
        "for b in data:\n    s, m = f(s, b)\n"
        "last = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), s)\n",
    ),
    Fixed(
        "what flax replicated",
        "import jax\nimport jax.numpy as jnp\nfrom flax.jax_utils import replicate, unreplicate\n"
        "\ndef result():\n    y = replicate({'a': jnp.arange(3)})\n    return unreplicate(y)\n",
        "import jax\nimport jax.numpy as jnp\nfrom flax.jax_utils import replicate, unreplicate\n"
        "\ndef result():\n    y = replicate({'a': jnp.arange(3)})\n"
        "    return jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), y)\n",
        runs=True,
    ),
    Fixed(
        "spelled out",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(lambda x: (x, x + 1), 'i')\n"
        "\ndef result():\n    y = f(jnp.arange(8))\n"
        "    return jax.tree.map(lambda leaf: leaf[0], y)  # one copy\n",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(lambda x: (x, x + 1), 'i')\n"
        "\ndef result():\n    y = f(jnp.arange(8))\n"
        "    return jax.tree.map("
        "lambda leaf: leaf.addressable_shards[0].data.squeeze(0), y)  # one copy\n",
        runs=True,
    ),
)
