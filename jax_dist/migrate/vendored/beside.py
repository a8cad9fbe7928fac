# SPDX-License-Identifier: 0BSD
"""What stands beside mapped functions: arrays on devices, blocks of a mesh.

It uses public names of JAX 0.8 or newer.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Stacks trees, one on each device: `[...]` becomes `[devices, ...]`."""
    if len(shards) != len(devices):
        raise ValueError(f"{len(shards)} shards for {len(devices)} devices")

    def put(*leaves: Any) -> jax.Array:
        return _stacked(map(jax.device_put, leaves, devices))

    return jax.tree.map(put, *shards)


def _stacked(copies: Iterable[jax.Array]) -> jax.Array:
    """One array of arrays that lie on one device each."""
    rows = [jax.numpy.expand_dims(copy, 0) for copy in copies]
    mesh = Mesh([row.device for row in rows], ("devices",))
    shape = (len(rows), *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, PartitionSpec("devices")), rows
    )


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Stacks a copy for each device: `[...]` becomes `[devices, ...]`."""
    return device_put_sharded([x] * len(devices), devices)


#: if dims
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


#: end
#: not dims: def per_device(fun: Any) -> Any:
#: not dims:     """`fun` of one slice, for the blocks of jax.shard_map."""
#: not dims:     one = lambda x: jax.numpy.squeeze(x, 0)
#: not dims:     back = lambda x: jax.numpy.expand_dims(x, 0)
#: not dims:
#: not dims:     @functools.wraps(fun)
#: not dims:     def block(*args: Any) -> Any:
#: not dims:         return jax.tree.map(back, fun(*jax.tree.map(one, args)))
#: not dims:
#: not dims:     return block
#: not dims:
#: not dims:
def by_position(fun: Any, *names: str) -> Any:
    """`fun`, with its last arguments by name, for jax.shard_map."""

    @functools.wraps(fun)
    def called(*args: Any) -> Any:
        count = len(args) - len(names)
        return fun(*args[:count], **dict(zip(names, args[count:])))

    return called


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


def with_device_axis(tree: Any) -> Any:
    """The copy of each device as a slice: `[...]` becomes `[devices, ...]`."""

    def put(x: jax.Array) -> jax.Array:
        return _stacked(shard.data for shard in x.addressable_shards)

    return jax.tree.map(put, tree)
