# What a Python number in a state becomes, of weak type or not, is what this flax makes of it.

import jax.numpy as jnp
import jax_dist
from flax import jax_utils

scaled = jax_dist.pmap(lambda state, x: x * state["scale"])


def result():
    state = jax_utils.replicate({"scale": 2.5})
    return scaled(state, jnp.ones((8, 2), jnp.bfloat16))
