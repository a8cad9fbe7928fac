# Several sites in one statement, and a walrus.

import jax.numpy as jnp

from _mapped import mapped


def result():
    f, g = mapped(jnp.sin), mapped(jnp.cos)
    if (h := mapped(jnp.tanh)) is not None:
        xs = jnp.arange(8.0)
    return f(xs), g(xs), h(xs)
