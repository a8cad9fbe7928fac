# SPDX-License-Identifier: 0BSD
# By jax-dist migrate 0.1.0, 89b976dd29ff. Yours to keep.
"""Functions that JAX no longer has, by public names of JAX 0.8 or newer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def per_device(fun: Any, in_axes: Any = 0, out_axes: Any = 0) -> Any:
    """`fun` for jax.shard_map: its blocks have the mapped axes, of size 1.

    `in_axes` and `out_axes` are those of jax.pmap; None for what all share.
    """

    def each(change: Any, axes: Any, tree: Any) -> Any:
        def one(axis: Any, part: Any) -> Any:
            of_leaf = lambda x: change(x, axis)
            return part if axis is None else jax.tree.map(of_leaf, part)

        return jax.tree.map(one, axes, tree, is_leaf=lambda axis: axis is None)

    @functools.wraps(fun)
    def block(*args: Any) -> Any:
        args = each(jax.numpy.squeeze, in_axes, args)
        return each(jax.numpy.expand_dims, out_axes, fun(*args))

    return block


def replicated(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """A whole copy of each leaf on every device, without an axis over them."""
    if (count := jax.process_count()) > 1:
        raise NotImplementedError(
            f"replicated is for one process, and here are {count}: each would "
            "take its own batch for that of all"
        )
    mesh = Mesh(jax.devices() if devices is None else list(devices), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(x: Any) -> jax.Array:
        is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        if is_array and x.is_fully_replicated:
            x = x.addressable_data(0)  # the first copy counts, if they differ
        x = jax.numpy.array(x, jax.numpy.result_type(x))  # `tree` is not to
        return jax.device_put(x, sharding)  # be donated with it

    return jax.tree.map(put, tree)
