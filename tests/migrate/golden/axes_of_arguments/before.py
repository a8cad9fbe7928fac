# in_axes: shared, another dimension, and whole trees of them.

import jax
import jax.numpy as jnp


def add(shared, x):
    return shared["a"] + x


def both(pair, x):
    return pair[0] * 2 + pair[1], x


def result():
    xs = jnp.arange(24.0).reshape(3, 8)
    ys = jnp.arange(24.0).reshape(8, 3)
    one = jax.pmap(add, in_axes=(None, 1))({"a": jnp.ones(3)}, xs)
    two = jax.pmap(both, in_axes=((0, 1), 0))((ys, xs), ys)
    three = jax.pmap(add, axis_name="i", in_axes=({"a": 1}, 0))({"a": xs}, ys)
    four = jax.pmap(lambda x: x + 1, in_axes=2)(jnp.arange(48.0).reshape(2, 3, 8))
    return one, two, three, four
