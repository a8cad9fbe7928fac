# out_axes: one for all devices, another dimension, and one for each result.

import jax.numpy as jnp
import jax_dist
from jax import lax


def stats(x):
    return x * 2, lax.psum(x, "i")


def result():
    xs = jnp.arange(24.0).reshape(8, 3)
    total = jax_dist.pmap(lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None)(xs)
    turned = jax_dist.pmap(lambda x: x + 1, out_axes=1)(xs)
    both = jax_dist.pmap(stats, axis_name="i", out_axes=(0, None))(xs)
    named = jax_dist.pmap(lambda x: {"x": x, "n": lax.pmean(x, "i")}, "i", out_axes={"x": 1, "n": None})(xs)
    return total, turned, both, named
