"""Cases of JXD402."""

from rule_cases import Case, Negative, Positive

_TOP = (
    "import functools\nimport jax\n"
    "from jax.experimental.custom_partitioning import custom_partitioning\n"
    "@functools.partial(custom_partitioning, static_argnums=(1,))\n"
    "def norm(x, n):\n    return x / n\n"
)

CASES: tuple[Case, ...] = (
    Negative("called outside of what the file traces", _TOP + "def f(x):\n    return norm(x, 2)\n"),
    Negative(
        "in a shard_map under jit",
        _TOP
        + "f = jax.jit(jax.shard_map(lambda x: norm(x, 2), mesh=m, in_specs=s, out_specs=s))\n",
    ),
    Negative(
        "in a shard_map in a jitted function",
        _TOP + "@jax.jit\ndef f(x):\n    body = lambda y: norm(y, 2)\n"
        "    return jax.shard_map(body, mesh=m, in_specs=s, out_specs=s)(x)\n",
    ),
    Positive("in a lambda under jit", _TOP + "f = jax.jit(lambda x: norm(x, 2))\n", (7,)),
    Positive(
        "by name, in a decorated function",
        "import jax\nfrom jax.experimental.custom_partitioning import custom_partitioning\n"
        "def body(x):\n    return x\nnorm = custom_partitioning(body)\n"
        "@jax.jit\ndef f(x):\n    return norm(x)\n",
        (8,),
    ),
)
