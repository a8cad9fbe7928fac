# Each device knows which one it is, and talks to its neighbour.

import jax
import jax.numpy as jnp

from _mapped import mapped


def ring(x):
    i = jax.lax.axis_index("i")
    return x + i, jax.lax.ppermute(x, "i", [(j, (j + 1) % 8) for j in range(8)])


def result():
    return mapped(ring, axis_name="i")(jnp.arange(8.0))
