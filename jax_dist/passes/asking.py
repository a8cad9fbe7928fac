"""How the calls of custom_partitioning ops lie: on which mesh, and by which specs.

The program is lowered with each call under a named scope of its own, and Shardy is asked.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist.passes import interpreter, places, propagation
from jax_dist.passes.interpreter import Handler, Values
from jax_dist.passes.places import Path, Place
from jax_dist.passes.propagation import Layout, Unknown

_SCOPE = "jax_dist_site_{}"
_SITE = re.compile(r"jax_dist_site_([\d.]+)")


def is_partitioned(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "custom_partitioning"


def mesh_of(jaxpr: ClosedJaxpr, in_shardings: Sequence[NamedSharding | None]) -> Mesh | None:
    """The one mesh that arguments, program or `jax.set_mesh` mention; None for none or several."""
    meshes = meshes_of(jaxpr, in_shardings)
    return meshes[0] if len(meshes) == 1 else None


def meshes_of(jaxpr: ClosedJaxpr, in_shardings: Sequence[NamedSharding | None]) -> list[Mesh]:
    """The meshes of devices that a program runs on, each once, in order.

    Those of the arguments; if they have none, those of constraints and of the jits within; then
    those of its shard_maps; then the one of `jax.set_mesh`.
    """
    eqns = list(interpreter.equations(jaxpr))
    asked = [sharding for eqn in eqns for sharding in _shardings_in(eqn)]
    regions = [eqn.params["mesh"] for eqn in eqns if eqn.primitive.name == "shard_map"]
    for mentioned in (_meshes(in_shardings), _meshes(asked), regions, [_context_mesh()]):
        found = dict.fromkeys(mesh for mesh in mentioned if isinstance(mesh, Mesh))
        if found:
            return [mesh for mesh in found if not mesh.empty]
    return []


def _shardings_in(eqn: JaxprEqn) -> Sequence[Any]:
    params = eqn.params
    match eqn.primitive.name:
        case "jit":
            return (*params["in_shardings"], *params["out_shardings"])
        case "sharding_constraint":
            return (params["sharding"],)
    return ()


def _meshes(shardings: Sequence[Any]) -> list[Any]:
    return [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]


def _context_mesh() -> Mesh | None:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # within a trace, which is told the form of the mesh, and no devices
        return None


def layouts_of(
    jaxpr: ClosedJaxpr,
    sites: Sequence[Place],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
) -> dict[Path, Layout | Unknown]:
    """How operands and results of each site lie.

    Sites that the lowered program does not hold have no entry: nobody reads them, or JAX puts the
    body of the op there, as it does where all axes are manual.
    """
    problem = _problem(mesh, in_shardings)
    if problem is not None:
        return {site.path: Unknown(problem) for site in sites}
    lowered = _lowered(jaxpr, frozenset(site.path for site in sites), mesh, in_shardings)
    found = propagation.layouts(
        lowered, call_target="CustomSPMDPartitioning", scope=_SITE, mesh=mesh
    )
    lost = Unknown("it was not found again in the lowered program") if "" in found else None
    answers = {site.path: found.get(_name(site.path), lost) for site in sites}
    return {path: answer for path, answer in answers.items() if answer is not None}


def _problem(mesh: Mesh, in_shardings: Sequence[NamedSharding | None]) -> str | None:
    """Why Shardy cannot be asked."""
    config: Any = jax.config  # its attributes are made at run time
    if not config.jax_use_shardy_partitioner:
        return "jax_use_shardy_partitioner is off, so nothing tells its specs: give specs="
    devices = set(NamedSharding(mesh, P()).device_set)
    if any(sharding.device_set != devices for sharding in in_shardings if sharding is not None):
        return "an argument lies on other devices than the mesh has"
    return None


def _lowered(
    jaxpr: ClosedJaxpr,
    sites: frozenset[Path],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
) -> jax.stages.Lowered:
    def with_scopes(anchor: jax.Array, *args: jax.Array) -> Values:
        del anchor
        constants = map(_of_no_size, interpreter.constants(jaxpr))
        return _with_scopes(opened, (), sites, *constants, *args)

    body = interpreter.open_jaxpr(jaxpr)
    inputs = [*body.constvars, *body.invars]
    opened = core.Jaxpr((), inputs, body.outvars, body.eqns, body.effects, interpreter.unnamed())
    # The anchor makes JAX lower for the whole mesh, even if nothing else is known to lie on it.
    anchor = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))
    pairs = zip(body.invars, in_shardings, strict=True)
    shapes = [_shape(var.aval, sharding, mesh) for var, sharding in pairs]
    return jax.jit(with_scopes, keep_unused=True).lower(anchor, *shapes)


def _of_no_size(constant: Any) -> Any:
    """A constant of the same type, which takes no time to write into the program.

    How values lie does not depend on what they are. But it must be a constant, and no argument:
    the compiler cuts a constant again for each of its uses.
    """
    aval = jax.typeof(constant)
    if not isinstance(aval.dtype, np.dtype) or aval.ndim == 0:
        return constant  # a PRNG key, or small anyway
    return np.broadcast_to(np.zeros((), aval.dtype), aval.shape)


def _with_scopes(jaxpr: Any, path: Path, sites: frozenset[Path], *args: Any) -> Values:
    """Evaluates a jaxpr with each site under its scope, and with the bodies of jits inlined."""
    handlers: dict[int, Handler] = {}
    for number, eqn in enumerate(interpreter.open_jaxpr(jaxpr).eqns):
        here = (*path, number)
        inner = {
            part: functools.partial(_with_scopes, body, (*here, part), sites)
            for part, body in enumerate(interpreter.bodies(eqn))
            if interpreter.contains(body, _is_of_interest)
        }
        if here in sites:
            handlers[number] = functools.partial(_scoped, here)
        elif _is_plain_jit(eqn):
            # Its own arguments would be cut as one of its calls is, which the compiler does not do.
            inline = functools.partial(_with_scopes, eqn.params["jaxpr"], (*here, 0), sites)
            handlers[number] = lambda _, values, inline=inline: inline(*values)
        elif inner and not is_partitioned(eqn):
            handlers[number] = functools.partial(places.run_bodies, inner)
    return interpreter.run(jaxpr, args, handlers)


def _scoped(path: Path, eqn: JaxprEqn, values: Values) -> Values:
    with jax.named_scope(_SCOPE.format(_name(path))):
        return interpreter.replay(eqn, values)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _is_of_interest(eqn: JaxprEqn) -> bool:
    return is_partitioned(eqn) or _is_plain_jit(eqn)


def _is_plain_jit(eqn: JaxprEqn) -> bool:
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return eqn.primitive.name == "jit" and not any(isinstance(x, Sharding) for x in said)


def _shape(aval: Any, sharding: NamedSharding | None, mesh: Mesh) -> jax.ShapeDtypeStruct:
    if sharding is None and not aval.sharding.mesh.empty:
        sharding = NamedSharding(mesh, aval.sharding.spec)  # of Explicit axes: part of the type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
