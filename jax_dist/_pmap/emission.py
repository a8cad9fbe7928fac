"""The program of a mapped function for one signature: its body, on its mesh.

pmap shows each process its own slices only, `[L, *s]` for `L` devices; the program runs on the
whole `[P * L, *s]` of `P` processes. Outside of a trace the two are the same buffers under two
shapes (see `process_calls`). Inside one, where there are no buffers, the view is an array of the
whole program that is declared to be replicated over processes, though its copies differ.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap import axes, meshes, region
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Body, Call, Options, type_of
from jax_dist._pmap.collectives import AxisPlace
from jax_dist._pmap.meshes import PROCESS_AXIS, InnerAxis, Layout
from jax_dist._rewrite import pipeline
from jax_dist._rewrite.gathers import GATHERS, plan_gathers
from jax_dist._rewrite.pipeline import Pass
from jax_dist.errors import DeviceCountError, NestingError, refusal


class KnownSignature(NamedTuple):
    """What is known of one signature."""

    body: Body
    layout: Layout

    @classmethod
    def of(
        cls, options: Options, call: Call, trace: Callable[[Call], Body], *, whole: bool
    ) -> "KnownSignature":
        """The body and the mesh for a call; `trace` gives the body for a call on whole arguments.

        `whole`: whether the arguments hold the slices of all processes, or those of this one.
        """
        on_whole = call
        if not whole:
            processes = layout_for(options, call, (), whole=False).processes
            types = []
            for leaf, axis in zip(call.leaves, call.axes, strict=True):
                shape = list(type_of(leaf).shape)
                if axis is not None:
                    shape[axis] *= processes
                types.append(type_of(leaf, shape))
            on_whole = dataclasses.replace(call, leaves=types)
        body = trace(on_whole)
        return cls(body, layout_for(options, call, body.inner, whole=whole))


def layout_for(
    options: Options, call: Call, inner: tuple[InnerAxis, ...], *, whole: bool = True
) -> Layout:
    """The mesh for a call, with axes for the pmaps inside; `whole` as in `KnownSignature.of`.

    Raises:
      DeviceCountError: the axes do not fit the devices.
    """
    choice = options.choice
    with contextlib.suppress(NameError):
        lax.axis_size(choice.axis_name)  # of a vmap outside, which would take it for its own
        choice = dataclasses.replace(choice, axis_name=meshes.UNNAMED)
    layout = choice.lay_out(call.size, () if choice.virtual else inner, whole=whole)
    given, used = len(choice.devices or ()), layout.mesh.size
    # Only here: the traced body shows whether a pmap inside uses the devices that are left.
    if choice.devices is None or used == given:
        return layout
    if choice.virtual:
        raise refusal(
            DeviceCountError,
            what=f"pmap of '{call.fun_name}' cannot share {layout.size} slices evenly among the "
            "devices given",
            which=[f"the mapped axis has size {layout.size}", f"len(devices) is {given}"],
            why="with virtual=True every device runs the same number of slices",
            do="Give a number of devices that divides the size of the axis.",
        )
    raise refusal(
        DeviceCountError,
        what=f"pmap of '{call.fun_name}' got {given} devices for an axis of size {used}",
        which=[f"the mapped axis needs {used}", f"len(devices) is {given}"],
        why="with devices= given, each of them runs one slice",
        do=f"Give {used} devices, or slice the arguments into {given}.",
    )


def emitted(
    options: Options,
    call: Call,
    found: KnownSignature,
    captured: Sequence[Any],
    *,
    as_view: bool = False,
) -> Any:
    """Emits the program in the current trace.

    `captured` are the arrays that are lifted out of the body; none: as they were when it was
    traced. `as_view`: whether the arguments hold the slices of this process, and the results shall,
    too.
    """
    body, layout = found
    as_view = as_view and layout.processes > 1
    if as_view and layout.process_mesh is None:
        raise refusal(
            DeviceCountError,
            what=f"pmap of '{call.fun_name}' cannot be traced over these devices",
            which=["devices= does not hold the devices of each process side by side"],
            why="inside jit, scan or grad, a process sees its own slices as one array",
            do="Order devices by process, with as many of each process.",
        )
    values = captured or body.lifted.values
    place, mesh, inner = _target(body, call, layout)

    def evaluate(*inputs: Any) -> list[Any]:
        given, leaves = list(inputs[: len(values)]), list(inputs[len(values) :])
        if as_view:
            leaves = _over_processes(_view_as_whole, leaves, call.axes, layout)
        if mesh is None:
            given = [_resharded(x, None, place) for x in given]
            pairs = zip(leaves, call.axes, strict=True)
            leaves = [_resharded(*pair, place) for pair in pairs]
            outs = region.run_body(body, given, leaves, call.axes, place, None, ())
        else:
            if place.idle_axes:
                leaves = [jax.lax.with_sharding_constraint(x, P()) for x in leaves]
            with meshes.context_of(mesh):
                outs = region.run_body(body, given, leaves, call.axes, place, mesh, inner)
            if place.idle_axes:  # the user's mesh may have no axis that fits
                outs = [jax.lax.with_sharding_constraint(x, P()) for x in outs]
        return _over_processes(_whole_as_view, outs, body.out_axes, layout) if as_view else outs

    passes = []
    if options.gathers != "keep" and _compat.CAN_REWRITE:
        plan = functools.partial(plan_gathers, exact=options.gathers == "exact")
        passes.append(Pass(GATHERS, plan))
    inputs = (*values, *call.leaves)
    flat, _ = pipeline.evaluate_through(passes, body.lifted.jaxpr, inputs, evaluate)
    return jax.tree.unflatten(body.out_tree, flat)


def _target(
    body: Body, call: Call, layout: Layout
) -> tuple[AxisPlace, Mesh | None, tuple[InnerAxis, ...]]:
    """The place of the mapped axis, the mesh, and the axes of the mesh for the pmaps inside.

    It is the own mesh; under one that is set by `jax.set_mesh`, over the same devices. Where
    shardings are types, arrays of another mesh cannot meet; and a program has one set of devices.
    Then it is the user's mesh (None), and the mapped axis lies over all of its axes.
    """
    user = meshes.mesh_of_user()
    rows = layout.mesh.shape[layout.name]
    own = AxisPlace(body.axis, layout.size, layout.name, layout.size // rows)
    if user is None:
        inner = tuple(InnerAxis(*axis) for axis in list(layout.mesh.shape.items())[1:])
        return own, layout.mesh, inner
    if user.size == layout.mesh.size and not meshes.has_types(user):
        # JAX cannot lower a region in a region here, nor XLA what is manual over a part of an axis.
        return dataclasses.replace(own, idle_axes=layout.mesh.axis_names[1:]), layout.mesh, ()
    if layout.size % user.size:
        raise refusal(
            NestingError,
            what=f"pmap of '{call.fun_name}' is traced under a mesh that it does not fit",
            which=[
                f"its mapped axis has size {layout.size}",
                f"the mesh set by jax.set_mesh has {user.size} devices",
            ],
            why="a program runs on one set of devices, and each takes as many slices",
            do="Set a mesh whose size divides that of the axis, or call it outside of traces.",
        )
    over_all = AxisPlace(body.axis, layout.size, meshes.all_axes(user), layout.size // user.size)
    return over_all, None, ()


def _resharded(x: Any, axis: Axis, place: AxisPlace) -> Any:
    """Cut over the user's mesh, where that is a matter of types."""
    user = meshes.mesh_of_user()
    if user is None or not meshes.has_types(user):
        return x
    spec = axes.spec_of_axis(axis, jnp.ndim(x), place.mesh_axis)
    return jax.sharding.reshard(x, spec)


