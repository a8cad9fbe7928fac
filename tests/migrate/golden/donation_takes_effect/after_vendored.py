# What was donated is gone, in both.

import jax.numpy as jnp

from _mapped import mapped


def step(state, batch):
    return state + batch


def result():
    p_step = mapped(step, "i", donate_argnums=0)
    state = mapped(lambda x: x * 2)(jnp.arange(8.0))
    batch = mapped(lambda x: x * 3)(jnp.arange(8.0))
    return p_step(state, batch), state.is_deleted(), batch.is_deleted()
