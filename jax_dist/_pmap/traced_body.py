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
from jax_dist._pmap.call import MappedCall
from jax_dist._pmap.meshes import PROCESS_AXIS, Frame, InnerAxis, MeshLayout
from jax_dist._pmap.options import PmapOptions
from jax_dist.errors import DeviceCountError, MappedAxisError

_MAX_RANK = 64  # of NumPy arrays


@dataclasses.dataclass(slots=True)
class TracedBody:
    """The user's function, to be traced for the devices of a mesh axis or as a vmap."""

    options: PmapOptions
    call: MappedCall
    frame: Frame
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
        """Trace the function into a `shard_map`; return its output in the groups of `out_specs`.

        Of a leaf `(8, 3)` that is mapped over its first dimension and 8 devices, shard_map gives
        each device a block `(1, 3)`, and the function gets the slice `(3,)`.

        Args:
          leaves: global arrays: those of the call. With `run`, others may come before them, of
            which each device gets the whole.
          name: the mesh axis with one slice on each device.
          mesh: where; None for the mesh of the context.
          manual: the axes that the shard_map is manual over, if more than `name`. Along the others
            all devices compute the same.
          run: what to call on the slices instead of `self.run`.
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
            in_specs=tuple(axes.spec_of_axis(axis, name) for axis in in_axes),
            out_specs=self.out_specs(name),
            axis_names=manual or {name},
            # With check_vma=True, grad in the body by a replicated argument already sums over the
            # devices, and the program's own psum then gives N times the gradient of pmap.
            check_vma=False,
        )(*leaves)

    def out_specs(self, name: Any) -> list[P]:
        """Return the shard_map's out_specs: `[P(), P("i")]` for out_axes=0 over mesh axis "i".

        shard_map needs them before the trace, when neither the structure of the output is known nor
        which dimension a negative axis means. So its body returns the leaves in groups: first the
        replicated ones (out_axes=None), then those stacked along dimension 0, 1 and so on; there is
        one spec for each group.
        """
        out_axes = jax.tree.leaves(self.options.out_axes)
        last = _MAX_RANK if any(axis < 0 for axis in out_axes) else max(out_axes, default=0)
        return [P()] + [axes.spec_of_axis(axis, name) for axis in range(last + 1)]

    def ungroup(self, groups: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the leaves of the output in their order, from the groups of `map_over_devices`."""
        iterators = [iter(group) for group in groups]
        return [next(iterators[_group_index(axis)]) for axis in self.out_axes]

    def map_over_free_axis(self, name: str, size: int) -> list[Any]:
        """Map a pmap inside of another one, over a free axis of its mesh; return the output leaves.

        The function may use tracers of the outer body, which a nested shard_map cannot close over.
        A first trace finds them among the constants of its jaxpr; the jaxpr is then mapped with
        them as its first operands. Without any, the function itself is mapped, for a jaxpr may hold
        kernels that cannot be moved.
        """
        run_on_slices = lambda *slices: self.run(slices)
        jaxpr = jax.make_jaxpr(run_on_slices, axis_env=[(name, size)])(*self.call.slices())
        consts = interpreter.constants(jaxpr)
        outer_tracers = {n: const for n, const in enumerate(consts) if isinstance(const, Tracer)}
        if not outer_tracers:
            return self.ungroup(self.map_over_devices(self.call.leaves, name))

        def evaluate(operands: Sequence[Any]) -> list[Any]:
            inner_tracers = dict(zip(outer_tracers, operands, strict=False))
            inner_consts = [inner_tracers.get(n, const) for n, const in enumerate(consts)]
            closed = ClosedJaxpr(interpreter.open_jaxpr(jaxpr), inner_consts)
            return rebind.evaluate(closed, operands[len(outer_tracers) :])

        operands = [*outer_tracers.values(), *self.call.leaves]
        return self.ungroup(self.map_over_devices(operands, name, run=evaluate))

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
    options: PmapOptions, call: MappedCall, layout: MeshLayout, *, as_view: bool = False
) -> tuple[Any, tuple[InnerAxis, ...]]:
    """Trace the user's function into a `shard_map`, over the mesh of `layout`.

    Arguments and results are global arrays; with `as_view`, process-local ones. Returns the
    results, and the mesh axes that pmaps inside ask for: with these in its layout, the function is
    traced again.
    """
    inner_axes = layout.inner if meshes.mesh_of_user() is None else ()
    body = TracedBody(options, call, Frame((layout.name,), inner_axes))
    if not as_view or layout.processes == 1:
        outs = _emit_on_mesh(body, call.leaves, layout)
    elif (process_mesh := layout.process_mesh) is None:
        raise DeviceCountError(
            f"pmap of '{call.fun_name}' cannot be traced over these devices: order devices= by "
            "process, with as many of each process."
        )
    else:
        with meshes.context_of(process_mesh):
            pairs = zip(call.leaves, call.axes, strict=True)
            leaves = [_view_as_whole(view, axis, layout) for view, axis in pairs]
        outs = _emit_on_mesh(body, leaves, layout)
        with meshes.context_of(process_mesh):
            pairs = zip(outs, body.out_axes, strict=True)
            outs = [_whole_as_view(whole, axis, layout) for whole, axis in pairs]
    return jax.tree.unflatten(body.out_tree, outs), tuple(body.frame.wanted)


