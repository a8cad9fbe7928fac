"""Variables that JAX reads when it is imported are set above it."""

import os

os.environ["ABOVE_JAX"] = "1"

import jax.numpy as jnp
import jax_dist

double = jax_dist.pmap(lambda x: x * 2)

late = os.environ.pop("ABOVE_JAX")

import functools

triple = functools.partial(jax_dist.pmap, axis_name="i")(lambda x: x * 3)


def result():
    return triple(double(jnp.ones(8))) + int(late)
