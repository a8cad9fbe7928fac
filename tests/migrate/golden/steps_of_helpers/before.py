# Helpers replicate, take the first copy and change types, as in brax and acme.

import jax
import jax.numpy as jnp
import numpy as np


def _unpmap(tree):
    return jax.tree_util.tree_map(lambda x: x.addressable_shards[0].data.squeeze(0), tree)


def _first_on_host(tree, as_numpy=True):
    def first(x):
        x = x[0]
        if as_numpy:
            return np.asarray(x)
        return x

    return jax.tree_util.tree_map(first, tree)


def _strip_weak_type(tree):
    def strip(leaf):
        leaf = jnp.asarray(leaf)
        return leaf.astype(leaf.dtype)

    return jax.tree_util.tree_map(strip, tree)


def epoch(state, carry, key):
    noise = jax.random.normal(key, (3,))
    carry = carry + noise
    state = state - 0.1 * jax.lax.pmean(carry, axis_name="i")
    return state, carry, carry.mean()


def train(n):
    devices = jax.local_devices()[:n]
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("d",)), jax.P("d"))

    def _replicate(x):
        if isinstance(x, jax.Array):
            return jax.device_put(jnp.stack([x] * len(devices)), sharding)
        return jax.device_put(np.stack([x] * len(devices)), sharding)

    p_epoch = jax.pmap(epoch, axis_name="i", donate_argnums=(0,))
    key = jax.random.key(0)
    state = jax.tree_util.tree_map(_replicate, jnp.ones(3))
    carry = jax.pmap(jnp.zeros_like)(np.ones((n, 3), np.float32))
    means = []
    for _ in range(3):
        key, epoch_key = jax.random.split(key)
        keys = jax.random.split(epoch_key, n)
        state, carry = _strip_weak_type((state, carry))
        results = p_epoch(state, carry, keys)
        state, carry, mean = _strip_weak_type(results)
        means.append(float(jnp.mean(mean)) + float(_unpmap(state)[0]))
    return _first_on_host(state), means


def result():
    return train(jax.local_device_count())
