# pmap(vmap(scan)), with a collective over each axis.

import jax
import jax.numpy as jnp
from jax import lax


def update(state, _):
    state = lax.pmean(state * 1.5, axis_name="batch")
    return lax.pmean(state, axis_name="device"), state.sum()


def result():
    learn = jax.pmap(
        jax.vmap(lambda state: lax.scan(update, state, None, 3), axis_name="batch"),
        axis_name="device",
        donate_argnums=0,
    )
    return learn(jnp.arange(48.0).reshape(8, 2, 3))
