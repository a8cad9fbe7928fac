# Comments between the arguments stay.

import jax
import jax.numpy as jnp
import jax_dist


def result():
    step = jax_dist.pmap(  # over all devices
        lambda x: jax.lax.psum(x, "i"),  # the sum
        # as the model spells it
        axis_name="i",
    )
    return step(jnp.arange(8.0))