def emit_inside(options: PmapOptions, call: MappedCall, outer: Frame) -> Any:
    """Trace a pmap in the body of another one, `outer`; return its results.

    It is mapped over a mesh axis of its own if one is free, and else is a vmap; see `meshes.Frame`.
    """
    if options.devices is not None or options.backend is not None:
        raise MappedAxisError(
            f"pmap of '{options.fun_name}' with devices= or backend= is called inside another "
            "mapped function; give devices= to the outermost pmap only."
        )
    meshes.check_axis_size(options, call.size)
    (name, size), frame, is_free = outer.enter_axis(options.axis_name, call.size)
    body = TracedBody(options, call, frame)
    outs = body.map_over_free_axis(name, size) if is_free else body.trace_as_vmap(name)
    return jax.tree.unflatten(body.out_tree, outs)


def check_collectives(fun_name: str, name: str, jaxpr: Any) -> None:
    """Raise MappedAxisError if collectives of a pmap over `name` would be those of an outer vmap.

    `jaxpr` is the traced pmap. If a vmap around it has the same axis name, JAX takes the
    collectives over that name for the vmap's, and their numbers are wrong.
    """
    try:
        lax.axis_size(name)
    except NameError:  # no vmap around has this name
        return
    if any(name in named_axes(eqn) for eqn in interpreter.equations(jaxpr)):
        raise MappedAxisError(
            f"pmap of '{fun_name}' has collectives over axis {name!r}, which a vmap around it "
            "maps, too. Use another axis_name."
        )


def _emit_on_mesh(body: TracedBody, leaves: Sequence[Any], layout: MeshLayout) -> list[Any]:
    """Trace a body on its mesh, also if the user has set another mesh of the same devices.

    XLA then moves arguments from the user's mesh to that of the pmap, and results back.
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

    def run(*leaves: Any) -> list[list[Any]]:
        with meshes.context_of(mesh):
            # All axes are manual: XLA supports no shard_map over a part, nor a nested one, here.
            return body.map_over_devices(leaves, layout.name, mesh, {*mesh.axis_names})

    traced: Any = run
    if user_mesh.explicit_axes:  # shardings are part of types there
        specs = body.out_specs(user_mesh.axis_names)
        traced = jax.sharding.auto_axes(run, out_sharding=specs)
    return body.ungroup(traced(*leaves))


def _view_as_whole(view: jax.Array, axis: Axis, layout: MeshLayout) -> jax.Array:
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


def _whole_as_view(whole: jax.Array, axis: Axis, layout: MeshLayout) -> jax.Array:
    """Invert `_view_as_whole`: `[P * L, *s] -> [L, *s]` (for axis 0)."""
    if axis is None:
        return whole
    axis %= whole.ndim
    local_shape = axes.resize(whole.shape, axis, whole.shape[axis] // layout.processes)
    split_shape = axes.stack(local_shape, axis, layout.processes)  # [..., P, L, ...]
    parts = jnp.moveaxis(lax.reshape(whole, split_shape), axis, 0)
    return _convert(parts, axis, layout, to_whole=False)[0]


def _convert(rows: jax.Array, axis: int, layout: MeshLayout, *, to_whole: bool) -> jax.Array:
    """Convert `[P, ..., L, ...]` between a process-local and a global array, differentiably.

    There are P processes with L devices each. In the process-local array, row 0 is the view of this
    process and the others are padding; in the global one, row p holds the slices of process p.
    `axis` is where L is in a row.

    shard_map would transpose the view as a replicated array, and sum cotangents over processes,
    whose slices have nothing to do with each other. The right transpose is the inverse. The one
    public way to define it for jvp, vmap and grad is custom_linear_solve, which requires input and
    output of one shape: hence the padding.
    """
    axis %= rows.ndim - 1
    view_spec = P(None, *[None] * axis, layout.name)
    whole_spec = P(PROCESS_AXIS, *[None] * axis, layout.name)

    def pad(block: jax.Array) -> jax.Array:
        padding = jnp.zeros_like(block, shape=(layout.processes - 1, *block.shape[1:]))
        return jnp.concatenate([block, padding])

    shard_map = functools.partial(jax.shard_map, mesh=layout.process_mesh, check_vma=False)
    as_whole = shard_map(lambda block: block[:1], in_specs=view_spec, out_specs=whole_spec)
    as_view = shard_map(pad, in_specs=whole_spec, out_specs=view_spec)
    convert, invert = (as_whole, as_view) if to_whole else (as_view, as_whole)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):  # integers have no derivative
        return convert(rows)
    # Nothing is solved: what is called the solution is the converted array.
    solve, transpose_solve = lambda _, x: convert(x), lambda _, x: invert(x)
    return lax.custom_linear_solve(lambda x: x, rows, solve, transpose_solve)
