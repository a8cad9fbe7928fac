# Comments between the arguments go above what is left of them.

import functools

import jax
import jax.numpy as jnp


def step(state, batch, rate):
    return state + rate * jax.lax.pmean(batch, "batch")


def result():
    p_step = jax.pmap(
        functools.partial(step, rate=0.5),
        # As the model has it.
        axis_name="batch",
        # We can donate the state:
        # it is not needed again.
        donate_argnums=(0,),  # only it
    )
    return p_step(jnp.zeros(8), jnp.arange(8.0))
