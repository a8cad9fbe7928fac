"""The program that the files beside this one start. It is the same everywhere."""

import jax
import jax.numpy as jnp
from jax import lax

import jax_dist
from jax_dist import multihost

multihost.initialize()  # finds its place among the processes, whoever started them


def step(x):
    return lax.psum(x, "i")


total = jax_dist.pmap(step, axis_name="i")(jnp.ones(jax.local_device_count()))
print(f"process {jax.process_index()} of {jax.process_count()}: {total[0]:g} devices")
