# A name for pmap, and a partial with arguments.

import functools

import jax
import jax.numpy as jnp

from _mapped import mapped

AXIS = "qmc"
pmap = functools.partial(mapped, axis_name=AXIS)
plain = mapped


@functools.partial(pmap, donate_argnums=(0,))
def step(params, x):
    return params + jax.lax.pmean(x, AXIS)


def result():
    xs = jnp.arange(8.0)
    return step(jnp.zeros(8), xs), pmap(lambda x: jax.lax.psum(x, AXIS))(xs), plain(jnp.sin)(xs)
