# The mapped function takes the name of its own function, as in learners of Anakin.

import functools

import jax
import jax.numpy as jnp
import numpy as np


def decay(state, rate):
    return {"w": state["w"] * rate}


def result():
    def learn(state):
        return {"w": state["w"] - 0.1 * jax.lax.pmean(state["w"], "device")}

    learn = jax.pmap(learn, axis_name="device")
    shrink = decay
    shrink = jax.pmap(functools.partial(shrink, rate=0.5), axis_name="device")
    state = {"w": jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2))}
    for _ in range(3):
        learned = learn(state)
        state = jax.device_get(shrink(learned))
    return state["w"]
