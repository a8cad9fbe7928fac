"""On which mesh, and by which specs, custom_partitioning calls lie: Shardy is asked."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import EquationPlace, Handler, Path, Values


class Unknown(Exception):
    """Shardy's answer cannot be said as specs of one mesh; the text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """How the values around one call lie, each spec as long as its array has dimensions."""

    operands: tuple[P, ...]
    results: tuple[P, ...]
    constants: tuple[int, ...] = ()  # numbers of the operands that no argument has a part in


def layouts(
    lowered: jax.stages.Lowered,
    *,
    call_target: str,
    scope: re.Pattern[str],
    mesh: jax.sharding.Mesh,
) -> dict[str, CallLayout | Unknown]:
    """What Shardy chooses for the custom calls of one target, in a program for a mesh.

    The first group of `scope` is the name of a call, found in its location, and "" for a call
    without one. By that name: a call that the program does not hold has no entry; calls of one name
    that lie in several ways are `Unknown`.
    """
    module: Any = lowered.compiler_ir()
    found: dict[str, CallLayout | Unknown] = {}
    with module.context:
        propagated = module.operation.clone()  # the caller's module stays as it is
        # Without inlining, a function that is called twice would have to lie in one way.
        passes = passmanager.PassManager.parse("builtin.module(inline,sdy-propagation-pipeline)")
        passes.run(propagated)
        operations = [each.operation for each in propagated.regions[0].blocks[0].operations]
        meshes = {
            ir.StringAttr(operation.attributes["sym_name"]).value: operation.attributes["mesh"]
            for operation in operations
            if operation.name == "sdy.mesh"
        }
        for call in _custom_calls(propagated, call_target):
            match = scope.search(str(call.location))
            name = match[1] if match else ""
            layout = _layout(call, mesh, meshes)
            before = found.setdefault(name, layout)
            if isinstance(before, CallLayout) and before != layout:
                found[name] = Unknown("the compiler makes copies of it that lie differently")
    return found


def _layout(
    call: ir.Operation, mesh: jax.sharding.Mesh, meshes: Mapping[str, Any]
) -> CallLayout | Unknown:
    """How one call lies; `meshes` are those of the program, by name."""
    try:
        operands = tuple(_spec(value, mesh, meshes) for value in call.operands)
        results = tuple(_spec(value, mesh, meshes) for value in call.results)
    except Unknown as reason:
        return reason
    constants = [n for n, value in enumerate(call.operands) if _is_constant(value)]
    return CallLayout(operands, results, tuple(constants))


def _spec(value: ir.Value, mesh: jax.sharding.Mesh, meshes: Mapping[str, Any]) -> P:
    sharding = _sharding(value)
    if sharding is None:
        return P(*[None] * ir.ShapedType(value.type).rank)
    if sharding.unreduced_axes:
        raise Unknown("one of its values is a sum that is not yet added up")
    manual: Sequence[str] = ()  # what an argument of a manual computation is no longer cut along
    if isinstance(value, ir.BlockArgument):
        holder = _holder(value)
        if holder.name == "sdy.manual_computation":
            axes_within: Any = sdy.ManualAxesAttr(holder.attributes["manual_axes"])
            manual = list(axes_within)
    dimensions: list[tuple[str, ...]] = []
    for dimension in sharding.dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        for axis in axes:
            if axis.sub_axis_info is not None:
                raise Unknown(f"one of its values is cut along a part of the axis {axis.name!r}")
        dimensions.append(tuple(axis.name for axis in axes if axis.name not in manual))
    if any(dimensions):
        own = sdy.MeshAttr(meshes[ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value])
        sizes = [(axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, own.axes)]
        # Device ids are only there if the order is not that of the program's devices.
        if own.device_ids or sizes != list(mesh.shape.items()):
            raise Unknown("its values lie on another mesh")
    return P(*[axes[0] if len(axes) == 1 else axes or None for axes in dimensions])


def _sharding(value: ir.Value) -> Any:
    """The sharding of a value, which its maker carries; None: it lies whole on every device."""
    if isinstance(value, ir.BlockArgument):
        holder, place = _holder(value), value.arg_number
        attributes: Any = holder.attributes
        match holder.name:
            case "func.func":
                own = attributes["arg_attrs"][place] if "arg_attrs" in attributes else {}
                told = "sdy.sharding" in own
                return sdy.TensorShardingAttr(own["sdy.sharding"]) if told else None
            case "stablehlo.while":
                told = "sdy.sharding" in attributes
                return _numbered(attributes["sdy.sharding"], place) if told else None
            case "sdy.manual_computation":
                return _numbered(attributes["in_shardings"], place)
        raise Unknown(f"it reads an argument of {holder.name}")
    maker = cast(Any, value.owner).operation
    attributes, place = maker.attributes, ir.OpResult(value).result_number
    if "sdy.sharding" in attributes:
        return _numbered(attributes["sdy.sharding"], place)
    match maker.name:
        case "sdy.manual_computation":
            return _numbered(attributes["out_shardings"], place)
        case "sdy.reshard" | "sdy.sharding_constraint":
            return sdy.TensorShardingAttr(attributes["sharding"])
    if "out_sharding" in attributes:  # the collectives that Shardy puts in
        return sdy.TensorShardingAttr(attributes["out_sharding"])
    if maker.name.startswith("sdy.") and maker.name != "sdy.constant":
        raise Unknown(f"it reads a result of {maker.name}")
    return None


