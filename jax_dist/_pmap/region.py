"""A traced body on a mesh: one shard_map, with those of the pmaps inside in it.

A mapped axis lies over a mesh axis, one slice a device; or several slices on each device, as a vmap
inside the shard_map; or, inside another map and without a mesh axis of its size, as a vmap alone.
Where there is a vmap, or the mesh axis has another name than the collectives use, these are said
again (see `collectives`).

Shapes: a block is what one device holds, `[1, *s]` or `[k, *s]`; the body sees `[*s]`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap import axes, collectives, meshes
from jax_dist._pmap.axes import Axis, AxisPrefix
from jax_dist._pmap.body import Body, Call
from jax_dist._pmap.collectives import AxisPlace, MeshAxis, joined, split
from jax_dist._pmap.meshes import InnerAxis, Layout
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Handler, Values
from jax_dist._rewrite.primitive_facts import record_of


def run_body(
    body: Body,
    captured: Sequence[Any],
    leaves: Sequence[Any],
    in_axes: Sequence[Axis],
    outer: AxisPlace,
    mesh: Mesh | AbstractMesh | None,
    inner: tuple[InnerAxis, ...],
) -> Values:
    """Runs a body on the slices of whole arguments; the leaves of the output, whole.

    `captured` are the arrays that are lifted out of the body, `leaves` the arguments, `[N, *s]`
    (for axis 0), `outer` is where the mapped axis lies, and `inner` are the axes of the mesh that
    are for the pmaps inside, by depth. Without a mesh, it is that of the context.
    """
    for eqn in interpreter.equations(body.jaxpr):
        collectives.check_groups(eqn, {outer.name: outer.size}, body.name)
    in_dims = [None if a is None else a % jnp.ndim(x) for x, a in zip(leaves, in_axes, strict=True)]

    walk = _Walk(body.name, body.regions, inner, {outer.name: outer}, body.names_meshes)
    # What the body reads of a trace outside has another mesh in its type, so it comes in, too.
    given_consts = body.jaxpr.consts
    outside = [place for place, value in enumerate(given_consts) if isinstance(value, Tracer)]
    shared = [*[given_consts[place] for place in outside], *captured]

    def on_slices(*blocks: jax.Array) -> Values:
        consts = list(given_consts)
        for place, value in zip(outside, blocks, strict=False):
            consts[place] = value
        taken = zip(blocks[len(shared) :], in_dims, strict=True)
        slices = [x if dim is None else lax.squeeze(x, [dim]) for x, dim in taken]
        jaxpr = ClosedJaxpr(body.jaxpr.jaxpr, consts)
        outs = walk.evaluate(jaxpr, [*blocks[len(outside) : len(shared)], *slices])
        given = zip(outs, body.out_axes, strict=True)
        return [x if dim is None else lax.expand_dims(x, [dim]) for x, dim in given]

    dims = [*[None] * len(shared), *in_dims]
    return _spread(on_slices, [*shared, *leaves], dims, body.out_axes, outer, mesh)


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """Through a body, and those of the pmaps inside."""

    fun_name: str
    regions: frozenset[str]  # the abstract axes of pmaps inside
    inner: tuple[InnerAxis, ...]  # the mesh axes that are left for them, by depth
    places: Mapping[Any, AxisPlace]  # by name, of the axes around
    names_meshes: bool  # in types, which are others on the mesh of now

    def evaluate(self, jaxpr: Any, values: Sequence[Any]) -> Values:
        is_plain = all(place.is_plain for place in self.places.values())
        if is_plain and not self.regions and not self.names_meshes:
            return interpreter.run(jaxpr, values, {})
        axis_env = [(place.name, place.size) for place in self.places.values()]
        return rebind.evaluate(jaxpr, values, self._handler_of, axis_env, self._slice_by_slice)

    def _slice_by_slice(self, eqn: JaxprEqn, values: Values) -> Values:
        return collectives.slice_by_slice(eqn, values, self.places, self.fun_name)

    def _handler_of(self, eqn: JaxprEqn) -> Handler | None:
        if _compat.name_of(eqn) == "shard_map":
            mesh = eqn.params["mesh"]
            if isinstance(mesh, AbstractMesh) and _first_axis(mesh) in self.regions:
                return self._run_inside
        is_batched = any(place.local > 1 for place in self.places.values())
        # Their rules for vmap, if they have one, nobody asks on devices of their own.
        if is_batched and record_of(eqn).means_body:
            return lambda eqn, values: self.evaluate(interpreter.bodies(eqn)[0], values)
        return collectives.handler_of(eqn, self.places, self.fun_name)

    def _run_inside(self, eqn: JaxprEqn, values: Values) -> Values:
        """A pmap inside: over the mesh axis of its depth, if the size is right."""
        params = eqn.params
        name = _first_axis(params["mesh"])
        size, mesh_axis = params["mesh"].shape[name], None
        if self.inner and size % self.inner[0].size == 0:
            mesh_axis = self.inner[0].name
        over = 1 if mesh_axis is None else self.inner[0].size
        place = AxisPlace(name, size, mesh_axis, size // over, nested=True)

        around = {p.name: dataclasses.replace(p, nested=True) for p in self.places.values()}
        below = dataclasses.replace(self, inner=self.inner[1:], places={**around, name: place})
        return _spread(
            lambda *blocks: below.evaluate(params["jaxpr"], blocks),
            values,
            [_mapped_dimension(spec) for spec in params["in_specs"]],
            [_mapped_dimension(spec) for spec in params["out_specs"]],
            place,
            None,
        )


def _first_axis(mesh: AbstractMesh) -> str:
    """Of the mesh of a pmap inside: its own; the others are those of the pmaps in it."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return next(name for name, kind in kinds if kind != jax.sharding.AxisType.Manual)


