"""Cases of JXD304."""

from rule_cases import Case, Negative, Positive

_TOP = "import jax\nimport jax.numpy as jnp\n"

CASES: tuple[Case, ...] = (
    Negative(
        "an axis is named",
        _TOP + "f = jax.shard_map(lambda x: jnp.sum(x, axis=1), mesh=m, in_specs=s, out_specs=s)\n",
    ),
    Negative(
        "the mapped dimension is taken off first",
        _TOP + "def f(x):\n    x = x[0]\n    return jnp.sum(x)\n"
        "g = jax.shard_map(f, mesh=m, in_specs=s, out_specs=s)\n",
    ),
    Negative("the same under pmap", _TOP + "f = jax.pmap(lambda x: jnp.sum(x))\n# not shard_map\n"),
    Negative(
        "the size of another dimension",
        _TOP + "f = jax.shard_map(lambda x: x / x.shape[1], mesh=m, in_specs=s, out_specs=s)\n",
    ),
    Positive(
        "a sum without an axis",
        _TOP + "f = jax.shard_map(lambda x: x / x.sum(), mesh=m, in_specs=s, out_specs=s)\n",
        (3,),
    ),
    Positive(
        "the size, in a decorated function",
        _TOP + "import functools\n@functools.partial(jax.shard_map, mesh=m, in_specs=s, "
        "out_specs=s)\ndef f(x, y):\n    n = x.shape[0]\n    return jnp.dot(y, x) / n\n",
        (6, 7),
    ),
)
