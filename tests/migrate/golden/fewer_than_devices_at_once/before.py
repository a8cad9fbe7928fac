# Where the arguments are at hand, they say how many of the devices are used, as with pmap.

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.pmap, axis_name="i", in_axes=(None, 1))
def share(scale, x):
    return scale * x / jax.lax.psum(x, "i")


def double(x):
    return 2 * x


def result():
    total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.arange(4.0))
    return total, share(2.0, jnp.ones((3, 2))), jax.pmap(double)(jnp.ones((2, 3)))
