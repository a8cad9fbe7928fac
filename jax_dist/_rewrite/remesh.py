"""pmaps inside a traced program, moved onto the caller's mesh.

Collectives in a mapped function name the axis that it was mapped over, also those that are traced
later, in the rules of a custom_vjp. So a mapped region keeps that name, on a mesh of the same
devices; the arrays that go in and out lie on the caller's mesh, under the caller's name.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._pmap import meshes
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Handler, Values
from jax_dist._rewrite.pipeline import Outcome, PassFinding, PassPlan
from jax_dist._rewrite.pmap_sites import PmapSite, pmap_sites
from jax_dist._rewrite.primitive_facts import record_of

_CODE = _codes.JIT_OF_PMAP


class _RemeshRefused(Exception):
    """A pmap that cannot be moved; the text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """Where one pmap goes."""

    site: PmapSite
    mesh: Mesh  # the caller's
    axis: str  # of the caller's mesh
    inside: Mesh  # the same devices, with the pmap's own names


def plan_remesh(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> PassPlan:
    """Moves the pmaps of a program.

    Args:
      jaxpr: the program.
      mesh: where to; each pmap goes to an axis of its size. None: they stay, and are only told.
    """
    handlers: dict[interpreter.Path, Handler] = {}
    findings = []
    for place, site in pmap_sites(jaxpr):
        try:
            move = _move(site, mesh)
        except _RemeshRefused as refused:
            findings.append(_finding(site.where, "refused", f"{_said(site)} stays", str(refused)))
        else:
            findings.append(_moved(move, mesh))
            handlers[place] = functools.partial(_emit, move)
    if mesh is None or not handlers:
        return PassPlan(None, tuple(findings))
    return PassPlan(lambda *args: interpreter.run_at(jaxpr, args, handlers), tuple(findings))


def _move(site: PmapSite, mesh: Mesh | None) -> _Move:
    own = site.devices
    if mesh is None:
        if own is None:
            raise _RemeshRefused("its mesh names no devices, and no other was given")
        return _Move(site, site.mesh, site.axis, site.mesh)
    if own is not None and not set(own) <= set(mesh.devices.flat):
        raise _RemeshRefused("it has devices that are not in the mesh")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise _RemeshRefused("the mesh has axes that are not Auto, on which shardings are types")
    # An axis of the mesh for each axis of the pmap and of those inside it, of the same size.
    chosen, free = {}, dict(mesh.shape)
    for name, size in site.mesh.shape.items():
        chosen[name] = _take_axis(free, name, size)
        if chosen[name] is None:
            sizes = ", ".join(f"'{other}': {count}" for other, count in mesh.shape.items())
            raise _RemeshRefused(f"no axis of the mesh ({sizes}) has the size {size} of '{name}'")
    own_names = {target: name for name, target in chosen.items()}
    names = [own_names.get(name, f"other_{name}") for name in mesh.axis_names]
    move = _Move(site, mesh, chosen[site.axis], _compat.auto_mesh(mesh.devices, names))
    if not _same_types(move):
        _check_rebindable(site)
    return move


def _take_axis(free: dict[str, int], name: str, size: int) -> str | None:
    """Takes an axis of this size out of `free`, if there is one; one of this name rather."""
    fitting = [other for other in free if free[other] == size]
    if not fitting:
        return None
    chosen = name if name in fitting else fitting[0]
    del free[chosen]
    return chosen


def _check_rebindable(site: PmapSite) -> None:
    """Refuses a body with an equation, at any depth, that is tied to the mesh of its trace."""
    for eqn in interpreter.equations(site.body):
        if record_of(eqn).constrains:
            where = interpreter.source_line(eqn)
            raise _RemeshRefused(f"the mapped function constrains a sharding itself, at {where}")


def _same_types(move: _Move) -> bool:
    """Whether the body can be replayed as it is, for JAX sees the same mesh."""
    return dict(move.inside.shape) == dict(move.site.mesh.shape)


def _emit(move: _Move, eqn: JaxprEqn, values: Values) -> Values:
    body, params = move.site.body, eqn.params
    run = functools.partial(interpreter.run, handlers={})
    evaluate = run if _same_types(move) else rebind.evaluate
    inner = set(move.site.mesh.axis_names) - {move.site.axis}  # of the pmaps inside
    laid = _lay_all(move, values, params["in_specs"])
    with meshes.context_of(move.inside):
        results = jax.shard_map(
            lambda *blocks: evaluate(body, blocks),
            mesh=move.inside,
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(move.inside.axis_names) - inner,
            check_vma=False,
        )(*laid)
    return _lay_all(move, results, params["out_specs"])


def _lay_all(move: _Move, values: Sequence[Any], specs: Sequence[P]) -> Values:
    """Says how values lie on the caller's mesh; nothing moves, for the devices are the same."""
    return [
        lax.with_sharding_constraint(value, NamedSharding(move.mesh, _named(move, spec)))
        for value, spec in zip(values, specs, strict=True)
    ]


def _named(move: _Move, spec: P) -> P:
    return P(*[move.axis if part == move.site.axis else part for part in spec])


# ---- what is told


def _finding(where: str, outcome: Outcome, what: str, why: str = "") -> PassFinding:
    return PassFinding(_CODE, outcome, what, why, where)


def _said(site: PmapSite) -> str:
    return f"the pmap over '{site.axis}' of size {site.size}"


def _moved(move: _Move, mesh: Mesh | None) -> PassFinding:
    site, said = move.site, _said(move.site)
    if mesh is None:
        return _finding(site.where, "noted", f"{said} is a shard_map on a mesh of its own")
    text = f"{said}: a shard_map over '{move.axis}' of the mesh"
    if site.devices is not None:
        along = mesh.axis_names.index(move.axis)
        rows = np.moveaxis(mesh.devices, along, 0).reshape(site.size, -1)
        slices = np.array(site.devices, dtype=object).reshape(site.size, -1)
        if not all(set(mine) <= set(row) for mine, row in zip(slices, rows, strict=True)):
            text += ", whose devices come in another order"
    return _finding(site.where, "rewritten", text)


# --- arguments that lie on some devices only, put on all of the mesh


def put_on(
    mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with every array on all devices of the mesh, cut as it was where that fits.

    jit refuses a program whose arrays have unlike devices. What a pmap outside of the rewriting
    made lies on the devices of that pmap; those inside are moved to the mesh.

    Returns:
      None if nothing lies elsewhere, so that the refusal is about something else.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    devices, moved = set(mesh.devices.flat), False
    for place, leaf in enumerate(leaves):
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_array and leaf.committed and leaf.sharding.device_set != devices:
            moved = True
            leaves[place] = jax.device_put(leaf, NamedSharding(mesh, _spec_on(mesh, leaf)))
    return jax.tree.unflatten(tree, leaves) if moved else None


def _spec_on(mesh: Mesh, leaf: jax.Array) -> P:
    """Each cut dimension over an axis of as many devices; whole where there is none."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return P()
    free = dict(mesh.shape)
    parts: list[str | None] = []
    for part in sharding.spec:
        names = interpreter.names_of(part)
        is_one = len(names) == 1
        parts.append(_take_axis(free, names[0], sharding.mesh.shape[names[0]]) if is_one else None)
    return P(*parts)
