# One key for each device, which the step splits and hands back.

import jax
import jax.numpy as jnp
import numpy as np


def step(params, batch, rng):
    rng, noise = jax.random.split(rng)
    batch = batch + jax.random.normal(noise, batch.shape)
    gradient = jax.lax.pmean(jax.grad(lambda w: jnp.sum((batch @ w) ** 2))(params), "i")
    return params - 0.01 * gradient, jax.lax.pmean(jnp.sum(gradient), "i"), rng


def result():
    n = jax.local_device_count()
    p_step = jax.pmap(step, axis_name="i", donate_argnums=0)
    params = jax.tree.map(lambda x: jnp.stack([x] * n), jnp.ones(3))
    rng = jax.random.split(jax.random.PRNGKey(0), n)
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32)
        params, norm, rng = p_step(params, batch, rng)
    return np.asarray(params[0]), float(norm[0]), np.asarray(rng)
