"""The body on the slices of a mapped axis: one a device by shard_map, or several by vmap.

Shapes: `N` is the size of the mapped axis; a block is what one device holds, `[1, *s]`; the body
sees `[*s]`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.mapping import axes, nesting, refusals
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.keys import is_key

Pin: TypeAlias = Callable[[jax.Array, Axis], jax.Array]  # lays a mapped axis somewhere


# What the vmap rules of collectives say of axis_index_groups; all_to_all says the second.
_OF_GROUPS = ("axis_index_groups", "Please open a feature request")


def cut(
    options: Options,
    call: Call,
    leaves: Sequence[Any],
    name: str,
    frame: nesting.Frame,
    mesh: Mesh | None,
) -> tuple[Any, tuple[Axis, ...]]:
    """The body on blocks of one slice each: shard_map, manual over `name`.

    Args:
      mesh: None inside another pmap, for that of the context.

    Returns:
      The output, and the mapped axis of each of its leaves.
    """
    found: list[tuple[Axis, ...]] = []

    def body(*blocks: jax.Array) -> Any:
        slices = [
            axes.slice_seen_by_body(block, axis)
            for block, axis in zip(blocks, call.axes, strict=True)
        ]
        with nesting.entered(frame):
            output = call.run(slices)
        out_axes = axes.spread_out_axes(options.out_axes, output, options.choice.fun_name)
        found.append(out_axes)
        flat, structure = jax.tree.flatten(output)
        flat = [axes.block_of_output(v, axis) for v, axis in zip(flat, out_axes, strict=True)]
        return jax.tree.unflatten(structure, flat)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(
            axes.spec_of_axis(axis, jnp.ndim(leaf), name)
            for leaf, axis in zip(leaves, call.axes, strict=True)
        ),
        out_specs=axes.spec_prefix(options.out_axes, name),
        axis_names={name},
        # With check_vma=True, grad in the body by a replicated argument already sums over the
        # devices, and the program's own psum then gives N times the gradient of pmap.
        check_vma=False,
    )
    output = mapped(*leaves)
    out_axes = found[-1]
    flat, structure = jax.tree.flatten(output)
    flat = [axes.put_back(leaf, axis) for leaf, axis in zip(flat, out_axes, strict=True)]
    return jax.tree.unflatten(structure, flat), out_axes


def batch(
    options: Options,
    call: Call,
    leaves: Sequence[Any],
    name: Any,
    frame: nesting.Frame,
    size: int,
    pin: Pin,
) -> tuple[Any, tuple[Axis, ...]]:
    """The body by vmap, with its slices laid along a mesh axis by `pin`.

    vmap has an exact rule for each collective over its own name, or refuses it.
    """
    found: list[Any] = []

    def body(*slices: jax.Array) -> list[Any]:
        with nesting.entered(frame):
            output = call.run(slices)
        flat, structure = jax.tree.flatten(output)
        out_axes = axes.spread_out_axes(options.out_axes, output, options.choice.fun_name)
        found.append((structure, out_axes))
        return flat

    _check_keys(call, leaves)
    pinned = [pin(leaf, axis) for leaf, axis in zip(leaves, call.axes, strict=True)]
    mapped = jax.vmap(body, in_axes=call.axes, out_axes=0, axis_name=name, axis_size=size)
    try:
        flat = mapped(*pinned)
    except NotImplementedError as error:
        if not any(words in str(error) for words in _OF_GROUPS):
            raise
        raise refusals.groups_not_batched(call.fun_name, name, size) from error
    structure, out_axes = found[-1]

    def at_its_axis(array: jax.Array, axis: Axis) -> jax.Array:
        if axis is None:  # pmap gives the value of the first device
            return lax.index_in_dim(array, 0, keepdims=False)
        return jnp.moveaxis(array, 0, axis)

    flat = [pin(at_its_axis(array, axis), axis) for array, axis in zip(flat, out_axes, strict=True)]
    return jax.tree.unflatten(structure, flat), out_axes


def _check_keys(call: Call, leaves: Sequence[Any]) -> None:
    """Refuses keys whose bits depend on how many of them are used at once."""
    for index, leaf in enumerate(leaves):
        if is_key(leaf):
            implementation = str(jax.random.key_impl(leaf))
            if "threefry" not in implementation:
                path = call.paths()[index]
                raise refusals.random_bits_differ(call.fun_name, path, implementation)


def pin_nothing(array: jax.Array, axis: Axis) -> jax.Array:
    del axis
    return array


def pin_to(mesh: Mesh, name: str) -> Pin:
    """Lays the mapped axis over `name`, the first axis of `mesh`."""

    def pin(array: jax.Array, axis: Axis) -> jax.Array:
        sharding = NamedSharding(mesh, axes.spec_of_axis(axis, array.ndim, name))
        return lax.with_sharding_constraint(array, sharding)

    return pin


def pin_inside(name: str) -> Pin:
    """Lays the mapped axis over `name`, an axis of the context's mesh that is not manual yet.

    By a shard_map that does nothing: with_sharding_constraint is not accepted there on jax 0.7.2.
    """

    def pin(array: jax.Array, axis: Axis) -> jax.Array:
        spec = P() if axis is None else axes.spec_of_axis(axis, array.ndim, name)
        return jax.shard_map(
            lambda block: block, in_specs=spec, out_specs=spec, axis_names={name}, check_vma=False
        )(array)

    return pin


@contextlib.contextmanager
def context_of(mesh: Mesh) -> Iterator[None]:
    """Steps out of a mesh that the user has set: shard_map accepts none but its own."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or context == mesh.abstract_mesh:
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
