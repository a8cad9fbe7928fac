"""pmaps inside a traced program, moved onto the caller's mesh.

Collectives in a mapped function name the axis that it was mapped over, also those that are traced
later, in the rules of a custom_vjp. So a mapped region keeps that name, on a mesh of the same
devices; the arrays that go in and out lie on the caller's mesh, under the caller's name.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._pmap import meshes
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Handler, Values
from jax_dist._rewrite.pipeline import PassFinding, PassPlan
from jax_dist._rewrite.pmap_sites import PmapSite, pmap_sites
from jax_dist._rewrite.primitive_facts import record_of


class _RemeshRefused(Exception):
    """A pmap that cannot be moved; the text is the reason."""


def plan_remesh(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> PassPlan:
    """Move the pmaps of a program.

    Args:
      jaxpr: the program.
      mesh: where to; each pmap goes to an axis of its size. None: they stay, and are only noted.
    """
    handlers: dict[int, Handler] = {}  # by the identity of the equation
    findings = []
    for site in pmap_sites(jaxpr):
        pmap = f"the pmap over '{site.axis}' of size {site.size}"
        outcome, what, why = "noted", f"{pmap} is a shard_map on a mesh of its own", ""
        if mesh is not None:
            try:
                axis, handlers[id(site.eqn)] = _mover(site, mesh)
            except _RemeshRefused as reason:
                outcome, what, why = "refused", f"{pmap} stays", str(reason)
            else:
                outcome, what = "rewritten", f"{pmap}: a shard_map over '{axis}' of the mesh"
        findings.append(PassFinding(_codes.JIT_OF_PMAP, outcome, what, why, site.where))
    changed = interpreter.replace_equations(jaxpr, handlers) if handlers else None
    return PassPlan(changed, tuple(findings))


def _mover(site: PmapSite, mesh: Mesh) -> tuple[str, Handler]:
    """Return the axis of the mesh that a pmap goes to, and what runs it there."""
    axis, inside = _mesh_inside(site, mesh)
    keeps_types = dict(inside.shape) == dict(site.mesh.shape)  # for JAX it is the same mesh
    constraints = (eqn for eqn in interpreter.equations(site.body) if record_of(eqn).constrains)
    if not keeps_types and (eqn := next(constraints, None)) is not None:
        where = interpreter.source_line(eqn)
        raise _RemeshRefused(f"the mapped function constrains a sharding itself, at {where}")
    evaluate = interpreter.evaluate if keeps_types else rebind.evaluate
    of_pmaps_inside = set(site.mesh.axis_names) - {site.axis}

    def constrain(values: Sequence[Any], specs: Sequence[P]) -> Values:
        """Say how values are sharded on the caller's mesh; the devices are the same."""
        renamed = [P(*[axis if part == site.axis else part for part in spec]) for spec in specs]
        return [
            lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
            for value, spec in zip(values, renamed, strict=True)
        ]

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        params = eqn.params
        operands = constrain(values, params["in_specs"])
        with meshes.context_of(inside):
            results = jax.shard_map(
                lambda *blocks: evaluate(site.body, blocks),
                mesh=inside,
                in_specs=tuple(params["in_specs"]),
                out_specs=list(params["out_specs"]),
                axis_names=set(inside.axis_names) - of_pmaps_inside,
                check_vma=False,
            )(*operands)
        return constrain(results, params["out_specs"])

    return axis, emit


def _mesh_inside(site: PmapSite, mesh: Mesh) -> tuple[str, Mesh]:
    """Return the axis of the mesh for a pmap, and the mesh under the names of the pmap."""
    if site.devices is not None and not set(site.devices) <= set(mesh.devices.flat):
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
    names_inside = {target: name for name, target in chosen.items()}
    names = [names_inside.get(name, f"other_{name}") for name in mesh.axis_names]
    return chosen[site.axis], _compat.auto_mesh(mesh.devices, names)


def _take_axis(free: dict[str, int], name: str, size: int) -> str | None:
    """Take an axis of this size out of `free`, if there is one; one of this name rather."""
    fitting = [other for other in free if free[other] == size]
    if not fitting:
        return None
    chosen = name if name in fitting else fitting[0]
    del free[chosen]
    return chosen


# --- arguments on some devices only, put on all of the mesh


def put_on(
    mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put every array on all devices of the mesh, sharded as it was where that fits.

    jit takes no arrays on different sets of devices. What a pmap outside of the rewriting made is
    on the devices of that pmap; pmaps inside are moved to the mesh.

    Returns:
      The arguments; None if no array is elsewhere.
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
    """Return a spec with an axis of the same size for each sharded dimension, if there is one."""
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
