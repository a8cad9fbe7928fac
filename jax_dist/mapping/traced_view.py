"""The slices of one process as part of the whole array, while tracing.

pmap shows each process its own slices only, `[L, *s]` for `L` devices; the program runs on the
whole `[P * L, *s]` of `P` processes. Outside of a trace the two are the same buffers under two
shapes (see host_local). Inside one, where there are no buffers, the view is an array of the whole
program that is declared to be replicated over processes, though its copies differ.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist.mapping import axes, meshes, refusals
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.meshes import PROCESS_AXIS, Layout


def check_joined(layout: Layout, fun_name: str) -> None:
    """Raises DeviceCountError where the slices of a process do not stand side by side."""
    if layout.process_mesh is None:
        raise refusals.scattered_devices(fun_name)


def all_as_whole(leaves: Sequence[Any], leaf_axes: Sequence[Axis], layout: Layout) -> list[Any]:
    """`view_as_whole` of each."""
    assert layout.process_mesh is not None
    with meshes.context_of(layout.process_mesh):
        return [view_as_whole(*pair, layout) for pair in zip(leaves, leaf_axes, strict=True)]


def all_as_view(leaves: Sequence[Any], leaf_axes: Sequence[Axis], layout: Layout) -> list[Any]:
    """`whole_as_view` of each."""
    assert layout.process_mesh is not None
    with meshes.context_of(layout.process_mesh):
        return [whole_as_view(*pair, layout) for pair in zip(leaves, leaf_axes, strict=True)]


def view_as_whole(view: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """`[L, *s] -> [P * L, *s]` (for axis 0) while tracing: what each process sees, joined.

    To the program, the view is replicated over processes; in truth each process holds its own
    slices. No element is moved: the same buffer is declared to be one part of a longer array.
    """
    if axis is None:
        return view
    if not jnp.issubdtype(view.dtype, jnp.inexact):  # has no derivative
        return _relabelled(view, axis, layout, to_whole=True)
    padded = jnp.concatenate(
        [view[None], jnp.zeros((layout.processes - 1, *view.shape), view.dtype)]
    )
    parts = _transposable(padded, axis, layout, to_whole=True)
    merged = jnp.moveaxis(parts, 0, axis % view.ndim)
    shape = list(view.shape)
    shape[axis] *= layout.processes
    return lax.reshape(merged, shape)


def whole_as_view(whole: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """`[P * L, *s] -> [L, *s]` (for axis 0) while tracing: the inverse of `view_as_whole`."""
    if axis is None:
        return whole
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return _relabelled(whole, axis, layout, to_whole=False)
    axis %= whole.ndim
    shape = whole.shape
    split = (*shape[:axis], layout.processes, shape[axis] // layout.processes, *shape[axis + 1 :])
    parts = jnp.moveaxis(lax.reshape(whole, split), axis, 0)
    return _transposable(parts, axis, layout, to_whole=False)[0]


def _relabelled(array: jax.Array, axis: int, layout: Layout, *, to_whole: bool) -> jax.Array:
    """The blocks of `array` as they are, declared to be split over processes, or not."""
    axis %= array.ndim
    view = axes.spec_of_axis(axis, array.ndim, layout.name)
    whole = P(*[None] * axis, (PROCESS_AXIS, layout.name))
    return jax.shard_map(
        lambda block: block,
        mesh=layout.process_mesh,
        in_specs=view if to_whole else whole,
        out_specs=whole if to_whole else view,
        check_vma=False,
    )(array)


def _transposable(parts: jax.Array, axis: int, layout: Layout, *, to_whole: bool) -> jax.Array:
    """`[P, ..., L, ...]` both ways: all of the view in row 0, or one row for each process.

    shard_map would transpose the view as what it is declared to be, replicated: it sums over
    processes, whose slices have nothing to do with each other. The transpose wanted is the
    inverse. custom_linear_solve is the one public way to say it that jvp, vmap and grad all accept;
    both directions keep the shape, for it demands that, and so the view is padded to `[P, ...]`.
    """
    axis %= parts.ndim - 1
    view = P(None, *[None] * axis, layout.name)
    whole = P(PROCESS_AXIS, *[None] * axis, layout.name)

    def as_whole(_, array: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda block: block[:1],
            mesh=layout.process_mesh,
            in_specs=view,
            out_specs=whole,
            check_vma=False,
        )(array)

    def as_view(_, array: jax.Array) -> jax.Array:
        def pad(block: jax.Array) -> jax.Array:
            rest = jnp.zeros((layout.processes - 1, *block.shape[1:]), block.dtype)
            return jnp.concatenate([block, rest])

        return jax.shard_map(
            pad, mesh=layout.process_mesh, in_specs=whole, out_specs=view, check_vma=False
        )(array)

    solve, transpose = (as_whole, as_view) if to_whole else (as_view, as_whole)
    return lax.custom_linear_solve(lambda x: x, parts, solve, transpose)
