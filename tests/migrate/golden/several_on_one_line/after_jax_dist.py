# Several sites in one statement, and a walrus.

import jax.numpy as jnp
import jax_dist


def result():
    f, g = jax_dist.pmap(jnp.sin), jax_dist.pmap(jnp.cos)
    if (h := jax_dist.pmap(jnp.tanh)) is not None:
        xs = jnp.arange(8.0)
    return f(xs), g(xs), h(xs)
