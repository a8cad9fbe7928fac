# Mapped and called in one expression.

import jax
import jax.numpy as jnp
import jax_dist


def reset(x):
    return {"obs": x * 2, "done": jnp.zeros((), bool)}


def result():
    xs = jnp.arange(48.0).reshape(8, 2, 3)
    return jax_dist.pmap(jax.vmap(jax.vmap(reset)))(xs), jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), "i")(xs)
