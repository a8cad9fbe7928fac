# What was taken off the devices goes back, as an argument that all share.

import jax
import jax.numpy as jnp
from flax import jax_utils


def result():
    state = jax_utils.replicate({"w": jnp.arange(3.0)})
    state = jax.pmap(lambda s, x: {"w": s["w"] + x}, axis_name="i")(state, jnp.ones((8, 3)))
    params = jax_utils.unreplicate(state)
    return jax.pmap(lambda w, x: w["w"] * x, in_axes=(None, 0))(params, jnp.ones((8, 3)))
