# Mapped and called in one expression.

import jax
import jax.numpy as jnp

from _mapped import mapped


def reset(x):
    return {"obs": x * 2, "done": jnp.zeros((), bool)}


def result():
    xs = jnp.arange(48.0).reshape(8, 2, 3)
    return mapped(jax.vmap(jax.vmap(reset)))(xs), mapped(lambda x: jax.lax.psum(x, "i"), "i")(xs)
