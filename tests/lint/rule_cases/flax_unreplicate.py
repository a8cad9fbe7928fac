"""Cases of JXD202."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
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
        "a state whose origin is in another file",
        "from flax import jax_utils\ndef save(state):\n    write(jax_utils.unreplicate(state))\n",
        (3,),
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
