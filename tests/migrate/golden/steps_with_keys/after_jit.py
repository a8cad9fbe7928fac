# One key for each device, which the step splits and hands back.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(params, batch, rng):
    rng, noise = jax.random.split(rng)
    batch = batch + jax.random.normal(noise, batch.shape)
    gradient = jax.lax.pmean(jax.grad(lambda w: jnp.sum((batch @ w) ** 2))(params), "i")
    return params - 0.01 * gradient, jax.lax.pmean(jnp.sum(gradient), "i"), rng


def result():
    n = jax.local_device_count()

    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    sharded = NamedSharding(mesh, P("i"))

    def step_on_device(params, batch, rng):
        batch = jax.tree.map(lambda x: x[0], batch)
        params, norm, rng = step(params, batch, rng[0])
        rng = jax.tree.map(lambda x: x[None], rng)
        return params, norm, rng

    p_step = jax.jit(
        jax.shard_map(
            step_on_device,
            mesh=mesh,
            in_specs=(P(), P("i"), P("i")),
            out_specs=(P(), P(), P("i")),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    params = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
    rng = jax.make_array_from_process_local_data(
        sharded, jax.random.split(jax.random.PRNGKey(0), n)
    )
    for seed in range(3):
        batch = jax.make_array_from_process_local_data(
            sharded,
            np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32),
        )
        params, norm, rng = p_step(params, batch, rng)
    return np.asarray(params), float(norm), np.asarray(rng)
