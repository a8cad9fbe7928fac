# The mapped function takes the name of its own function, as in learners of Anakin; and a partial
# holds a value of the name that a parameter has.

import functools

import jax
import jax.numpy as jnp
import numpy as np


def decay(rate, state):
    return {"w": state["w"] * rate}


def result():
    def learn(state):
        return {"w": state["w"] - 0.1 * jax.lax.pmean(state["w"], "device")}

    learn = jax.pmap(learn, axis_name="device")
    rate = 0.5
    shrink = jax.pmap(functools.partial(decay, rate), axis_name="device")
    state = {"w": jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2))}
    for _ in range(3):
        learned = learn(state)
        state = jax.device_get(shrink(learned))
    return state["w"]
