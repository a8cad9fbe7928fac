"""The program of a mapped function: one `shard_map`, into which the user's function is traced.

pmap shows each process its own slices only, `[L, *s]` for `L` devices; the program runs on global
arrays `[P * L, *s]` of `P` processes. Outside of a trace the two are the same buffers under two
shapes (see `process_calls`). Inside one, where there are no buffers, the process-local array is
declared to be replicated over processes, though its copies differ.
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
        token = meshes.current_frame.set(self.frame)  # for pmaps that the function calls
        try:
            output = self.call.run(slices)
        finally:
            meshes.current_frame.reset(token)
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
          manual: the axes that the shard_map is manual over, if more than `name`.
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
        """Map the function of a pmap inside of another one over a mesh axis; return output leaves.

        The function may use values of the outer function, which are tracers. A nested shard_map
        cannot close over these: they have to be operands. A first trace, to a jaxpr, has them as
        constants; this jaxpr is mapped, with them as its first operands. Without any, the function
        itself is mapped, for a jaxpr may hold kernels that cannot be moved.
        """
        run_on_slices = lambda *slices: self.run(slices)
        jaxpr = jax.make_jaxpr(run_on_slices, axis_env=[(name, size)])(*self.call.slices())
        consts = interpreter.constants(jaxpr)
        tracer_indices = [n for n, const in enumerate(consts) if isinstance(const, Tracer)]
        if not tracer_indices:
            return self.ungroup(self.map_over_devices(self.call.leaves, name))

        def evaluate_on_device(operands: Sequence[Any]) -> list[Any]:
            inner_consts, slices = list(consts), operands[len(tracer_indices) :]
            for index, operand in zip(tracer_indices, operands, strict=False):
                inner_consts[index] = operand
            closed_jaxpr = ClosedJaxpr(interpreter.open_jaxpr(jaxpr), inner_consts)
            return rebind.evaluate(closed_jaxpr, slices)

        operands = [*(consts[index] for index in tracer_indices), *self.call.leaves]
        return self.ungroup(self.map_over_devices(operands, name, run=evaluate_on_device))

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
    options: PmapOptions, call: MappedCall, layout: MeshLayout, *, process_local: bool = False
) -> tuple[Any, tuple[InnerAxis, ...]]:
    """Trace the user's function into a `shard_map` over the mesh of `layout`.

    With P processes of L devices each, arguments and results are global arrays, `[P * L, *s]`; with
    `process_local`, those of this process, `[L, *s]`. Returns the results, and the mesh axes that
    pmaps called in the function would use: the caller traces again if the layout has not got them.
    """
    # Under a mesh of the user, the shard_map takes up all axes, and none is free for pmaps inside.
    free_axes = layout.inner_axes if meshes.mesh_of_user() is None else ()
    body = TracedBody(options, call, Frame((layout.name,), free_axes))
    if process_local and layout.processes > 1:
        outs = _map_process_local(body, layout)
    else:
        outs = _map_over_mesh(body, call.leaves, layout)
    return jax.tree.unflatten(body.out_tree, outs), tuple(body.frame.wanted_axes)


def _map_process_local(body: TracedBody, layout: MeshLayout) -> list[Any]:
    """Do `_map_over_mesh` on process-local arrays `[L, *s]`; return such leaves of the output."""
    call, process_mesh = body.call, layout.process_mesh
    if process_mesh is None:
        raise DeviceCountError(
            f"pmap of '{call.fun_name}' cannot be traced over these devices: order devices= by "
            "process, with as many of each process."
        )
    with meshes.context_of(process_mesh):
        pairs = zip(call.leaves, call.axes, strict=True)
        leaves = [_local_to_global(leaf, axis, layout) for leaf, axis in pairs]
    outs = _map_over_mesh(body, leaves, layout)
    with meshes.context_of(process_mesh):
        pairs = zip(outs, body.out_axes, strict=True)
        return [_global_to_local(out, axis, layout) for out, axis in pairs]


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
    (name, size), frame, has_mesh_axis = outer.enter_axis(options.axis_name, call.size)
    body = TracedBody(options, call, frame)
    outs = body.map_over_free_axis(name, size) if has_mesh_axis else body.trace_as_vmap(name)
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


def _map_over_mesh(body: TracedBody, leaves: Sequence[Any], layout: MeshLayout) -> list[Any]:
    """Map a function over the devices of its mesh; return the leaves of its output, global arrays.

    In a jit under `jax.set_mesh`, all arrays are on the user's mesh. If that has as many devices,
    XLA moves the arguments from there to the mesh of the pmap, and the results back.
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

    def map_on_mesh_of_pmap(*leaves: Any) -> list[list[Any]]:
        with meshes.context_of(mesh):
            # All axes are manual: XLA supports no shard_map over a part, nor a nested one, here.
            return body.map_over_devices(leaves, layout.name, mesh, {*mesh.axis_names})

    run: Any = map_on_mesh_of_pmap
    if user_mesh.explicit_axes:  # types have shardings there, on the user's mesh: set the results'
        out_specs = body.out_specs(user_mesh.axis_names)
        run = jax.sharding.auto_axes(map_on_mesh_of_pmap, out_sharding=out_specs)
    return body.ungroup(run(*leaves))


