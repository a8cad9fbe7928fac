# Arguments that are given by name are mapped over their first dimension.

import jax
import jax.numpy as jnp


def step(params, batch, scale):
    return params + scale * jax.lax.pmean(batch, "i")


def result():
    p_step = jax.pmap(step, axis_name="i")
    xs = jnp.arange(8.0)
    return p_step(xs, batch=xs, scale=jnp.ones(8))
