# A static argument, and one that all devices share.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(state, batch, rate, power):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** power))(state)
    return state - rate * jax.lax.pmean(grads, "i")


def result():
    n = jax.local_device_count()

    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    sharded = NamedSharding(mesh, P("i"))

    def step_on_device(state, batch, rate, power):
        batch = jax.tree.map(lambda x: x[0], batch)
        return step(state, batch, rate, power)

    def step_over_devices(state, batch, rate, power):
        return jax.shard_map(
            lambda state, batch, rate: step_on_device(state, batch, rate, power),
            mesh=mesh,
            in_specs=(P(), P("i"), P()),
            out_specs=P(),
            check_vma=False,
        )(state, batch, rate)

    p_step = jax.jit(step_over_devices, static_argnums=(3,))
    state = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
    for seed in range(3):
        batch = jax.make_array_from_process_local_data(
            sharded,
            np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32),
        )
        state = p_step(state, batch, 0.1, 2)
    return np.asarray(state)
