# The call passes arguments on.

import jax
import jax.numpy as jnp


def result():
    add = jax.pmap(lambda x, y: x + y, axis_name="i")
    arguments = (jnp.arange(8.0), jnp.ones(8))
    return add(*arguments)
