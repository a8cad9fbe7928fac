"""The program of a mapped function for one signature: its body, on its mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping import axes, meshes, nesting, refusals, region, traced_view
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.body import Body, whole_call
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.collectives import AxisPlace
from jax_dist.mapping.meshes import InnerAxis, Layout
from jax_dist.passes import pipeline
from jax_dist.passes.gathers import plan_gathers
from jax_dist.passes.interpreter import GATHERS
from jax_dist.passes.pipeline import Pass


class KnownSignature(NamedTuple):
    """What is known of one signature."""

    body: Body
    layout: Layout


def find(
    options: Options, call: Call, trace: Callable[[Call], Body], *, whole: bool
) -> KnownSignature:
    """The body and the mesh for a call.

    Args:
      options: what was said to pmap.
      call: has arguments with types.
      trace: gives the body for a call on whole arguments.
      whole: whether the arguments hold the slices of all processes, or those of this one.
    """
    if not whole:
        processes = layout_for(options, call, (), whole=False).processes
        body = trace(whole_call(call, processes))
    else:
        body = trace(call)
    return KnownSignature(body, layout_for(options, call, body.inner, whole=whole))


def layout_for(
    options: Options, call: Call, inner: tuple[InnerAxis, ...], *, whole: bool = True
) -> Layout:
    """The mesh for a call.

    Args:
      options: what was said to pmap.
      call: says the size of the mapped axis.
      inner: the axes that pmaps inside want.
      whole: whether the arguments hold the slices of all processes, or those of this one.

    Raises:
      DeviceCountError: the axes do not fit the devices.
    """
    choice = options.choice
    if nesting.is_bound(choice.axis_name):  # by a vmap outside, which would take it for its own
        choice = dataclasses.replace(choice, axis_name=meshes.UNNAMED)
    layout = meshes.lay_out(choice, call.size, () if choice.virtual else inner, whole=whole)
    meshes.check_all_used(choice, layout)
    return layout


def emitted(
    options: Options,
    call: Call,
    found: KnownSignature,
    captured: Sequence[Any],
    *,
    as_view: bool = False,
) -> Any:
    """Emits the program in the current trace.

    Args:
      options: what was said to pmap.
      call: its arguments, as tracers.
      found: for this call.
      captured: the arrays that are lifted out of the body; none: as they were when it was traced.
      as_view: whether the arguments hold the slices of this process, and the results shall, too.

    Returns:
      The output.
    """
    body, layout = found
    as_view = as_view and layout.processes > 1
    if as_view:
        traced_view.check_joined(layout, call.fun_name)
    values = captured or body.lifted.values
    target = _target(body, call, layout)

    def evaluate(*inputs: Any) -> list[Any]:
        given, leaves = list(inputs[: len(values)]), list(inputs[len(values) :])
        if as_view:
            leaves = traced_view.all_as_whole(leaves, call.axes, layout)
        if target.mesh is None:
            given = [_resharded(x, None, target.place) for x in given]
            pairs = zip(leaves, call.axes, strict=True)
            leaves = [_resharded(*pair, target.place) for pair in pairs]
            outs = region.run_body(body, given, leaves, call.axes, target.place, None, ())
        else:
            if target.place.idle_axes:
                leaves = [jax.lax.with_sharding_constraint(x, P()) for x in leaves]
            with meshes.context_of(target.mesh):
                outs = region.run_body(body, given, leaves, call.axes, *target)
            if target.place.idle_axes:  # the user's mesh may have no axis that fits
                outs = [jax.lax.with_sharding_constraint(x, P()) for x in outs]
        return traced_view.all_as_view(outs, body.out_axes, layout) if as_view else outs

    passes = []
    if options.gathers != "keep" and _compat.CAN_REWRITE:
        plan = functools.partial(plan_gathers, exact=options.gathers == "exact")
        passes.append(Pass(GATHERS, plan))
    inputs = (*values, *call.leaves)
    flat, _ = pipeline.evaluate_through(passes, body.lifted.jaxpr, inputs, evaluate)
    return jax.tree.unflatten(body.out_tree, flat)


class _Target(NamedTuple):
    """What a program is emitted for."""

    place: AxisPlace  # of the mapped axis
    mesh: Mesh | None  # None: that of the context
    inner: tuple[InnerAxis, ...]  # the axes of the mesh for the pmaps inside


def _target(body: Body, call: Call, layout: Layout) -> _Target:
    """The own mesh; under one that is set by `jax.set_mesh`, over the same devices.

    Where shardings are types, arrays of another mesh cannot meet; and a program has one set of
    devices. Then it is the user's mesh, and the mapped axis lies over all of its axes.
    """
    user = meshes.mesh_of_user()
    rows = layout.mesh.shape[layout.name]
    own = AxisPlace(body.axis, layout.size, layout.name, layout.size // rows)
    if user is None:
        inner = tuple(InnerAxis(*axis) for axis in list(layout.mesh.shape.items())[1:])
        return _Target(own, layout.mesh, inner)
    if user.size == layout.mesh.size and not meshes.has_types(user):
        # JAX cannot lower a region in a region here, nor XLA what is manual over a part of an axis.
        return _Target(
            dataclasses.replace(own, idle_axes=layout.mesh.axis_names[1:]), layout.mesh, ()
        )
    if layout.size % user.size:
        raise refusals.under_another_mesh(call.fun_name, layout.size, user.size)
    over_all = AxisPlace(body.axis, layout.size, meshes.all_axes(user), layout.size // user.size)
    return _Target(over_all, None, ())


def _resharded(x: Any, axis: Axis, place: AxisPlace) -> Any:
    """Cut over the user's mesh, where that is a matter of types."""
    user = meshes.mesh_of_user()
    if user is None or not meshes.has_types(user):
        return x
    spec = axes.spec_of_axis(axis, jnp.ndim(x), place.mesh_axis)
    return jax.sharding.reshard(x, spec)
