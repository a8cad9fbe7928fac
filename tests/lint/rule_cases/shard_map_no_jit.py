"""Cases of JXD305."""

from rule_cases import Case, Fixed, Negative

_MESH = (
    "import jax\nimport numpy as np\nfrom jax.sharding import Mesh, PartitionSpec as P\n\n"
    "mesh = Mesh(np.array(jax.devices()), ('i',))\n\n\n"
)

CASES: tuple[Case, ...] = (
    Negative("jit around it", "import jax\nf = jax.jit(jax.shard_map(g, mesh=m))\ny = f(x)\n"),
    Negative(
        "in a function that others may jit",
        "import jax\ndef loss(x):\n    return jax.shard_map(g, mesh=m)(x)\n",
    ),
    Negative(
        "decorated twice",
        "import jax, functools\n@jax.jit\n@functools.partial(jax.shard_map, mesh=m)\n"
        "def f(x): ...\ny = f(x)\n",
    ),
    Negative(
        "in a function that is jitted as well as called",
        "import jax\ndef h(x):\n    return jax.shard_map(g, mesh=m)(x)\ny = h(x)\nk = jax.jit(h)\n",
    ),
    Negative(
        "another function of that name is called",
        "import jax\n@jax.shard_map(mesh=m)\ndef f(x): ...\ng = jax.jit(f)\n\n"
        "def f(x): ...\ny = f(x)\n",
    ),
    Fixed(
        "in a function that the module calls",
        "import jax\ndef h(x):\n    return jax.shard_map(g, mesh=m)(x)\ny = h(x)\n",
        "import jax\ndef h(x):\n    return jax.jit(jax.shard_map(g, mesh=m))(x)\ny = h(x)\n",
    ),
    Fixed(
        "in main, by partial",
        "import jax, functools\nf = functools.partial(jax.shard_map, mesh=m)(g)\n"
        "def main(argv):\n    print(f(argv))\n",
        "import jax, functools\nf = jax.jit(functools.partial(jax.shard_map, mesh=m)(g))\n"
        "def main(argv):\n    print(f(argv))\n",
    ),
    Fixed(
        "at once",
        _MESH + "def g(x):\n    return jax.lax.psum(x, 'i')\n\n\n"
        "out = jax.shard_map(g, mesh=mesh, in_specs=P('i'), out_specs=P())(np.arange(16.0))\n\n\n"
        "def result():\n    return out\n",
        _MESH + "def g(x):\n    return jax.lax.psum(x, 'i')\n\n\n"
        "out = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=P('i'), out_specs=P()))"
        "(np.arange(16.0))\n\n\n"
        "def result():\n    return out\n",
        runs=True,
    ),
    Fixed(
        "a decorator",
        "import functools\nimport jax\n\n@functools.partial(jax.shard_map, mesh=m)\n"
        "def f(x): ...\n\ny = f(x)\n",
        "import functools\nimport jax\n\n@jax.jit\n@functools.partial(jax.shard_map, mesh=m)\n"
        "def f(x): ...\n\ny = f(x)\n",
    ),
)
