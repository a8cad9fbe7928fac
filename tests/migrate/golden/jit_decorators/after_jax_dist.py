# @jit over @partial(pmap): the decorator goes with its line.

from functools import partial

import jax
import jax.numpy as jnp
import jax_dist


def result():
    @partial(jax_dist.pmap, axis_name="i", donate_argnums=(0,))
    def total(x):
        return jax.lax.psum(x, "i")

    @partial(jax.jit, inline=True)
    @jax_dist.pmap
    def doubled(x):
        return x * 2

    @jax.jit  # fast
    @jax_dist.pmap
    def tripled(x):
        return x * 3

    return [f(jnp.arange(8.0)) for f in (total, doubled, tripled)]