def _local_to_global(local: jax.Array, axis: Axis, layout: MeshLayout) -> jax.Array:
    """Convert the array of this process in a trace to the global one: `[L, *s] -> [P * L, *s]`.

    There are P processes with L slices each along `axis` (here 0). If one of two holds [1, 2], and
    the other [3, 4], the result is [1, 2, 3, 4], whose halves are the same buffers: nothing moves.
    """
    if axis is None:  # it is the same in all processes
        return local
    padding = jnp.zeros_like(local, shape=(layout.processes - 1, *local.shape))
    padded_rows = jnp.concatenate([local[None], padding])  # [P, ..., L, ...]
    rows_by_process = _convert_rows(padded_rows, axis, layout, to_global=True)
    merged = jnp.moveaxis(rows_by_process, 0, axis % local.ndim)  # [..., P, L, ...]
    return lax.reshape(merged, axes.resize(local.shape, axis, local.shape[axis] * layout.processes))


def _global_to_local(array: jax.Array, axis: Axis, layout: MeshLayout) -> jax.Array:
    """Invert `_local_to_global`, `[P * L, *s] -> [L, *s]`: [1, 2] of [1, 2, 3, 4] on process 0."""
    if axis is None:  # it is the same in all processes
        return array
    axis %= array.ndim
    local_shape = axes.resize(array.shape, axis, array.shape[axis] // layout.processes)
    split_shape = axes.stack(local_shape, axis, layout.processes)  # [..., P, L, ...]
    rows_by_process = jnp.moveaxis(lax.reshape(array, split_shape), axis, 0)  # [P, ..., L, ...]
    return _convert_rows(rows_by_process, axis, layout, to_global=False)[0]  # the rest is padding


def _convert_rows(rows: jax.Array, axis: int, layout: MeshLayout, *, to_global: bool) -> jax.Array:
    """Convert `[P, ..., L, ...]` between a process-local and a global array, differentiably.

    There are P processes with L devices each. In the process-local array, row 0 has the slices of
    this process and the others are padding; in the global one, row p has those of process p.
    `axis` is where L is in a row.

    shard_map takes the process-local array for a replicated one, and would sum its cotangents over
    processes, which hold different slices. The right transpose is the inverse. The one public way
    to define it for jvp, vmap and grad is custom_linear_solve, which requires input and output of
    one shape: hence the padding.
    """
    axis %= rows.ndim - 1
    local_spec = P(None, *[None] * axis, layout.name)
    global_spec = P(PROCESS_AXIS, *[None] * axis, layout.name)

    def pad(block: jax.Array) -> jax.Array:
        padding = jnp.zeros_like(block, shape=(layout.processes - 1, *block.shape[1:]))
        return jnp.concatenate([block, padding])

    shard_map = functools.partial(jax.shard_map, mesh=layout.process_mesh, check_vma=False)
    as_global = shard_map(lambda block: block[:1], in_specs=local_spec, out_specs=global_spec)
    as_local = shard_map(pad, in_specs=global_spec, out_specs=local_spec)
    convert, invert = (as_global, as_local) if to_global else (as_local, as_global)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):  # integers have no derivative
        return convert(rows)
    # Nothing is solved: what is called the solution is the converted array.
    solve, transpose_solve = lambda _, x: convert(x), lambda _, x: invert(x)
    return lax.custom_linear_solve(lambda x: x, rows, solve, transpose_solve)
