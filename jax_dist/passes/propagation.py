"""Asks Shardy, the compiler's own partitioner, how the values of a program will lie.

Only its propagation runs, on the lowered program; nothing is compiled. The calls to ask about are
found again by the named scope that they were traced under.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import PartitionSpec as P


class Unknown(Exception):
    """Shardy's answer cannot be said as specs of one mesh; the text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
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
) -> dict[str, Layout | Unknown]:
    """What Shardy chooses for the custom calls of one target.

    Args:
      lowered: the program, lowered for the devices of `mesh`.
      call_target: the name of the target of the calls.
      scope: its first group is the name of a call, found in the call's location.
      mesh: whose axes the specs use.

    Returns:
      By the name, which is "" for calls outside of any such scope. A call that the program does
      not hold has no entry; calls of one name that lie in several ways are `Unknown`.
    """
    module: Any = lowered.compiler_ir()
    found: dict[str, Layout | Unknown] = {}
    with module.context:
        propagated = module.operation.clone()  # the caller's module stays as it is
        # Without inlining, a function that is called twice would have to lie in one way.
        passes = passmanager.PassManager.parse("builtin.module(inline,sdy-propagation-pipeline)")
        passes.run(propagated)
        reader = _Reader(dict(_meshes(propagated)), mesh)
        for call in _custom_calls(propagated, call_target):
            match = scope.search(str(call.location))
            name = match[1] if match else ""
            layout = reader.layout(call)
            before = found.setdefault(name, layout)
            if isinstance(before, Layout) and before != layout:
                found[name] = Unknown("the compiler makes copies of it that lie differently")
    return found


@dataclasses.dataclass(frozen=True)
class _Reader:
    meshes: Mapping[str, Any]  # by their names in the program
    mesh: jax.sharding.Mesh

    def layout(self, call: ir.Operation) -> Layout | Unknown:
        try:
            operands = tuple(self._spec(value) for value in call.operands)
            results = tuple(self._spec(value) for value in call.results)
        except Unknown as reason:
            return reason
        constants = [n for n, value in enumerate(call.operands) if _is_constant(value)]
        return Layout(operands, results, tuple(constants))

    def _spec(self, value: ir.Value) -> P:
        rank = ir.ShapedType(value.type).rank
        sharding = _sharding(value)
        if sharding is None:
            return P(*[None] * rank)
        if sharding.unreduced_axes:
            raise Unknown("one of its values is a sum that is not yet added up")
        manual = _manual_axes(value)
        dimensions = [
            tuple(axis for axis in self._axes(dimension) if axis not in manual)
            for dimension in sharding.dimension_shardings
        ]
        if any(dimensions) and not self._on_mesh(sharding.mesh_or_ref):
            raise Unknown("its values lie on another mesh")
        return P(*[_entry(axes) for axes in dimensions])

    def _axes(self, dimension: Any) -> tuple[str, ...]:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        for axis in axes:
            if axis.sub_axis_info is not None:
                raise Unknown(f"one of its values is cut along a part of the axis {axis.name!r}")
        return tuple(axis.name for axis in axes)

    def _on_mesh(self, name: ir.Attribute) -> bool:
        attribute = sdy.MeshAttr(self.meshes[ir.FlatSymbolRefAttr(name).value])
        axes = [sdy.MeshAxisAttr(axis) for axis in attribute.axes]
        sizes = {axis.name: axis.size for axis in axes}
        # Device ids are only there if the order is not that of the program's devices.
        return not attribute.device_ids and list(sizes.items()) == list(self.mesh.shape.items())


def _entry(axes: tuple[str, ...]) -> Any:
    return axes[0] if len(axes) == 1 else axes or None


def _sharding(value: ir.Value) -> Any:
    """The sharding of a value, which its maker carries; None: it lies whole on every device."""
    if isinstance(value, ir.BlockArgument):
        return _of_argument(value.arg_number, _holder(value))
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


def _of_argument(place: int, holder: ir.Operation) -> Any:
    attributes: Any = holder.attributes
    match holder.name:
        case "func.func":
            own = attributes["arg_attrs"][place] if "arg_attrs" in attributes else {}
            return sdy.TensorShardingAttr(own["sdy.sharding"]) if "sdy.sharding" in own else None
        case "stablehlo.while":
            carried = "sdy.sharding" in attributes
            return _numbered(attributes["sdy.sharding"], place) if carried else None
        case "sdy.manual_computation":
            return _numbered(attributes["in_shardings"], place)
    raise Unknown(f"it reads an argument of {holder.name}")


def _manual_axes(value: ir.Value) -> Sequence[str]:
    """Those that an argument of a manual computation is no longer cut along, within it."""
    if isinstance(value, ir.BlockArgument):
        holder = _holder(value)
        if holder.name == "sdy.manual_computation":
            axes: Any = sdy.ManualAxesAttr(holder.attributes["manual_axes"])
            return list(axes)
    return ()


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


def _meshes(module: ir.Operation) -> Iterator[tuple[str, Any]]:
    for operation in module.regions[0].blocks[0].operations:
        attributes = operation.operation.attributes
        if operation.operation.name == "sdy.mesh":
            yield ir.StringAttr(attributes["sym_name"]).value, attributes["mesh"]


def _custom_calls(module: ir.Operation, target: str) -> list[ir.Operation]:
    """In program order."""
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        attributes = operation.attributes
        if operation.name != "stablehlo.custom_call":
            return ir.WalkResult.ADVANCE
        if ir.StringAttr(attributes["call_target_name"]).value == target:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    return found
