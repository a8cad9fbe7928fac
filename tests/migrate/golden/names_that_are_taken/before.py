# P, jnp and functools mean other things here.

import functools as ft
import jax
import jax.numpy

P = 3.0
jnp = None


def result():
    step = jax.pmap(ft.partial(lambda x, y: x * y, y=P), axis_name="i")
    return step(jax.numpy.arange(8.0))
