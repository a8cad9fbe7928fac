"""Variables that JAX reads when it is imported are set above it."""

import os

os.environ["ABOVE_JAX"] = "1"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.sharding.Mesh(jax.devices(), ("i",))
sharded = NamedSharding(mesh, P("i"))


def step_on_device(x):
    x = jax.tree.map(lambda x: x[0], x)
    return jax.tree.map(lambda x: x[None], x * 2)


double = jax.jit(
    jax.shard_map(
        step_on_device, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False
    )
)

late = os.environ.pop("ABOVE_JAX")

def step_on_device_2(x):
    x = jax.tree.map(lambda x: x[0], x)
    return jax.tree.map(lambda x: x[None], x * 3)


triple = jax.jit(
    jax.shard_map(
        step_on_device_2, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False
    )
)


def result():
    return triple(double(
        jax.make_array_from_process_local_data(sharded, jnp.ones(8))
    )) + int(late)
