"""pmaps inside a traced program, moved onto the caller's mesh; loops around them, moved inside.

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
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._compat.private import Device
from jax_dist.mapping import meshes
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import Handler, Values
from jax_dist.passes.pipeline import (
    Outcome,
    PassFinding,
    PassPlan,
)
from jax_dist.rewriting import loops
from jax_dist.rewriting.pmap_sites import (
    PmapSite,
    devices_of,
    pmap_site,
    pmap_sites,
)

CODE = _codes.JIT_OF_PMAP


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
      mesh: where to; each pmap goes to an axis of its size. None: where they are, and only loops
        are moved.
    """
    moves: dict[int, _Move] = {}
    findings = []
    for site in pmap_sites(jaxpr):
        try:
            moves[id(site.eqn)] = _move(site, mesh)
        except _RemeshRefused as refused:
            findings.append(_finding(site.where, "refused", f"{_said(site)} stays", str(refused)))
        else:
            findings.append(_moved(moves[id(site.eqn)], to_other=mesh is not None))
    inside = _loops_inside(jaxpr, moves, findings)
    if not inside and (mesh is None or not moves):
        return PassPlan(None, tuple(findings))

    def handler_of(eqn: JaxprEqn) -> Handler | None:
        if id(eqn) in inside:
            return functools.partial(_emit_loop, *inside[id(eqn)])
        if mesh is not None and id(eqn) in moves:
            return functools.partial(_emit, moves[id(eqn)])
        return None

    handlers = interpreter.handlers_at(jaxpr, handler_of)
    return PassPlan(lambda *args: interpreter.run_at(jaxpr, args, handlers), tuple(findings))


def operand_shardings(site: PmapSite, mesh: Mesh | None) -> list[NamedSharding] | None:
    """How the operands of a pmap lie when it has been moved; None if it names no devices."""
    try:
        move = _move(site, mesh)
    except _RemeshRefused:
        if not isinstance(site.mesh, Mesh):
            return None
        move = _Move(site, site.mesh, site.axis, site.mesh)
    return [NamedSharding(move.mesh, _named(move, spec)) for spec in site.eqn.params["in_specs"]]


def _move(site: PmapSite, mesh: Mesh | None) -> _Move:
    own = devices_of(site.mesh)
    if mesh is None:
        if own is None:
            raise _RemeshRefused("its mesh names no devices, and no other was given")
        return _Move(site, site.mesh, site.axis, site.mesh)
    if own is not None and not set(own) <= set(mesh.devices.flat):
        raise _RemeshRefused("it has devices that are not in the mesh")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise _RemeshRefused("the mesh has axes that are not Auto, on which shardings are types")
    chosen = _chosen_axes(site, mesh)
    axis = chosen[site.axis]
    own_names = {target: name for name, target in chosen.items()}
    names = [own_names.get(name, f"other_{name}") for name in mesh.axis_names]
    move = _Move(site, mesh, axis, _compat.auto_mesh(mesh.devices, names))
    if not _same_types(move):
        try:
            rebind.check_rebindable(site.body)
        except rebind.CannotRebind as cannot:
            raise _RemeshRefused(str(cannot)) from None
    return move


def _chosen_axes(site: PmapSite, mesh: Mesh) -> dict[str, str]:
    """An axis of the mesh for each axis of the pmap and of those inside it, of the same size."""
    free = dict(mesh.shape)
    chosen = {}
    for name, size in site.mesh.shape.items():
        fitting = [other for other in free if free[other] == size]
        if not fitting:
            sizes = ", ".join(f"'{other}': {count}" for other, count in mesh.shape.items())
            raise _RemeshRefused(f"no axis of the mesh ({sizes}) has the size {size} of '{name}'")
        chosen[name] = name if name in fitting else fitting[0]
        del free[chosen[name]]
    return chosen


def _same_types(move: _Move) -> bool:
    """Whether the body can be replayed as it is, for JAX sees the same mesh."""
    return dict(move.inside.shape) == dict(move.site.mesh.shape)


