"""Ops of `custom_partitioning`, in the forms that libraries write them."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@custom_partitioning
def layernorm(x, scale):
    """`[n, h], [h] -> [n, h]`; computed on whole rows, however they lie."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def _rows_only(mesh, arg_shapes, result_shape):
    del result_shape
    by_row = NamedSharding(mesh, P(arg_shapes[0].sharding.spec[0], None))
    return mesh, layernorm.fun, by_row, (by_row, NamedSharding(mesh, P(None)))


layernorm.def_partition(_rows_only, sharding_rule="n h, h -> n h")


@custom_partitioning
def l1norm(x):
    """`[n, h] -> [n, h]`, with a sum over devices where rows are cut."""
    return x / jnp.sum(jnp.abs(x), -1, keepdims=True)


def partition_of_l1norm(epsilon):
    def with_psum(mesh, arg_shapes, result_shape):
        del result_shape
        sharding = arg_shapes[0].sharding
        axes = sharding.spec[1]

        def on_block(x):
            total = jnp.sum(jnp.abs(x), -1, keepdims=True) + epsilon
            return x / (total if axes is None else jax.lax.psum(total, axes))

        return mesh, on_block, sharding, (sharding,)

    return with_psum


l1norm.def_partition(partition_of_l1norm(0.0), sharding_rule="n h -> n h")


@functools.partial(custom_partitioning, static_argnums=(1,))
def moments(x, power):
    """`[n, h] -> [n, h], [n]`: rows without their mean, and their mean power."""
    centered = x - x.mean(-1, keepdims=True)
    return {"centered": centered, "moment": jnp.mean(centered**power, -1)}


def _two_results(power, mesh, arg_shapes, result_shape):
    del result_shape
    rows = arg_shapes[0].sharding.spec[0]
    by_row, vector = NamedSharding(mesh, P(rows, None)), NamedSharding(mesh, P(rows))
    results = {"centered": by_row, "moment": vector}
    return mesh, lambda x: moments.fun(x, power), results, (by_row,)


def _rule(power, mesh, arg_types, result_types):
    del power, mesh, arg_types, result_types
    return "n h -> n h, n"


moments.def_partition(_two_results, sharding_rule=_rule)
