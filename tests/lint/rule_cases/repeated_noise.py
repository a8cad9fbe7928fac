"""Cases of JXD501."""

from rule_cases import Case, Negative, Positive

_TOP = "import jax\nfrom jax.sharding import PartitionSpec as P\n"
_FLAX = _TOP + (
    "def f(net, state, x, key):\n    def loss(params):\n"
    "        return net.apply(params, x, True, rngs={'dropout': key}).sum()\n"
    "    return jax.grad(loss)(state.params)\n"
)

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
    Negative(
        "dropout with the key of the device",
        _FLAX + "g = jax.pmap(f, in_axes=(None, None, 0, 0))\n",
    ),
    Negative(
        "a stream that may draw for the weights",
        _FLAX.replace("'dropout'", "'params'") + "g = jax.pmap(f, in_axes=(None, None, 0, None))\n",
    ),
    Negative(
        "keys of which each device takes its own",
        _TOP + "def f(key, x):\n    keys = jax.random.split(key, 8)\n"
        "    return x + jax.random.normal(keys[jax.lax.axis_index('i')], x.shape)\n"
        "g = jax.pmap(f, axis_name='i', in_axes=(None, 0))\n",
    ),
    Negative(
        "a key with data of the device folded in",
        _TOP + "def f(key, i, x):\n    key, _ = jax.random.split(jax.random.fold_in(key, i))\n"
        "    return x + jax.random.normal(key, x.shape)\n"
        "g = jax.pmap(f, in_axes=(None, 0, 0))\n",
    ),
    Negative(
        "a key of an inner function, which may be another one for each row",
        _TOP + "def f(key, x):\n    def one(key, row):\n"
        "        return row + jax.random.normal(key, x.shape)\n"
        "    return jax.vmap(one)(jax.random.split(key, 4), x)\n"
        "g = jax.pmap(f, in_axes=(None, 0))\n",
    ),
    Negative(
        "weights that are drawn with one key",
        _TOP + "def f(key, x):\n    layer = nnx.Linear(x.shape[-1], 4, rngs=nnx.Rngs(key))\n"
        "    net.init(x, rngs={'dropout': key})\n    return layer(x)\n"
        "from flax import nnx\ng = jax.pmap(f, in_axes=(None, 0))\n",
    ),
    Negative(
        "a call that takes rngs, and no data of the device",
        _TOP + "def f(key, w, x):\n    return x @ net.apply(w, rngs={'dropout': key})\n"
        "g = jax.pmap(f, in_axes=(None, None, 0))\n",
    ),
    Negative(
        "another layer with a key",
        _TOP + "import equinox as eqx\nlayer = eqx.nn.Linear(2, 2, key=k)\n"
        "def f(key, x):\n    return layer(x, key=key)\ng = jax.pmap(f, in_axes=(None, 0))\n",
    ),
    Positive(
        "dropout of Flax Linen, in the loss",
        _FLAX + "g = jax.pmap(f, in_axes=(None, None, 0, None))\n",
        (5,),
    ),
    Positive(
        "streams that have a name, and part of a batch",
        _TOP + "def f(key, step, batch):\n    key = jax.random.fold_in(key, step)\n"
        "    rngs = {'dropout': key, 'params': key}\n"
        "    return net.apply(v, batch['x'], rngs=rngs)\n"
        "def h(key, step, batch):\n    return net.apply(v, batch.x, rngs=dict(dropout=key))\n"
        "g = jax.pmap(f, in_axes=(None, None, 0)), jax.pmap(h, in_axes=(None, None, 0))\n",
        (6, 8),
    ),
    Positive(
        "dropout layers of Flax",
        _TOP + "import flax.linen as nn\nfrom flax import nnx\n"
        "drop = nnx.Dropout(0.5)\ndef f(key, x):\n"
        "    x = nn.Dropout(0.5, deterministic=False)(x, rng=key)\n"
        "    rngs = nnx.Rngs(dropout=key)\n    x = jax.random.normal(rngs.noise(), x.shape)\n"
        "    return x\ndef h(x):\n    return drop(x, rngs=nnx.Rngs(0))\n"
        "g = jax.pmap(f, in_axes=(None, 0)), jax.pmap(h)\n",
        (7, 12),
    ),
    Positive(
        "a key of Rngs that are made of a shared one",
        _TOP + "from flax import nnx\ndef f(key, x):\n    rngs = nnx.Rngs(noise=key)\n"
        "    return x + jax.random.normal(rngs.noise(), x.shape)\n"
        "g = jax.pmap(f, in_axes=(None, 0))\n",
        (6,),
    ),
    Positive(
        "a sequence of keys, and dropout of Haiku",
        _TOP + "import haiku as hk\ndef f(key, x):\n    keys = hk.PRNGSequence(key)\n"
        "    y = jax.random.normal(next(keys), x.shape)\n"
        "    return y + hk.dropout(next(keys), 0.5, x)\n"
        "g = jax.pmap(f, in_axes=(None, 0))\n",
        (6, 7),
    ),
    Positive(
        "dropout of Equinox, whose key was split",
        _TOP + "import equinox as eqx\ndrop = eqx.nn.Dropout(0.5)\n"
        "def f(key, x):\n    key, other = jax.random.split(key)\n"
        "    return drop(x, key=other)\ng = jax.pmap(f, in_axes=(None, 0))\n",
        (7,),
    ),
    Positive(
        "in a loss inside the function",
        _TOP + "def f(key, w, x):\n    def loss(w):\n"
        "        return (w * x + jax.random.normal(key, x.shape)).sum()\n"
        "    return jax.grad(loss)(w)\ng = jax.pmap(f, in_axes=(None, None, 0))\n",
        (5,),
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
