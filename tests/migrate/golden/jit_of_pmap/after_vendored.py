# jit(pmap(f)): pmap compiles by itself.

import jax
import jax.numpy as jnp
from functools import partial

from _mapped import mapped


class Sim:
    def __init__(self):
        self._fn = mapped(partial(self._rollout, steps=3), in_axes=(0, None))

    @staticmethod
    def _rollout(state, scale, steps):
        return jax.lax.fori_loop(0, steps, lambda i, s: s * scale + i, state)

    def run(self, state):
        return self._fn(state, 1.5)


def result():
    return Sim().run(jnp.arange(16.0).reshape(8, 2))
