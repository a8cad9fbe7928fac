# @jax.jit over @jax.pmap: pmap compiles by itself.

import jax.numpy as jnp
import jax_dist


def result():
    @jax_dist.pmap
    def double(x):
        return x * 2

    return double(jnp.arange(8.0))
