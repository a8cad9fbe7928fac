# Helpers replicate, take the first copy and change types, as in brax and acme.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


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
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    sharded = NamedSharding(mesh, P("i"))

    def epoch_on_device(state, carry, key):
        carry, key = jax.tree.map(lambda x: x[0], (carry, key))
        state, carry, mean = epoch(state, carry, key)
        carry, mean = jax.tree.map(lambda x: x[None], (carry, mean))
        return state, carry, mean

    p_epoch = jax.jit(
        jax.shard_map(
            epoch_on_device,
            mesh=mesh,
            in_specs=(P(), P("i"), P("i")),
            out_specs=(P(), P("i"), P("i")),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    key = jax.random.key(0)
    state = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))

    def zeros_like_on_device(x0):
        x0 = jax.tree.map(lambda x: x[0], x0)
        return jax.tree.map(lambda x: x[None], jnp.zeros_like(x0))

    carry = jax.jit(
        jax.shard_map(
            zeros_like_on_device,
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )
    )(jax.make_array_from_process_local_data(sharded, np.ones((n, 3), np.float32)))
    means = []
    for _ in range(3):
        key, epoch_key = jax.random.split(key)
        keys = jax.make_array_from_process_local_data(
            sharded, jax.random.split(epoch_key, n)
        )
        state, carry = _strip_weak_type((state, carry))
        results = p_epoch(state, carry, keys)
        state, carry, mean = _strip_weak_type(results)
        means.append(float(jnp.mean(mean)) + float(state[0]))
    return jax.device_get(state), means


def result():
    return train(jax.local_device_count())
