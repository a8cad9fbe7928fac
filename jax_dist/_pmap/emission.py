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

from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call
from jax_dist._pmap.meshes import PROCESS_AXIS, Frame, InnerAxis, Layout
from jax_dist._pmap.options import Options
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import named_axes
from jax_dist.errors import DeviceCountError, MappedAxisError

_MAX_RANK = 64  # of NumPy arrays


@dataclasses.dataclass(slots=True)
class TracedBody:
    """The user's function as it is traced into a map, and the structure of its output."""

    options: Options
    call: Call
    frame: Frame
    shadows: bool = False  # whether a vmap around has the same axis name
    out_tree: Any = None
    out_axes: tuple[Axis, ...] = ()  # of each leaf of the output

    @property
    def inner(self) -> tuple[InnerAxis, ...]:
        """The mesh axes that pmaps inside want, by depth."""
        return tuple(self.frame.wanted)

    def run(self, slices: Sequence[Any]) -> list[Any]:
        """Trace the function on slices `[*s]`; return the leaves of its output."""
        with self.frame.active():
            output = self.call.run(slices)
        self.out_axes = axes.spread_out_axes(self.options.out_axes, output, self.options.fun_name)
        leaves, self.out_tree = jax.tree.flatten(output)
        return leaves

    def on_devices(
        self,
        leaves: Sequence[Any],
        name: str,
        mesh: Any = None,
        manual: set[str] | None = None,
        run: Callable[[Sequence[Any]], list[Any]] | None = None,
    ) -> list[list[Any]]:
        """Run it on the devices along mesh axis `name`; return its output in groups.

        Along other axes that become `manual`, all is computed alike. `run` is called instead of the
        method; `leaves`, global arrays, may then be preceded by values that it takes, too.
        """
        run = run or self.run
        in_axes = [*[None] * (len(leaves) - len(self.call.leaves)), *self.call.dims]

        def body(*blocks: jax.Array) -> list[list[Any]]:
            pairs = zip(blocks, in_axes, strict=True)
            outs = run([x if axis is None else lax.squeeze(x, [axis]) for x, axis in pairs])
            groups: list[list[Any]] = [[] for _ in self.out_specs(name)]
            for out, axis in zip(outs, self.out_axes, strict=True):
                groups[_group(axis)].append(out if axis is None else lax.expand_dims(out, [axis]))
            return groups

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(axes.spec_of_axis(a, 1 + (a or 0), name) for a in in_axes),
            out_specs=self.out_specs(name),
            axis_names=manual or {name},
            # With check_vma=True, grad in the body by a replicated argument already sums over the
            # devices, and the program's own psum then gives N times the gradient of pmap.
            check_vma=False,
        )(*leaves)

    def out_specs(self, name: Any) -> list[P]:
        """Return a spec for each group: replicated, then by mapped dimension.

        The output is grouped since its structure is unknown before the trace, and so is which
        dimension a negative axis means.
        """
        dims = jax.tree.leaves(self.options.out_axes)
        last = _MAX_RANK if any(dim < 0 for dim in dims) else max(dims, default=0)
        return [P(), *(axes.spec_of_axis(axis, axis + 1, name) for axis in range(last + 1))]

    def ungroup(self, groups: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the leaves of the output in their order."""
        members = [iter(group) for group in groups]
        return [next(members[_group(axis)]) for axis in self.out_axes]

    def inside_region(self, axis: InnerAxis) -> list[Any]:
        """Run it on the free mesh axis of a shard_map around; return the leaves of its output.

        JAX cannot close over values of the outer body there, so they become operands.
        """
        run = lambda *slices: self.run(slices)
        environment: Any = [tuple(axis)]
        jaxpr = jax.make_jaxpr(run, axis_env=environment)(*self.call.slices())
        consts = list(interpreter.constants(jaxpr))
        places = [place for place, value in enumerate(consts) if isinstance(value, Tracer)]
        if not places:  # traced anew, for the kernel of a pallas_call cannot be evaluated elsewhere
            return self.ungroup(self.on_devices(self.call.leaves, axis.name))

        def evaluate(values: Sequence[Any]) -> list[Any]:
            for place, value in zip(places, values, strict=False):
                consts[place] = value
            closed = ClosedJaxpr(interpreter.open_jaxpr(jaxpr), consts)
            return rebind.evaluate(closed, values[len(places) :])

        leaves = [*[consts[place] for place in places], *self.call.leaves]
        return self.ungroup(self.on_devices(leaves, axis.name, run=evaluate))

    def as_vmap(self, name: Any) -> list[Any]:
        """Run it as a vmap; return the leaves of its output, stacked."""
        call = self.call
        outs = jax.vmap(
            lambda *slices: self.run(slices), call.axes, 0, axis_name=name, axis_size=call.size
        )(*call.leaves)
        pairs = zip(outs, self.out_axes, strict=True)  # of a replicated result: the first copy
        return [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in pairs]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.out_tree, leaves)


def _group(axis: Axis) -> int:
    return 0 if axis is None else axis + 1


def emit(
    options: Options, call: Call, layout: Layout, *, as_view: bool = False
) -> tuple[Any, TracedBody]:
    """Trace the user's function into a `shard_map`; return its results, and the traced body.

    With `as_view`, arguments and results are the arrays of this process, else global ones.
    """
    user = meshes.mesh_of_user()
    body = TracedBody(options, call, Frame((layout.name,), layout.inner if user is None else ()))
    leaves: Sequence[Any] = call.leaves
    body.shadows = _is_bound(layout.name)
    as_view = as_view and layout.processes > 1
    if as_view:
        if layout.process_mesh is None:
            raise DeviceCountError(
                f"pmap of '{call.fun_name}' cannot be traced over these devices: order devices= by "
                "process, with as many of each process."
            )
        leaves = _over_processes(_view_as_whole, leaves, call.axes, layout)
    outs = _on_mesh(body, leaves, layout)
    if as_view:
        outs = _over_processes(_whole_as_view, outs, body.out_axes, layout)
    return body.unflatten(outs), body


def emit_inside(options: Options, call: Call, outer: Frame) -> Any:
    """Trace a pmap in the body of another one: over a mesh axis of its own, or as a vmap.

    The first trace of the outermost pmap has no mesh axes for those inside; they run as vmaps, and
    it is traced again with a mesh that has the axes.
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
    return body.unflatten(body.inside_region(axis) if on_mesh else body.as_vmap(axis.name))


def check_collectives(body: TracedBody, jaxpr: Any) -> None:
    """Raise MappedAxisError if collectives would be taken for those of a vmap around."""
    name = body.frame.names[0]
    if body.shadows and interpreter.contains(jaxpr, lambda eqn: name in named_axes(eqn)):
        raise MappedAxisError(
            f"pmap of '{body.options.fun_name}' has collectives over axis {name!r}, which a vmap "
            "around it maps, too. Use another axis_name."
        )


def _is_bound(name: str) -> bool:
    """Return whether a vmap around has this axis name."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def _on_mesh(body: TracedBody, leaves: Sequence[Any], layout: Layout) -> list[Any]:
    """Run a body on its mesh; under `jax.set_mesh`, on the same devices under other names."""
    user, mesh = meshes.mesh_of_user(), layout.mesh
    if user is None:
        return body.ungroup(body.on_devices(leaves, layout.name, mesh))
    if user.size != mesh.size:
        raise MappedAxisError(
            f"pmap of '{body.options.fun_name}' needs {mesh.size} devices, but is traced under a "
            f"mesh of {user.size}. Set a mesh of {mesh.size} devices, or call it outside of traces."
        )

    def run(*leaves: Any) -> list[list[Any]]:
        leaves = tuple(lax.with_sharding_constraint(x, P()) for x in leaves) if idle else leaves
        with meshes.context_of(mesh):
            # XLA cannot have one region in another here, nor one over a part of the axes.
            return body.on_devices(leaves, layout.name, mesh, {*mesh.axis_names})

    idle = len(mesh.axis_names) > 1
    if meshes.is_explicit(user):
        specs = body.out_specs(meshes.all_axes(user))
        groups: Any = jax.sharding.auto_axes(run, out_sharding=specs)(*leaves)
        return body.ungroup(groups)
    outs = body.ungroup(run(*leaves))
    # The user's mesh may have no axis that fits.
    return [lax.with_sharding_constraint(x, P()) for x in outs] if idle else outs


# --- the view that one process has, while tracing


def _over_processes(
    convert: Callable[..., jax.Array],
    leaves: Sequence[Any],
    leaf_axes: Sequence[Axis],
    layout: Layout,
) -> list[Any]:
    """Convert each leaf to a global array, or to what this process sees."""
    assert layout.process_mesh is not None
    with meshes.context_of(layout.process_mesh):
        return [convert(*pair, layout) for pair in zip(leaves, leaf_axes, strict=True)]


def _view_as_whole(view: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """Join what each process sees while tracing: `[L, *s] -> [P * L, *s]` (for axis 0).

    To the program, the view is replicated over processes; in truth each process holds its own
    slices. No element is moved: the same buffer is declared to be one part of a longer array.
    """
    if axis is None:
        return view
    rest = jnp.zeros_like(view, shape=(layout.processes - 1, *view.shape))
    parts = _convert(jnp.concatenate([view[None], rest]), axis, layout, to_whole=True)
    merged = jnp.moveaxis(parts, 0, axis % view.ndim)
    return lax.reshape(merged, axes.resized(view.shape, axis, view.shape[axis] * layout.processes))


def _whole_as_view(whole: jax.Array, axis: Axis, layout: Layout) -> jax.Array:
    """Invert `_view_as_whole`: `[P * L, *s] -> [L, *s]` (for axis 0)."""
    if axis is None:
        return whole
    axis %= whole.ndim
    shape = whole.shape
    split = (*shape[:axis], layout.processes, shape[axis] // layout.processes, *shape[axis + 1 :])
    parts = jnp.moveaxis(lax.reshape(whole, split), axis, 0)
    return _convert(parts, axis, layout, to_whole=False)[0]


def _convert(parts: jax.Array, axis: int, layout: Layout, *, to_whole: bool) -> jax.Array:
    """Convert `[P, ..., L, ...]`, with a transpose that is the inverse.

    The view stands in row 0, or there is one row for each process.

    shard_map would transpose the view as what it is declared to be, replicated: it sums over
    processes, whose slices have nothing to do with each other. The transpose wanted is the
    inverse. custom_linear_solve is the one public way to say it that jvp, vmap and grad all accept;
    both directions keep the shape, for it demands that, and so the view is padded to `[P, ...]`.
    """
    axis %= parts.ndim - 1
    view = P(None, *[None] * axis, layout.name)
    whole = P(PROCESS_AXIS, *[None] * axis, layout.name)

    def pad(block: jax.Array) -> jax.Array:
        rest = jnp.zeros_like(block, shape=(layout.processes - 1, *block.shape[1:]))
        return jnp.concatenate([block, rest])

    relabel = functools.partial(jax.shard_map, mesh=layout.process_mesh, check_vma=False)
    as_whole = relabel(lambda block: block[:1], in_specs=view, out_specs=whole)
    as_view = relabel(pad, in_specs=whole, out_specs=view)
    there, back = (as_whole, as_view) if to_whole else (as_view, as_whole)
    if not jnp.issubdtype(parts.dtype, jnp.inexact):  # has no derivative
        return there(parts)
    solve, transpose = lambda _, x: there(x), lambda _, x: back(x)
    return lax.custom_linear_solve(lambda x: x, parts, solve, transpose)