def _emit(move: _Move, eqn: JaxprEqn, values: Values) -> Values:
    body, params = move.site.body, eqn.params
    evaluate = interpreter.run if _same_types(move) else _run_anew
    inner = set(move.site.mesh.axis_names) - {move.site.axis}  # of the pmaps inside
    laid = _lay_all(move, values, params["in_specs"])
    with meshes.context_of(move.inside):
        results = jax.shard_map(
            lambda *blocks: evaluate(body, blocks, {}),
            mesh=move.inside,
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(move.inside.axis_names) - inner,
            check_vma=False,
        )(*laid)
    return _lay_all(move, results, params["out_specs"])


def _run_anew(body: Any, blocks: Sequence[Any], _: Any) -> Values:
    return rebind.evaluate(body, blocks)


def _lay_all(move: _Move, values: Sequence[Any], specs: Sequence[P]) -> Values:
    """Says how values lie on the caller's mesh; nothing moves, for the devices are the same."""
    return [
        lax.with_sharding_constraint(value, NamedSharding(move.mesh, _named(move, spec)))
        for value, spec in zip(values, specs, strict=True)
    ]


def _named(move: _Move, spec: P) -> P:
    return P(*[move.axis if part == move.site.axis else part for part in spec])


# ---- loops


def _loops_inside(
    jaxpr: Any, moves: dict[int, _Move], findings: list[PassFinding], around: str = ""
) -> dict[int, tuple[_Move, loops.LoopInside]]:
    """The outermost loops that can run inside; for the others, why not."""
    found = {}
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        where = interpreter.source_line(eqn) or around
        name = eqn.primitive.name
        sites = [site for body in interpreter.bodies(eqn) for site in pmap_sites(body)]
        if not sites or pmap_site(eqn) is not None or name == "shard_map":
            continue
        if name in ("scan", "while"):
            try:
                found[id(eqn)] = _loop_inside(eqn, sites, moves)
            except (_RemeshRefused, loops.LoopRefused) as refused:
                what = f"the {name} stays outside of the mapped region"
                findings.append(_finding(where, "noted", what, str(refused)))
            else:
                what = f"the {name} around its pmaps: inside the mapped region"
                findings.append(_finding(where, "rewritten", what))
                continue
        for body in interpreter.bodies(eqn):
            found.update(_loops_inside(body, moves, findings, where))
    return found


def _loop_inside(
    eqn: JaxprEqn, sites: Sequence[PmapSite], moves: dict[int, _Move]
) -> tuple[_Move, loops.LoopInside]:
    if any(id(site.eqn) not in moves for site in sites):
        raise _RemeshRefused("a pmap in it stays where it is")
    first = moves[id(sites[0].eqn)]
    if len(first.site.mesh.axis_names) > 1:
        raise _RemeshRefused("its pmaps have others inside")
    if any(moves[id(site.eqn)].inside != first.inside for site in sites):
        raise _RemeshRefused("its pmaps go over several axes, or have different devices")
    for site in sites:
        try:
            rebind.check_rebindable(site.body)
        except rebind.CannotRebind as cannot:
            raise _RemeshRefused(str(cannot)) from None
    return first, loops.loop_inside(eqn, first.inside, first.site.axis)


def _emit_loop(move: _Move, loop: loops.LoopInside, eqn: JaxprEqn, values: Values) -> Values:
    del eqn
    laid = _lay_all(move, values, loop.specs_in())
    return _lay_all(move, loop.evaluate(laid), loop.specs_out())


# ---- what is told


def _finding(where: str, outcome: Outcome, what: str, why: str = "") -> PassFinding:
    return PassFinding(CODE, outcome, what, why, where)


def _said(site: PmapSite) -> str:
    return f"the pmap over '{site.axis}' of size {site.size}"


def _moved(move: _Move, *, to_other: bool) -> PassFinding:
    where = move.site.where
    if not to_other:
        return _finding(where, "noted", f"{_said(move.site)} is a shard_map on a mesh of its own")
    text = f"{_said(move.site)}: a shard_map over '{move.axis}' of the mesh"
    own = devices_of(move.site.mesh)
    if own is not None and not _same_order(own, move):
        text += ", whose devices come in another order"
    return _finding(where, "rewritten", text)


def _same_order(own: Sequence[Device], move: _Move) -> bool:
    along = move.mesh.axis_names.index(move.axis)
    rows = np.moveaxis(move.mesh.devices, along, 0).reshape(move.site.size, -1)
    slices = np.array(own, dtype=object).reshape(move.site.size, -1)
    return all(set(mine) <= set(row) for mine, row in zip(slices, rows, strict=True))
