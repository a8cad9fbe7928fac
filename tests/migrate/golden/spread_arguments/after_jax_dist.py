# The call passes arguments on.

import jax.numpy as jnp
import jax_dist


def result():
    add = jax_dist.pmap(lambda x, y: x + y, axis_name="i")
    arguments = (jnp.arange(8.0), jnp.ones(8))
    return add(*arguments)
