# flax's helpers around a step.

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.jax_utils import unreplicate


def step(state, batch):
    return {"w": state["w"] + jax.lax.pmean(batch, "i")}


def result():
    p_step = jax.pmap(step, axis_name="i")
    state = jax_utils.replicate({"w": jnp.arange(3.0)})
    state = p_step(state, jnp.arange(24.0).reshape(8, 3))
    some = flax.jax_utils.replicate(np.float32(2.5), jax.local_devices()[:2])
    return state, some, np.asarray(unreplicate(state)["w"])
