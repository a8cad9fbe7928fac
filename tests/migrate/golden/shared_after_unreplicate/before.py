# What unreplicate gives lies on one device, and the next mapped function shares it.

import jax
import jax.numpy as jnp
from flax import jax_utils

double = jax.pmap(lambda state: jax.lax.pmean(state * 2, "batch"), axis_name="batch")
render = jax.pmap(
    lambda state, rays: jax.lax.all_gather(rays * state, axis_name="batch"),
    in_axes=(None, 0),
    axis_name="batch",
)


def result():
    state = jax_utils.replicate(jnp.ones(3))
    for _ in range(2):
        state = double(state)
    return render(jax_utils.unreplicate(state), jnp.arange(8.0).reshape(8, 1))
