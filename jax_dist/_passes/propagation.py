"""The mesh of a program, and the shardings that Shardy chooses for its custom_partitioning calls.

The program is lowered with each call under a named scope of its own, behind a barrier of its
operands; Shardy's propagation runs on that module, and the shardings are read from the calls that
carry the scopes, and from the barriers.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import Values

_Shardings: TypeAlias = Sequence[NamedSharding | None]  # of the inputs of a jaxpr


def find_meshes(eqns: Iterable[JaxprEqn]) -> list[Mesh]:
    """Return the meshes with devices that equations name, each once, in order.

    Those of the shardings of jits and sharding constraints; if there are none, of shard_maps.
    """
    of_shardings: list[Any] = []
    of_shard_maps: list[Any] = []
    for eqn in eqns:
        match _compat.name_of(eqn), eqn.params:
            case "jit", {"in_shardings": ins, "out_shardings": outs}:
                of_shardings += [getattr(sharding, "mesh", None) for sharding in (*ins, *outs)]
            case "sharding_constraint", {"sharding": sharding}:
                of_shardings.append(getattr(sharding, "mesh", None))
            case "shard_map", {"mesh": mesh}:
                of_shard_maps.append(mesh)
    return _meshes_among(of_shardings) or _meshes_among(of_shard_maps)


def meshes_of(named: Sequence[Mesh], in_shardings: _Shardings) -> list[Mesh]:
    """Return the meshes of devices that a program runs on, each once, in order.

    Those of the arguments; if they have none, the `named` ones, which its equations name; then the
    one of `jax.set_mesh`.
    """
    of_arguments = _meshes_among(getattr(s, "mesh", None) for s in in_shardings)
    if of_arguments or named:
        return of_arguments or list(named)
    try:
        return _meshes_among([jax.sharding.get_mesh()])
    except ValueError:  # within a trace, which knows the form of the mesh, and no devices
        return []


def _meshes_among(candidates: Iterable[Any]) -> list[Mesh]:
    """Return those with devices, which an AbstractMesh has not, each once."""
    meshes = [mesh for mesh in candidates if isinstance(mesh, Mesh) and not mesh.empty]
    return list(dict.fromkeys(meshes))


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """The shardings of the values of one call; each spec is as long as its array has dimensions."""

    operands: tuple[P, ...]
    results: tuple[P, ...]

    @classmethod
    def make(cls, eqn: JaxprEqn, operands: Sequence[P], results: Sequence[P]) -> "CallLayout":
        """Return the layout by these specs: `P("i")` of an `[8, 4]` becomes `P("i", None)`."""
        pad = lambda spec, atom: P(*spec, *[None] * (atom.aval.ndim - len(spec)))
        pairs = zip(operands, eqn.invars, strict=True), zip(results, eqn.outvars, strict=True)
        return cls(*(tuple(pad(spec, atom) for spec, atom in specs) for specs in pairs))


_SCOPE = re.compile(r"jax_dist_site_(\d+)")


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a jit without shardings of its own."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    has_shardings = any(isinstance(sharding, Sharding) for sharding in shardings)
    return _compat.name_of(eqn) == "jit" and not has_shardings


def layouts_of(
    jaxpr: ClosedJaxpr, calls: Sequence[JaxprEqn], mesh: Mesh, in_shardings: _Shardings
) -> dict[int, CallLayout | None]:
    """Return by the `id` of a call how Shardy shards its values; None if Shardy is turned off.

    Without entry are calls that lowering drops: their results are unused, or JAX inlines the op.
    """
    if not _compat.config_value("jax_use_shardy_partitioner"):
        return dict.fromkeys(map(id, calls))
    numbers = {id(eqn): number for number, eqn in enumerate(calls)}
    lowered = _lower_with_scopes(jaxpr, numbers, mesh, in_shardings)
    layouts = _read_layouts(lowered.compiler_ir())  # by the number of the call
    return {key: layouts[number] for key, number in numbers.items() if number in layouts}


def _lower_with_scopes(
    jaxpr: ClosedJaxpr, numbers: Mapping[int, int], mesh: Mesh, in_shardings: _Shardings
) -> jax.stages.Lowered:
    """Lower a program so that its calls of custom_partitioning can be found again in the module.

    `numbers` has a number for the `id` of each call. Call 3 is lowered in the named scope
    "jax_dist_site_3", which is part of its location in the module.
    """

    def bind_in_scope(eqn: JaxprEqn, values: Values) -> Values:
        with jax.named_scope(f"jax_dist_site_{numbers[id(eqn)]}"):
            # Shardings are attributes of operations: the barrier has those of the operands.
            return interpreter.replay(eqn, jax.lax.optimization_barrier(values))

    marked = interpreter.replace_equations(jaxpr, dict.fromkeys(numbers, bind_in_scope))

    def program(anchor: jax.Array, *args: jax.Array) -> Values:
        del anchor  # on the whole mesh, for which JAX then lowers, even if nothing else is on it
        return interpreter.evaluate(marked, args)

    types = [jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))]  # of the anchor
    for var, sharding in zip(jaxpr.jaxpr.invars, in_shardings, strict=True):
        aval: Any = var.aval
        # What is on other devices is moved to those of the mesh in the call.
        is_on_mesh = sharding is not None and sharding.device_set == set(mesh.devices.flat)
        options = {"sharding": sharding if is_on_mesh else None, "weak_type": aval.weak_type}
        types.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, **options))
    return jax.jit(program, keep_unused=True).lower(*types)


def _read_layouts(module: Any) -> dict[int, CallLayout]:
    """Run Shardy on a module; return how it shards each call, by the number of the scope."""
    layouts: dict[int, CallLayout] = {}

    def visit(operation: ir.Operation) -> ir.WalkResult:
        """Read the layout of an operation, if it is a call in one of the scopes."""
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            scope = _SCOPE.search(str(operation.location))
            if scope and target == "CustomSPMDPartitioning":
                operands, results = map(_spec, operation.operands), map(_spec, operation.results)
                layouts.setdefault(int(scope[1]), CallLayout(tuple(operands), tuple(results)))
        return ir.WalkResult.ADVANCE

    with module.context:
        propagate = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        propagate.run(module.operation)
        module.operation.walk(visit)
    return layouts


def _spec(value: ir.Value) -> P:
    """Return the spec of a value in a module that Shardy has propagated shardings through.

    Of `<@mesh, [{"i", "j"}, {}]>` that is `P(("i", "j"), ())`. A dimension that is sharded over a
    part of a mesh axis only, which no spec can say, counts as whole.
    """
    producer: Any = value.owner  # the operation, whose attribute has a sharding for each result
    if "sdy.sharding" not in producer.attributes:  # replicated
        return P(*[None] * ir.ShapedType(value.type).rank)
    shardings = sdy.TensorShardingPerValueAttr(producer.attributes["sdy.sharding"]).shardings
    sharding = sdy.TensorShardingAttr(shardings[ir.OpResult(value).result_number])
    entries: list[tuple[str, ...]] = []
    for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
        axes = [sdy.AxisRefAttr(axis) for axis in dimension.axes]
        has_parts = any(axis.sub_axis_info is not None for axis in axes)
        entries.append(() if has_parts else tuple(axis.name for axis in axes))
    return P(*entries)
