"""The traced side of pmap: flatten, check, cut into blocks, run the body on each, put together.

Everything here happens while JAX traces, once per signature; nothing of it is left at call time.

Shapes: `N` is the size of the mapped axis; a block is what one device holds, `[1, *s]`; the body
sees `[*s]`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping import axes, nesting, refusals, traced_view
from jax_dist.mapping.axes import Axis, AxisPrefix
from jax_dist.mapping.meshes import DeviceChoice, InnerAxis, Layout, check_all_used, lay_out


@dataclasses.dataclass(frozen=True)
class Options:
    """What was said to pmap, checked."""

    axis_name: Any  # None where the user gave none
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    static: tuple[int, ...]  # positions, ascending
    donated: tuple[int, ...]
    choice: DeviceChoice
    arrays: str  # "local" or "global"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with its arguments flattened."""

    fun: Callable
    rebuild: Callable[[Sequence[Any]], tuple[tuple, dict]]  # leaves -> (args, kwargs)
    leaves: list[Any]
    axes: tuple[Axis, ...]  # of each leaf
    owners: tuple[int | str, ...]  # of each leaf: the position or keyword of its argument
    paths: Callable[[], list[str]]  # the name of each leaf
    fun_name: str

    @functools.cached_property
    def size(self) -> int:
        """Of the mapped axis. Raises MappedAxisError or AxesError where there is no one size."""
        return axes.mapped_size(self.leaves, self.axes, self.paths, self.fun_name)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The body, on its arguments as it sees them."""
        args, kwargs = self.rebuild(leaves)
        return self.fun(*args, **kwargs)


def bind(options: Options, fun: Callable, args: tuple, kwargs: dict) -> Call:
    """Flattens the arguments, and finds the mapped axis of each leaf.

    Raises:
      AxesError: in_axes is no prefix of the arguments.
      StaticArgumentError: the call has too few positional arguments.
    """
    name = options.choice.fun_name
    if options.static and options.static[-1] >= len(args):
        raise refusals.static_argument_missing(name, options.static, len(args))
    numbers = [number for number in range(len(args)) if number not in options.static]
    mapped_args = tuple(args[number] for number in numbers)
    in_axes = options.in_axes
    if options.static and isinstance(in_axes, tuple | list) and len(in_axes) == len(args):
        in_axes = tuple(in_axes[number] for number in numbers)

    def rebuild(leaves: Sequence[Any]) -> tuple[tuple, dict]:
        values, keywords = jax.tree.unflatten(structure, leaves)
        whole = list(args)
        for number, value in zip(numbers, values, strict=True):
            whole[number] = value
        return tuple(whole), keywords

    def paths() -> list[str]:
        return axes.argument_paths(fun, mapped_args, kwargs, numbers)

    leaves, structure = jax.tree.flatten((mapped_args, kwargs))
    leaf_axes = axes.spread_in_axes(in_axes, mapped_args, kwargs, name)
    owned = [*zip(numbers, mapped_args, strict=True), *sorted(kwargs.items())]
    owners = tuple(owner for owner, tree in owned for _ in jax.tree.leaves(tree))
    return Call(fun, rebuild, leaves, leaf_axes, owners, paths, name)


def run_mapped(options: Options, call: Call, *, whole: bool) -> tuple[Any, Layout | None]:
    """Traces the mapped function.

    Args:
      options: what was said to pmap.
      call: the arguments, as tracers.
      whole: whether the arguments hold the slices of all processes, or those of this one.

    Returns:
      The output, and the layout; None for the latter inside another pmap, whose layout it is.
    """
    frame = nesting.current()
    if frame is not None:
        return _run_inside(options, call, frame), None
    manual = nesting.manual_axes()
    if manual:
        raise refusals.inside_foreign_shard_map(options.choice.fun_name, manual)
    inner: tuple[InnerAxis, ...] = ()
    while True:
        layout = lay_out(options.choice, call.size, inner, whole=whole)
        try:
            output = _run_outermost(options, call, layout, inner, whole=whole)
        except nesting.MoreAxes as more:
            inner = (*inner, more.axis)
        else:
            check_all_used(options.choice, layout)
            return output, layout


def _run_outermost(
    options: Options, call: Call, layout: Layout, inner: tuple[InnerAxis, ...], *, whole: bool
) -> Any:
    name = options.choice.axis_name if options.axis_name is None else options.axis_name
    as_view = not whole and layout.processes > 1
    leaves = call.leaves
    if as_view:
        if layout.process_mesh is None:
            raise refusals.scattered_devices(options.choice.fun_name)
        with _context_of(layout.process_mesh):
            leaves = [
                traced_view.view_as_whole(leaf, axis, layout)
                for leaf, axis in zip(leaves, call.axes, strict=True)
            ]
    batched = options.choice.virtual or not isinstance(name, str) or nesting.is_bound(name)
    frame = nesting.Frame(
        names=(name,), inner=inner, depth=0, manual=not batched, grows=not batched
    )
    with _context_of(layout.mesh):
        if batched:
            pin = _pin_to(layout.mesh, layout.name)
            output, out_axes = _batch(options, call, leaves, name, frame, layout.size, pin)
        else:
            output, out_axes = _cut(options, call, leaves, name, frame, layout.mesh)
    if as_view:
        assert layout.process_mesh is not None
        flat, structure = jax.tree.flatten(output)
        with _context_of(layout.process_mesh):
            flat = [
                traced_view.whole_as_view(leaf, axis, layout)
                for leaf, axis in zip(flat, out_axes, strict=True)
            ]
        output = jax.tree.unflatten(structure, flat)
    return output


def _run_inside(options: Options, call: Call, frame: nesting.Frame) -> Any:
    """A pmap in the body of another one."""
    choice = options.choice
    if choice.devices is not None or choice.backend is not None:
        raise refusals.inner_devices_given(choice.fun_name)
    if choice.axis_size not in (None, call.size):
        raise refusals.size_not_as_promised(choice.fun_name, choice.axis_size, call.size)
    level = len(frame.names)
    name = f"pmap_axis_{level}" if options.axis_name is None else options.axis_name
    names = (*frame.names, name)
    if not frame.grows or choice.virtual:
        below = dataclasses.replace(frame, names=names, manual=False, grows=False)
        return _batch(options, call, call.leaves, name, below, call.size, _pin_nothing)[0]

    free = isinstance(name, str) and name not in (*frame.names, *[a.name for a in frame.inner])
    if frame.depth == len(frame.inner):
        raise nesting.MoreAxes(InnerAxis(name if free else f"pmap_axis_{level}", call.size))
    axis = frame.inner[frame.depth]
    below = dataclasses.replace(frame, names=names, depth=frame.depth + 1)
    own = axis == (name, call.size) and name not in frame.names
    if own and frame.manual and _compat.NESTED_MANUAL_AXIS_INDEX:
        return _cut(options, call, call.leaves, name, below, None)[0]
    below = dataclasses.replace(below, manual=False)
    pin = _pin_nothing if call.size % axis.size else _pin_inside(axis.name)
    return _batch(options, call, call.leaves, name, below, call.size, pin)[0]


def _cut(
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


def _batch(
    options: Options,
    call: Call,
    leaves: Sequence[Any],
    name: Any,
    frame: nesting.Frame,
    size: int,
    pin: Callable[[jax.Array, Axis], jax.Array],
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
    flat = mapped(*pinned)
    structure, out_axes = found[-1]

    def at_its_axis(array: jax.Array, axis: Axis) -> jax.Array:
        if axis is None:  # pmap gives the value of the first device
            return lax.index_in_dim(array, 0, keepdims=False)
        return jnp.moveaxis(array, 0, axis)

    flat = [pin(at_its_axis(array, axis), axis) for array, axis in zip(flat, out_axes, strict=True)]
    return jax.tree.unflatten(structure, flat), out_axes


def _check_keys(call: Call, leaves: Sequence[Any]) -> None:
    """Refuses keys whose bits depend on how many of them are used at once."""
    for path, leaf in zip(call.paths(), leaves, strict=True):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(leaf))
            if "threefry" not in implementation:
                raise refusals.random_bits_differ(call.fun_name, path, implementation)


def _pin_nothing(array: jax.Array, axis: Axis) -> jax.Array:
    del axis
    return array


def _pin_to(mesh: Mesh, name: str) -> Callable[[jax.Array, Axis], jax.Array]:
    """Lays the mapped axis over `name`, the first axis of `mesh`."""

    def pin(array: jax.Array, axis: Axis) -> jax.Array:
        sharding = NamedSharding(mesh, axes.spec_of_axis(axis, array.ndim, name))
        return lax.with_sharding_constraint(array, sharding)

    return pin


def _pin_inside(name: str) -> Callable[[jax.Array, Axis], jax.Array]:
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
def _context_of(mesh: Mesh) -> Iterator[None]:
    """Steps out of a mesh that the user has set: shard_map accepts none but its own."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or context == mesh.abstract_mesh:
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
