# A static argument, and one that all devices share.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(state, batch, rate, power):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** power))(state)
    return state - rate * grads


def result():
    n = jax.local_device_count()
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    replicated = NamedSharding(mesh, P())
    sharded = NamedSharding(mesh, P("i"))
    p_step = jax.jit(
        step,
        in_shardings=(replicated, sharded, replicated),
        out_shardings=replicated,
        static_argnums=(3,),
    )
    state = jax.device_put(jnp.ones(3), replicated)
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32)
        batch = jax.make_array_from_process_local_data(
            sharded, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        )
        state = p_step(state, batch, 0.1, 2)
    return np.asarray(state)
