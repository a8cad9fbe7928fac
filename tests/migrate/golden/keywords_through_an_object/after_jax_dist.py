# A mapped function that is kept by an object, and called by keyword somewhere else.

import jax
import jax.numpy as jnp
import jax_dist


class Agent:
    def __init__(self):
        self.update = jax_dist.pmap(self._update, axis_name="i")

    def _update(self, params, batch):
        return params - jax.lax.pmean(batch, "i")


def train(agent):
    return agent.update(params=jnp.ones((4, 2)), batch=jnp.arange(8.0).reshape(4, 2))


def result():
    return train(Agent())
