# A removed name beside pmap.
# result: [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]]

import jax
import jax.numpy as jnp

from _mapped import mapped


def result():
    x = jax.tree.map(lambda x: x + 1, jnp.arange(8.0))
    return mapped(lambda x: x * 2)(x)
