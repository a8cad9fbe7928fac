# Arguments that are Python values: an int, a function, and axes besides.

import jax.numpy as jnp

from _mapped import mapped


def power(x, n):
    for _ in range(n):
        x = x * 2
    return x


def apply(fun, scale, x):
    return fun(x) * scale


def result():
    xs = jnp.arange(16.0).reshape(8, 2)
    one = mapped(power, axis_name="i", static_broadcasted_argnums=1)(xs, 3)
    two = mapped(apply, in_axes=(None, None, 0), static_broadcasted_argnums=(0,))(jnp.sin, 2.0, xs)
    three = mapped(power, static_broadcasted_argnums=[1], donate_argnums=(0,))(xs + 1, 2)
    return one, two, three
