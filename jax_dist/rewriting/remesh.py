"""pmaps inside a traced program, moved onto the caller's mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping import spread
from jax_dist.passes import interpreter
from jax_dist.passes.findings import Finding, Plan
from jax_dist.passes.interpreter import Values
from jax_dist.rewriting import anew
from jax_dist.rewriting.pmap_sites import PmapSite, devices_of, pmap_sites

CODE = "JXD002"


class Refused(Exception):
    """A pmap that cannot be moved; the text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """Where one pmap goes."""

    site: PmapSite
    mesh: Mesh  # the caller's
    axis: str  # of the caller's mesh
    inside: Mesh  # the same devices, with the pmap's own name for that axis


def plan_remesh(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> Plan:
    """Moves each pmap of a program onto an axis of `mesh` that has its size.

    Collectives in the mapped function name the axis that it was mapped over, also those that are
    traced later, in the rules of a custom_vjp. So the region keeps that name, on a mesh of the
    same devices; the arrays that go in and out lie on the caller's mesh, under his name.
    """
    moves: dict[int, _Move] = {}
    findings = []
    for site in pmap_sites(jaxpr):
        if mesh is None:
            findings.append(_finding(site, "noted", f"{_said(site)} is a shard_map on its own mesh"))
            continue
        try:
            move = moves[id(site.eqn)] = _move(site, mesh)
        except Refused as refused:
            findings.append(_finding(site, "refused", f"{_said(site)} stays", str(refused)))
        else:
            findings.append(_finding(site, "rewritten", _moved(move)))
    if not moves:
        return Plan(None, tuple(findings))

    def handler_of(eqn: JaxprEqn) -> interpreter.Handler | None:
        move = moves.get(id(eqn))
        return None if move is None else functools.partial(_emit, move)

    return Plan(lambda *args: interpreter.run_deep(jaxpr, args, handler_of), tuple(findings))


def _move(site: PmapSite, mesh: Mesh) -> _Move:
    fitting = [name for name, size in mesh.shape.items() if size == site.size]
    if not fitting:
        sizes = ", ".join(f"'{name}': {size}" for name, size in mesh.shape.items())
        raise Refused(f"no axis of the mesh ({sizes}) has the size {site.size} of its mapped axis")
    if len(interpreter.open_jaxpr(site.body).invars) != len(site.eqn.invars):
        raise Refused("its body takes more than its arguments")
    own = devices_of(site.mesh)
    if own is not None and not set(own) <= set(mesh.devices.flat):
        raise Refused("it has devices that are not in the mesh")
    if len(site.mesh.axis_names) > 1:
        raise Refused("it has other pmaps inside, on a mesh of several axes")
    axis = site.axis if site.axis in fitting else fitting[0]
    names = [site.axis if name == axis else f"other_{name}" for name in mesh.axis_names]
    move = _Move(site, mesh, axis, _compat.auto_mesh(mesh.devices, names))
    if not _same_types(move):
        _check_movable(site)
    return move


def _same_types(move: _Move) -> bool:
    """Whether the body can be replayed as it is, for JAX sees the same mesh."""
    return len(move.mesh.axis_names) == 1


def _check_movable(site: PmapSite) -> None:
    try:
        anew.check_movable(site.body)
    except anew.CannotMove as cannot:
        raise Refused(str(cannot)) from None


def _emit(move: _Move, eqn: JaxprEqn, values: Values) -> Values:
    body = move.site.body
    evaluate = (
        (lambda *blocks: interpreter.run(body, blocks, {}))
        if _same_types(move)
        else (lambda *blocks: anew.evaluate_anew(body, blocks))
    )
    params = eqn.params
    laid = [_lay(move, value, spec) for value, spec in zip(values, params["in_specs"], strict=True)]
    with spread.context_of(move.inside):
        results = jax.shard_map(
            evaluate,
            mesh=move.inside,
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=False,
        )(*laid)
    return [
        _lay(move, result, spec) for result, spec in zip(results, params["out_specs"], strict=True)
    ]


def _lay(move: _Move, value: jax.Array, spec: P) -> jax.Array:
    """Says how a value lies on the caller's mesh; nothing moves, for the devices are the same."""
    named = P(*[move.axis if part == move.site.axis else part for part in spec])
    return lax.with_sharding_constraint(value, NamedSharding(move.mesh, named))


def _finding(site: PmapSite, outcome: Any, what: str, why: str = "") -> Finding:
    return Finding(CODE, outcome, what, why, site.where)


def _said(site: PmapSite) -> str:
    return f"the pmap over '{site.axis}' of size {site.size}"


def _moved(move: _Move) -> str:
    text = f"{_said(move.site)}: a shard_map over '{move.axis}' of the mesh"
    own = devices_of(move.site.mesh)
    if own is not None and not _same_order(own, move):
        text += ", whose devices come in another order"
    return text


def _same_order(own: Sequence[jax.Device], move: _Move) -> bool:
    along = move.mesh.axis_names.index(move.axis)
    rows = np.moveaxis(move.mesh.devices, along, 0).reshape(move.site.size, -1)
    return all(device in row for device, row in zip(own, rows, strict=True))
