# What was donated is gone, in both.

import jax.numpy as jnp
import jax_dist


def step(state, batch):
    return state + batch


def result():
    p_step = jax_dist.pmap(step, "i", donate_argnums=0)
    state = jax_dist.pmap(lambda x: x * 2)(jnp.arange(8.0))
    batch = jax_dist.pmap(lambda x: x * 3)(jnp.arange(8.0))
    return p_step(state, batch), state.is_deleted(), batch.is_deleted()