def _mapped_dimension(spec: P) -> int | None:
    """The dimension that a spec of a pmap cuts; None for what all devices share."""
    return next((dim for dim, part in enumerate(spec) if part is not None), None)


def _spread(
    evaluate: Callable[..., Values],
    values: Sequence[Any],
    in_dims: Sequence[int | None],
    out_dims: Sequence[int | None],
    place: AxisPlace,
    mesh: Mesh | AbstractMesh | None,
) -> Values:
    """Evaluates each slice in its place: `[.., size * b, ..]` of the values that are cut.

    `evaluate` takes the blocks of one slice, `[.., b, ..]`, of the dimensions that are cut. Without
    a mesh, it is that of the context.
    """
    alone = evaluate if place.local == 1 else _batched(evaluate, in_dims, out_dims, place)
    if place.mesh_axis is None:
        return alone(*values)
    return jax.shard_map(
        alone,
        mesh=mesh,
        in_specs=tuple(_spec(dim, place.mesh_axis) for dim in in_dims),
        out_specs=[_spec(dim, place.mesh_axis) for dim in out_dims],
        axis_names={*place.mesh_axes(), *place.idle_axes},
        # With check_vma=True, grad in the body by a replicated argument already sums over the
        # devices, and the program's own psum then gives N times the gradient of pmap.
        check_vma=False,
    )(*values)


def _spec(dim: int | None, name: MeshAxis) -> P:
    return P() if dim is None else P(*[None] * dim, name)


def _batched(
    evaluate: Callable[..., Values],
    in_dims: Sequence[int | None],
    out_dims: Sequence[int | None],
    place: AxisPlace,
) -> Callable[..., Values]:
    """The slices of one device as a vmap."""

    def alone(*blocks: jax.Array) -> Values:
        mapped = jax.vmap(
            evaluate,
            in_axes=tuple(in_dims),
            out_axes=0,
            axis_name=place.local_name,
            axis_size=place.local,
        )
        given = zip(blocks, in_dims, strict=True)
        outs = mapped(*[x if dim is None else split(x, dim, place.local) for x, dim in given])
        found = zip(outs, out_dims, strict=True)  # of what all share: the first, as pmap gives it
        return [x[0] if dim is None else joined(x, dim, tiled=True) for x, dim in found]

    return alone


def run_eagerly(call: Call, out_axes: AxisPrefix, name: Any, layout: Layout) -> Any:
    """Runs the user's function itself, on concrete slices: what `jax.disable_jit` is for."""
    found: list[tuple[Axis, ...]] = []
    is_cut = name == layout.name and layout.size == layout.mesh.size and not meshes.manual_axes()

    def body(*blocks: jax.Array) -> Any:
        slices: Sequence[Any] = blocks
        if is_cut:  # pmap hides the mapped axis, shard_map keeps it
            taken = zip(blocks, call.axes, strict=True)
            slices = [x if a is None else lax.squeeze(x, [a % x.ndim]) for x, a in taken]
        output = call.run(slices)
        found.append(axes.spread_out_axes(out_axes, output, call.fun_name))
        leaves, structure = jax.tree.flatten(output)
        if is_cut:
            given = zip(leaves, found[-1], strict=True)
            leaves = [x if axis is None else lax.expand_dims(x, [0]) for x, axis in given]
        return jax.tree.unflatten(structure, leaves)

    if is_cut:
        mapped = jax.shard_map(
            body,
            mesh=layout.mesh,
            in_specs=tuple(
                axes.spec_of_axis(axis, jnp.ndim(leaf), name)
                for leaf, axis in zip(call.leaves, call.axes, strict=True)
            ),
            out_specs=jax.tree.map(
                lambda axis: P() if axis is None else P(name), out_axes, is_leaf=axes.is_none
            ),
            check_vma=False,
        )
    else:
        mapped = jax.vmap(body, tuple(call.axes), 0, axis_name=name, axis_size=call.size)
    leaves, structure = jax.tree.flatten(mapped(*call.leaves))
    shared = (lambda leaf: leaf) if is_cut else (lambda leaf: leaf[0])
    whole = [
        shared(leaf) if axis is None else jnp.moveaxis(leaf, 0, axis)
        for leaf, axis in zip(leaves, found[-1], strict=True)
    ]
    return jax.tree.unflatten(structure, whole)
