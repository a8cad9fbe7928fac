"""Cases of JXD404."""

from rule_cases import Case, Fixed, Negative

CASES: tuple[Case, ...] = (
    Negative(
        "sorted already", "import jax\nf = jax.pmap(lambda x: [x[n] for n in sorted({'a', 'b'})])\n"
    ),
    Negative(
        "outside of what is traced", "import jax\nf = jax.pmap(g)\nfor n in {'a', 'b'}: f(n)\n"
    ),
    Negative(
        "a set from a set", "import jax\nf = jax.pmap(lambda x: x + len({n for n in {'a'}}))\n"
    ),
    Negative("a tuple", "import jax\nf = jax.pmap(lambda x: [x[n] for n in ('a', 'b')])\n"),
    Negative(
        "the file's own set",
        "import jax\nfrom mine import set\nf = jax.pmap(lambda x: [n for n in set(x)])\n",
    ),
    Fixed(
        "a difference of sets, by name",
        "import jax\nnames = {'a', 'b'}\n@jax.pmap\ndef f(x):\n"
        "    for n in names - {'a'}:\n        x = x + y[n]\n    return x\n",
        "import jax\nnames = {'a', 'b'}\n@jax.pmap\ndef f(x):\n"
        "    for n in sorted(names - {'a'}):\n        x = x + y[n]\n    return x\n",
    ),
    Fixed(
        "a loop",
        "import jax\nimport jax.numpy as jnp\n@jax.pmap\ndef f(x):\n"
        "    for n in {1, 2}:  # both\n        x = x * n\n    return x\n\n"
        "def result():\n    return f(jnp.arange(8))\n",
        "import jax\nimport jax.numpy as jnp\n@jax.pmap\ndef f(x):\n"
        "    for n in sorted({1, 2}):  # both\n        x = x * n\n    return x\n\n"
        "def result():\n    return f(jnp.arange(8))\n",
        runs=True,
    ),
    Fixed(
        "migrated already",
        "import jax_dist\n\n\n@jax_dist.pmap(axis_name='i')\ndef f(x):\n"
        "    return [x[n] for n in {'a', 'b'}]\n",
        "import jax_dist\n\n\n@jax_dist.pmap(axis_name='i')\ndef f(x):\n"
        "    return [x[n] for n in sorted({'a', 'b'})]\n",
    ),
)
