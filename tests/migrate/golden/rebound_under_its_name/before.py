# A builder's result is mapped under the name that it had.

import jax
import jax.numpy as jnp


def get_learner_fn(rate):
    def learner_fn(params, batch):
        return params - rate * jax.lax.pmean(batch, axis_name="device")

    return learner_fn


def result():
    learn = get_learner_fn(0.5)
    learn = jax.pmap(learn, axis_name="device")
    params = jnp.ones((8, 2))
    for _ in range(2):
        params = learn(params, jnp.arange(16.0).reshape(8, 2))
    return params
