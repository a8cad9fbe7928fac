"""The traced side of pmap: which mesh, and how the body runs on it.

Everything here happens while JAX traces, once per signature; nothing of it is left at call time.
"""

import dataclasses
from typing import Any

import jax

from jax_dist import _compat
from jax_dist.mapping import nesting, refusals, traced_view
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.meshes import InnerAxis, Layout, check_all_used, lay_out
from jax_dist.mapping.spread import batch, context_of, cut, pin_inside, pin_nothing, pin_to


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
        with context_of(layout.process_mesh):
            leaves = [
                traced_view.view_as_whole(leaf, axis, layout)
                for leaf, axis in zip(leaves, call.axes, strict=True)
            ]
    batched = options.choice.virtual or not isinstance(name, str) or nesting.is_bound(name)
    frame = nesting.Frame(
        names=(name,), inner=inner, depth=0, manual=not batched, grows=not batched
    )
    with context_of(layout.mesh):
        if batched:
            pin = pin_to(layout.mesh, layout.name)
            output, out_axes = batch(options, call, leaves, name, frame, layout.size, pin)
        else:
            output, out_axes = cut(options, call, leaves, name, frame, layout.mesh)
    if as_view:
        assert layout.process_mesh is not None
        flat, structure = jax.tree.flatten(output)
        with context_of(layout.process_mesh):
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
        return batch(options, call, call.leaves, name, below, call.size, pin_nothing)[0]

    free = isinstance(name, str) and name not in (*frame.names, *[a.name for a in frame.inner])
    if frame.depth == len(frame.inner):
        raise nesting.MoreAxes(InnerAxis(name if free else f"pmap_axis_{level}", call.size))
    axis = frame.inner[frame.depth]
    below = dataclasses.replace(frame, names=names, depth=frame.depth + 1)
    own = axis == (name, call.size) and name not in frame.names
    if own and frame.manual and _compat.NESTED_MANUAL_AXIS_INDEX:
        return cut(options, call, call.leaves, name, below, None)[0]
    below = dataclasses.replace(below, manual=False)
    pin = pin_nothing if call.size % axis.size else pin_inside(axis.name)
    return batch(options, call, call.leaves, name, below, call.size, pin)[0]
