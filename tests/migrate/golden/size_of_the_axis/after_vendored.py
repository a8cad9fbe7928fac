# psum(1) is the size of the axis.

import jax.numpy as jnp
from jax import lax

from _mapped import mapped

AXIS = "devices"


def normalized(x, axis_name=AXIS):
    return lax.psum(x, axis_name) / lax.psum(1, axis_name)


def result():
    mean = mapped(normalized, axis_name=AXIS)
    return mean(jnp.arange(8.0))
