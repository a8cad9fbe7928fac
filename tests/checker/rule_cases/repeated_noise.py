"""Cases of JXD501."""

from rule_cases import Case, Negative, Positive

_TOP = "import jax\nfrom jax.sharding import PartitionSpec as P\n"

CASES: tuple[Case, ...] = (
    Negative(
        "each device has a key of its own",
        _TOP + "def f(key, x):\n    key = jax.random.fold_in(key, jax.lax.axis_index('i'))\n"
        "    return x + jax.random.normal(key, x.shape)\n"
        "g = jax.pmap(f, axis_name='i', in_axes=(None, 0))\n",
    ),
    Negative(
        "keys are mapped too",
        _TOP + "def f(key, x):\n    return x + jax.random.normal(key, x.shape)\ng = jax.pmap(f)\n",
    ),
    Negative(
        "noise of the shape of what all devices share",
        _TOP + "def f(key, w, x):\n    return x @ (w + jax.random.normal(key, w.shape))\n"
        "g = jax.pmap(f, in_axes=(None, None, 0))\n",
    ),
    Negative(
        "a population, of which each device takes its share",
        _TOP + "def f(key, x):\n    return x + jax.random.normal(key, (64, 3))[jax.lax."
        "axis_index('i')]\ng = jax.pmap(f, axis_name='i', in_axes=(None, 0))\n",
    ),
    Negative(
        "which arguments are mapped is not in the text",
        _TOP + "def f(key, x):\n    return x + jax.random.normal(key, x.shape)\n"
        "g = jax.pmap(f, in_axes=axes)\n",
    ),
    Positive(
        "the key is not mapped",
        _TOP + "def f(key, x):\n    return x + jax.random.normal(key, x.shape)\n"
        "g = jax.pmap(f, in_axes=(None, 0))\n",
        (4,),
    ),
    Positive(
        "a key made in the function, under any name",
        _TOP + "from jax import random as jr\n@jax.pmap\ndef f(x):\n    key = jr.PRNGKey(0)\n"
        "    mask = jr.bernoulli(key, 0.5, shape=x.shape)\n    return x * mask\n",
        (7,),
    ),
    Positive(
        "in a shard_map",
        _TOP + "def f(key, x):\n    return x + jax.random.uniform(key, x.shape)\n"
        "g = jax.shard_map(f, mesh=m, in_specs=(P(), P('i')), out_specs=P('i'))\n",
        (4,),
    ),
)