def _holder(argument: ir.BlockArgument) -> ir.Operation:
    block: Any = argument.owner
    return block.owner.operation


def _numbered(per_value: ir.Attribute, place: int) -> Any:
    return sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(per_value).shardings[place])


def _is_constant(value: ir.Value) -> bool:
    if isinstance(value, ir.BlockArgument):
        return False
    maker = cast(Any, value.owner).operation
    # A region could read anything from around it.
    return not maker.regions and all(map(_is_constant, maker.operands))


def _custom_calls(module: ir.Operation, target: str) -> list[ir.Operation]:
    """In program order."""
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            name: Any = operation.attributes["call_target_name"]
            if ir.StringAttr(name).value == target:
                found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    return found


# --- how the calls of custom_partitioning ops lie: on which mesh, and by which specs
#
# The program is lowered with each call under a named scope of its own, and Shardy is asked.


_SCOPE = "jax_dist_site_{}"
_SITE = re.compile(r"jax_dist_site_([\d.]+)")


def is_partitioned(eqn: JaxprEqn) -> bool:
    return _compat.name_of(eqn) == "custom_partitioning"


def mesh_of(jaxpr: ClosedJaxpr, in_shardings: Sequence[NamedSharding | None]) -> Mesh | None:
    """The one mesh that arguments, program or `jax.set_mesh` mention; None for none or several."""
    meshes = meshes_of(jaxpr, in_shardings)
    return meshes[0] if len(meshes) == 1 else None


def meshes_of(jaxpr: ClosedJaxpr, in_shardings: Sequence[NamedSharding | None]) -> list[Mesh]:
    """The meshes of devices that a program runs on, each once, in order.

    Those of the arguments; if they have none, those of constraints and of the jits within; then
    those of its shard_maps; then the one of `jax.set_mesh`.
    """
    asked: list[Any] = []
    regions: list[Any] = []
    for eqn in interpreter.equations(jaxpr):
        params = eqn.params
        match _compat.name_of(eqn):
            case "jit":
                asked += (*params["in_shardings"], *params["out_shardings"])
            case "sharding_constraint":
                asked.append(params["sharding"])
            case "shard_map":
                regions.append(params["mesh"])
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # within a trace, which is told the form of the mesh, and no devices
        context = None
    told, within = (
        [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
        for shardings in (in_shardings, asked)
    )
    for mentioned in (told, within, regions, [context]):
        found = dict.fromkeys(mesh for mesh in mentioned if isinstance(mesh, Mesh))
        if found:
            return [mesh for mesh in found if not mesh.empty]
    return []


def layouts_of(
    jaxpr: ClosedJaxpr,
    sites: Sequence[EquationPlace],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
) -> dict[Path, CallLayout | Unknown]:
    """How operands and results of each site lie.

    Sites that the lowered program does not hold have no entry: nobody reads them, or JAX puts the
    body of the op there, as it does where all axes are manual.
    """
    config: Any = jax.config  # its attributes are made at run time
    devices = set(NamedSharding(mesh, P()).device_set)
    problem = ""
    if not config.jax_use_shardy_partitioner:
        problem = "jax_use_shardy_partitioner is off, so nothing tells its specs: give specs="
    elif any(sharding.device_set != devices for sharding in in_shardings if sharding is not None):
        problem = "an argument lies on other devices than the mesh has"
    if problem:
        return {site.path: Unknown(problem) for site in sites}
    lowered = _lowered(jaxpr, frozenset(site.path for site in sites), mesh, in_shardings)
    found = layouts(lowered, call_target="CustomSPMDPartitioning", scope=_SITE, mesh=mesh)
    lost = Unknown("it was not found again in the lowered program") if "" in found else None
    answers = {site.path: found.get(_name(site.path), lost) for site in sites}
    return {path: answer for path, answer in answers.items() if answer is not None}


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
    shapes = []
    for var, sharding in zip(body.invars, in_shardings, strict=True):
        aval: Any = var.aval
        if sharding is None and not aval.sharding.mesh.empty:
            sharding = NamedSharding(mesh, aval.sharding.spec)  # of Explicit axes: part of the type
        shapes.append(
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
            )
        )
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
            if interpreter.contains(body, lambda eqn: is_partitioned(eqn) or _is_plain_jit(eqn))
        }
        if here in sites:
            handlers[number] = functools.partial(_scoped, here)
        elif _is_plain_jit(eqn):
            # Its own arguments would be cut as one of its calls is, which the compiler does not do.
            inline = functools.partial(_with_scopes, eqn.params["jaxpr"], (*here, 0), sites)
            handlers[number] = lambda _, values, inline=inline: inline(*values)
        elif inner and not is_partitioned(eqn):
            handlers[number] = functools.partial(interpreter.run_bodies, inner)
    return interpreter.run(jaxpr, args, handlers)


def _scoped(path: Path, eqn: JaxprEqn, values: Values) -> Values:
    with jax.named_scope(_SCOPE.format(_name(path))):
        return interpreter.replay(eqn, values)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _is_plain_jit(eqn: JaxprEqn) -> bool:
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return _compat.name_of(eqn) == "jit" and not any(isinstance(x, Sharding) for x in said)
