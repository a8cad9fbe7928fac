"""The program of a mapped function for one signature: its body, on its mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_dist import _compat
from jax_dist.mapping import meshes, nesting, region, traced_view
from jax_dist.mapping.body import Body, whole_call
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.collectives import AxisPlace
from jax_dist.mapping.meshes import InnerAxis, Layout
from jax_dist.passes import pipeline
from jax_dist.passes.gathers import plan_gathers
from jax_dist.passes.pipeline import Pass
from jax_dist.passes.primitives import GATHERS


class Found(NamedTuple):
    """What is known of one signature."""

    body: Body
    layout: Layout


def find(options: Options, call: Call, trace: Callable[[Call], Body], *, whole: bool) -> Found:
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
    return Found(body, layout_for(options, call, body.inner, whole=whole))


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
    options: Options, call: Call, found: Found, captured: Sequence[Any], *, as_view: bool = False
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
    if as_view and layout.processes > 1:
        traced_view.check_joined(layout, call.fun_name)
    else:
        as_view = False
    values = captured or body.lifted.values
    rows = layout.mesh.shape[layout.name]
    place = AxisPlace(body.axis, layout.size, layout.name, layout.size // rows)

    def evaluate(*inputs: Any) -> list[Any]:
        given, leaves = inputs[: len(values)], list(inputs[len(values) :])
        if as_view:
            leaves = traced_view.all_as_whole(leaves, call.axes, layout)
        with meshes.context_of(layout.mesh):
            outs = region.run_body(body, given, leaves, call.axes, layout.mesh, place)
        return traced_view.all_as_view(outs, body.out_axes, layout) if as_view else outs

    passes = []
    if options.gathers == "reduce" and _compat.CAN_REWRITE:
        passes.append(Pass(GATHERS, plan_gathers))
    inputs = (*values, *call.leaves)
    flat, _ = pipeline.evaluate_through(passes, body.lifted.jaxpr, inputs, evaluate)
    return jax.tree.unflatten(body.out_tree, flat)
