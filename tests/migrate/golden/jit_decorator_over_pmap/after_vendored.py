# @jax.jit over @jax.pmap: pmap compiles by itself.

import jax.numpy as jnp

from _mapped import mapped


def result():
    @mapped
    def double(x):
        return x * 2

    return double(jnp.arange(8.0))