def _over_processes(
    convert: Callable[..., jax.Array],
    leaves: Sequence[Any],
    leaf_axes: Sequence[Axis],
    layout: Layout,
) -> list[Any]:
    """Each leaf as part of the whole, or as this process sees it."""
    assert layout.process_mesh is not None
    with meshes.context_of(layout.process_mesh):
        return [convert(*pair, layout) for pair in zip(leaves, leaf_axes, strict=True)]


def _view_as_whole(view: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
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


def _whole_as_view(whole: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """`[P * L, *s] -> [L, *s]` (for axis 0) while tracing: the inverse of `_view_as_whole`."""
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
    specs = (view, whole) if to_whole else (whole, view)
    return _on_blocks(lambda block: block, layout, *specs)(array)


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

    def pad(block: jax.Array) -> jax.Array:
        rest = jnp.zeros((layout.processes - 1, *block.shape[1:]), block.dtype)
        return jnp.concatenate([block, rest])

    as_whole = lambda _, array: _on_blocks(lambda block: block[:1], layout, view, whole)(array)
    as_view = lambda _, array: _on_blocks(pad, layout, whole, view)(array)
    solve, transpose = (as_whole, as_view) if to_whole else (as_view, as_whole)
    return lax.custom_linear_solve(lambda x: x, parts, solve, transpose)


def _on_blocks(change: Callable, layout: Layout, in_specs: P, out_specs: P) -> Callable:
    mesh = layout.process_mesh
    return jax.shard_map(change, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
