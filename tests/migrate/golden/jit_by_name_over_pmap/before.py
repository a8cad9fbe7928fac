# A jit around pmap goes where it says nothing more; one with options or a comment stays.

import jax
import jax.numpy as jnp
from jax import jit, pmap

TABLE = jnp.arange(16.0)


def build():
    def update(x):
        return x + TABLE.sum()

    return jit(pmap(update, donate_argnums=(0,)),)


def result():
    doubled = jax.jit(pmap(lambda x: 2 * x, "i"), donate_argnums=0)
    tripled = jit(pmap(lambda x: 3 * x))  # quick
    halved = jit(  # slow
        pmap(lambda x: x / 2)
    )
    return build()(jnp.arange(8.0)), [f(jnp.arange(8.0)) for f in (doubled, tripled, halved)]
