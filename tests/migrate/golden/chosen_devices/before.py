# Devices that are given: all that are local, some, and none.

import jax
import jax.numpy as jnp


def result():
    devices = jax.local_devices()[:4]
    one = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i", devices=jax.local_devices())(jnp.arange(8.0))
    two = jax.pmap(lambda x: x * 2, devices=devices)(jnp.arange(4.0))
    three = jax.pmap(lambda x: x * 2, devices=None, backend=None)(jnp.arange(8.0))
    return one, two, three
