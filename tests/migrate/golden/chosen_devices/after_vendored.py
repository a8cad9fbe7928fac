# Devices that are given: all that are local, some, and none.

import jax
import jax.numpy as jnp

from _mapped import mapped


def result():
    devices = jax.local_devices()[:4]
    one = mapped(lambda x: jax.lax.psum(x, "i"), "i", devices=jax.local_devices())(jnp.arange(8.0))
    two = mapped(lambda x: x * 2, devices=devices)(jnp.arange(4.0))
    three = mapped(lambda x: x * 2, devices=None, backend=None)(jnp.arange(8.0))
    return one, two, three
