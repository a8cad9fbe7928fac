# The call passes arguments on.

import jax.numpy as jnp

from _mapped import mapped


def result():
    add = mapped(lambda x, y: x + y, axis_name="i")
    arguments = (jnp.arange(8.0), jnp.ones(8))
    return add(*arguments)
