"""The program of a mapped function: one `shard_map`, into which the user's function is traced.

pmap shows each process its own slices only, `[L, *s]` for `L` devices; the program runs on global
arrays `[P * L, *s]` of `P` processes. Outside of a trace the two are the same buffers under two
shapes (see `process_calls`). Inside one, where there are no buffers, the view is an array of the
global program that is declared to be replicated over processes, though its copies differ.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from jax_dist._passes import interpreter, rebind
from jax_dist._passes.interpreter import named_axes
from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call
from jax_dist._pmap.meshes import PROCESS_AXIS, Frame, InnerAxis, Layout
from jax_dist._pmap.options import Options
from jax_dist.errors import DeviceCountError, MappedAxisError

_MAX_RANK = 64  # of NumPy arrays


@dataclasses.dataclass(slots=True)
class TracedBody:
    """The user's function, to be traced for the devices of a mesh axis or as a vmap."""

    options: Options
    call: Call
    frame: Frame
    shadows: bool = False  # whether an outer vmap has the same axis name
    out_tree: Any = None  # this and the next: known once it is traced
    out_axes: tuple[Axis, ...] = ()  # of each leaf of the output

    def run(self, slices: Sequence[Any]) -> list[Any]:
        """Trace the function on the slices of one device; return the leaves of its output."""
        with self.frame.active():
            output = self.call.run(slices)
        self.out_axes = axes.spread_out_axes(self.options.out_axes, output, self.options.fun_name)
        leaves, self.out_tree = jax.tree.flatten(output)
        return leaves

    def map_over_devices(
        self,
        leaves: Sequence[Any],
        name: str,
        mesh: Any = None,
        manual: set[str] | None = None,
        run: Callable[[Sequence[Any]], list[Any]] | None = None,
    ) -> list[list[Any]]:
        """Trace it into a `shard_map`, one slice on each device along mesh axis `name`.

        Of `(8, 3)` over 8 devices, a block is `(1, 3)`, and the function gets `(3,)`. `leaves` are
        global arrays; before those of the call may be replicated ones, if `run`, which is called in
        the place of `self.run`, takes them. Along the axes in `manual` but `name`, all devices
        compute the same. Returns the output in the groups of `out_specs`.
        """
        run = run or self.run
        replicated: list[Axis] = [None] * (len(leaves) - len(self.call.leaves))
        in_axes = replicated + self.call.dims

        def body(*blocks: jax.Array) -> list[list[Any]]:
            pairs = zip(blocks, in_axes, strict=True)
            outs = run([x if axis is None else lax.squeeze(x, [axis]) for x, axis in pairs])
            groups: list[list[Any]] = [[] for _ in self.out_specs(name)]
            for out, axis in zip(outs, self.out_axes, strict=True):
                block = out if axis is None else lax.expand_dims(out, [axis])
                groups[_group_index(axis)].append(block)
            return groups

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(axes.spec_of_axis(axis, 1 + (axis or 0), name) for axis in in_axes),
            out_specs=self.out_specs(name),
            axis_names=manual or {name},
            # With check_vma=True, grad in the body by a replicated argument already sums over the
            # devices, and the program's own psum then gives N times the gradient of pmap.
            check_vma=False,
        )(*leaves)

    def out_specs(self, name: Any) -> list[P]:
        """Return the shard_map's out_specs: `[P(), P("i")]` for out_axes=0 over mesh axis "i".

        That is one for replicated leaves, then one for each out axis. The body returns its leaves
        grouped so, since out_specs are needed before the trace, when neither the structure of the
        output is known nor which dimension a negative axis means.
        """
        out_axes = jax.tree.leaves(self.options.out_axes)
        last = _MAX_RANK if any(axis < 0 for axis in out_axes) else max(out_axes, default=0)
        return [P()] + [axes.spec_of_axis(axis, axis + 1, name) for axis in range(last + 1)]

    def ungroup(self, groups: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the leaves of the output in their order, from the groups of `map_over_devices`."""
        iterators = [iter(group) for group in groups]
        return [next(iterators[_group_index(axis)]) for axis in self.out_axes]

    def inside_region(self, axis: InnerAxis) -> list[Any]:
        """Map a pmap inside of another one, over a free axis of its mesh; return the output leaves.

        The body may use tracers of the outer body, which a nested shard_map cannot close over. A
        first trace finds them; the jaxpr is then mapped with them as its first operands. Without
        any, the function itself is mapped: a jaxpr may hold kernels that cannot be moved.
        """
        run = lambda *slices: self.run(slices)
        axis_env: Any = [tuple(axis)]
        jaxpr = jax.make_jaxpr(run, axis_env=axis_env)(*self.call.slices())
        consts = interpreter.constants(jaxpr)
        outer_tracers = {i: const for i, const in enumerate(consts) if isinstance(const, Tracer)}
        if not outer_tracers:
            return self.ungroup(self.map_over_devices(self.call.leaves, axis.name))

        def evaluate(operands: Sequence[Any]) -> list[Any]:
            inner_tracers = dict(zip(outer_tracers, operands, strict=False))
            inner_consts = [inner_tracers.get(i, const) for i, const in enumerate(consts)]
            closed = ClosedJaxpr(interpreter.open_jaxpr(jaxpr), inner_consts)
            return rebind.evaluate(closed, operands[len(outer_tracers) :])

        operands = [*outer_tracers.values(), *self.call.leaves]
        return self.ungroup(self.map_over_devices(operands, axis.name, run=evaluate))

    def trace_as_vmap(self, name: Any) -> list[Any]:
        """Trace it as a vmap with axis name `name`; return the leaves of its output, stacked."""
        call = self.call
        outs = jax.vmap(
            lambda *slices: self.run(slices), call.axes, 0, axis_name=name, axis_size=call.size
        )(*call.leaves)
        # A leaf with out_axes None has the same value in each slice: take the first.
        pairs = zip(outs, self.out_axes, strict=True)
        return [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in pairs]


def _group_index(axis: Axis) -> int:
    """Return the index in `TracedBody.out_specs` of the group of leaves with this out axis."""
    return 0 if axis is None else axis + 1


def emit(
    options: Options, call: Call, layout: Layout, *, as_view: bool = False
) -> tuple[Any, TracedBody]:
    """Trace the user's function into a `shard_map`; return its results, and the traced body.

    With `as_view`, arguments and results are process-local arrays, else global ones.
    """
    inner_axes = layout.inner if meshes.mesh_of_user() is None else ()
    body = TracedBody(options, call, Frame((layout.name,), inner_axes))
    leaves: Sequence[Any] = call.leaves
    body.shadows = _is_bound(layout.name)
    as_view = as_view and layout.processes > 1
    if as_view:
        if layout.process_mesh is None:
            raise DeviceCountError(
                f"pmap of '{call.fun_name}' cannot be traced over these devices: order devices= by "
                "process, with as many of each process."
            )
        leaves = _convert_over_processes(_view_as_whole, leaves, call.axes, layout)
    outs = _emit_on_mesh(body, leaves, layout)
    if as_view:
        outs = _convert_over_processes(_whole_as_view, outs, body.out_axes, layout)
    return jax.tree.unflatten(body.out_tree, outs), body


def emit_inside(options: Options, call: Call, outer: Frame) -> Any:
    """Trace a pmap in the body of another one, `outer`: over a mesh axis of its own, or as a vmap.

    When the outermost pmap is traced first, its mesh has no axes for the pmaps inside, which become
    vmaps. Then it is traced again, on a mesh that has the axes.
    """
    if options.devices is not None or options.backend is not None:
        raise MappedAxisError(
            f"pmap of '{options.fun_name}' with devices= or backend= is called inside another "
            "mapped function; give devices= to the outermost pmap only."
        )
    if options.axis_size not in (None, call.size):
        raise meshes.unequal_axis_size(options, call.size)
    axis, frame, on_mesh = outer.enter_axis(options.axis_name, call.size)
    body = TracedBody(options, call, frame)
    outs = body.inside_region(axis) if on_mesh else body.trace_as_vmap(axis.name)
    return jax.tree.unflatten(body.out_tree, outs)


def check_collectives(body: TracedBody, jaxpr: Any) -> None:
    """Raise MappedAxisError if an outer vmap has the axis name of collectives in the body."""
    name = body.frame.names[0]
    if body.shadows and any(name in named_axes(eqn) for eqn in interpreter.equations(jaxpr)):
        raise MappedAxisError(
            f"pmap of '{body.options.fun_name}' has collectives over axis {name!r}, which a vmap "
            "around it maps, too. Use another axis_name."
        )


def _is_bound(name: str) -> bool:
    """Return whether an outer vmap or shard_map has this axis name."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def _emit_on_mesh(body: TracedBody, leaves: Sequence[Any], layout: Layout) -> list[Any]:
    """Trace a body on its mesh, also if the user has set another mesh of the same devices.

    XLA then moves arguments from the user's mesh to ours, and results back. Several axes of ours (a
    pmap with pmaps inside) may not fit the axes of the user's: then both are replicated.
    """
    user_mesh, mesh = meshes.mesh_of_user(), layout.mesh
    if user_mesh is None:
        return body.ungroup(body.map_over_devices(leaves, layout.name, mesh))
    if user_mesh.size != mesh.size:
        raise MappedAxisError(
            f"pmap of '{body.options.fun_name}' needs {mesh.size} devices, but is traced under a "
            f"mesh of {user_mesh.size}. Set a mesh of {mesh.size} devices, or call it outside of "
            "traces."
        )

    has_inner_axes = len(mesh.axis_names) > 1

    def run(*leaves: Any) -> list[list[Any]]:
        if has_inner_axes:
            leaves = tuple(lax.with_sharding_constraint(x, P()) for x in leaves)
        with meshes.context_of(mesh):
            # All axes are manual: XLA supports no shard_map over a part, nor a nested one, here.
            return body.map_over_devices(leaves, layout.name, mesh, {*mesh.axis_names})

    if meshes.is_explicit(user_mesh):  # shardings are part of types, and no constraints are allowed
        specs = body.out_specs(meshes.all_axes(user_mesh))
        groups: Any = jax.sharding.auto_axes(run, out_sharding=specs)(*leaves)
        return body.ungroup(groups)
    outs = body.ungroup(run(*leaves))
    return [lax.with_sharding_constraint(x, P()) for x in outs] if has_inner_axes else outs


def _convert_over_processes(
    convert: Callable[..., jax.Array],
    leaves: Sequence[Any],
    leaf_axes: Sequence[Axis],
    layout: Layout,
) -> list[Any]:
    """Call `convert(leaf, axis, layout)` for each leaf, with `layout.process_mesh` set."""
    assert layout.process_mesh is not None
    with meshes.context_of(layout.process_mesh):
        return [convert(*pair, layout) for pair in zip(leaves, leaf_axes, strict=True)]


def _view_as_whole(view: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """Convert a process-local array to a global one: `[L, *s] -> [P * L, *s]` (for axis 0).

    To the program, the view is replicated over processes; in truth each process holds its own
    slices. No element is moved: the same buffer is declared to be one part of a longer array.
    """
    if axis is None:
        return view
    padding = jnp.zeros_like(view, shape=(layout.processes - 1, *view.shape))
    parts = _convert(jnp.concatenate([view[None], padding]), axis, layout, to_whole=True)
    merged = jnp.moveaxis(parts, 0, axis % view.ndim)
    return lax.reshape(merged, axes.resize(view.shape, axis, view.shape[axis] * layout.processes))


def _whole_as_view(whole: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """Invert `_view_as_whole`: `[P * L, *s] -> [L, *s]` (for axis 0)."""
    if axis is None:
        return whole
    axis %= whole.ndim
    local_shape = axes.resize(whole.shape, axis, whole.shape[axis] // layout.processes)
    split_shape = axes.stack(local_shape, axis, layout.processes)  # [..., P, L, ...]
    parts = jnp.moveaxis(lax.reshape(whole, split_shape), axis, 0)
    return _convert(parts, axis, layout, to_whole=False)[0]


def _convert(parts: jax.Array, axis: int, layout: Layout, *, to_whole: bool) -> jax.Array:
    """Convert `[P, ..., L, ...]` between a process-local and a global array, differentiably.

    There are P processes with L devices each. In the process-local array, row 0 is the view of this
    process and the others are padding; in the global one, row p holds the slices of process p.
    `axis` is where L is in a row.

    shard_map would transpose the view as a replicated array, and sum cotangents over processes,
    whose slices have nothing to do with each other. The right transpose is the inverse. The one
    public way to define it for jvp, vmap and grad is custom_linear_solve, which requires input and
    output of one shape: hence the padding.
    """
    axis %= parts.ndim - 1
    view_spec = P(None, *[None] * axis, layout.name)
    whole_spec = P(PROCESS_AXIS, *[None] * axis, layout.name)

    def pad(block: jax.Array) -> jax.Array:
        padding = jnp.zeros_like(block, shape=(layout.processes - 1, *block.shape[1:]))
        return jnp.concatenate([block, padding])

    shard_map = functools.partial(jax.shard_map, mesh=layout.process_mesh, check_vma=False)
    as_whole = shard_map(lambda block: block[:1], in_specs=view_spec, out_specs=whole_spec)
    as_view = shard_map(pad, in_specs=whole_spec, out_specs=view_spec)
    convert, invert = (as_whole, as_view) if to_whole else (as_view, as_whole)
    if not jnp.issubdtype(parts.dtype, jnp.inexact):  # integers have no derivative
        return convert(parts)
    # Nothing is solved: what is called the solution is the converted array.
    solve, transpose_solve = lambda _, x: convert(x), lambda _, x: invert(x)
    return lax.custom_linear_solve(lambda x: x, parts, solve, transpose_solve)
