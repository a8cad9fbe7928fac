# What was donated is gone, in both.

import jax
import jax.numpy as jnp


def step(state, batch):
    return state + batch


def result():
    p_step = jax.pmap(step, "i", donate_argnums=0)
    state = jax.pmap(lambda x: x * 2)(jnp.arange(8.0))
    batch = jax.pmap(lambda x: x * 3)(jnp.arange(8.0))
    return p_step(state, batch), state.is_deleted(), batch.is_deleted()
