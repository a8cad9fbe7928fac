# A static argument, and one that all devices share.

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


def step(state, batch, rate, power):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** power))(state)
    return state - rate * jax.lax.pmean(grads, "i")


def result():
    n = jax.local_device_count()
    p_step = jax.pmap(
        step, axis_name="i", in_axes=(0, 0, None, None), static_broadcasted_argnums=(3,)
    )
    state = jax_utils.replicate(jnp.ones(3))
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32)
        state = p_step(state, batch, 0.1, 2)
    return np.asarray(jax_utils.unreplicate(state))
