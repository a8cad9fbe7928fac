# Several sites in one statement, and a walrus.

import jax
import jax.numpy as jnp


def result():
    f, g = jax.pmap(jnp.sin), jax.pmap(jnp.cos)
    if (h := jax.pmap(jnp.tanh)) is not None:
        xs = jnp.arange(8.0)
    return f(xs), g(xs), h(xs)
