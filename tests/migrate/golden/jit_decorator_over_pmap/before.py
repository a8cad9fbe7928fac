# @jax.jit over @jax.pmap: pmap compiles by itself.

import jax
import jax.numpy as jnp


def result():
    @jax.jit
    @jax.pmap
    def double(x):
        return x * 2

    return double(jnp.arange(8.0))
