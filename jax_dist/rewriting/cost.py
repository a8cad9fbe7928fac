"""What a program costs between devices and on one: its collectives, its sizes, its memory.

Read from the compiled program, for the compiler merges, splits and moves collectives: the traced
program only says what was asked for.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_dist.passes.ring import ring_bytes
from jax_dist.rewriting import device_groups, hlo

Runs: TypeAlias = Literal["always", "in a branch", "in a loop of unknown length"]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of a program: same kind, same devices, same size."""

    kind: str  # as HLO spells it: "all-gather"
    axes: tuple[str, ...]  # in mesh order; () where the groups are not those of mesh axes
    size: int  # devices in one group
    count: int  # in one call of the program; loops of known length multiplied out
    result_bytes: int  # of one, on one device
    moved_bytes: float  # by one, from each device, around a ring
    runs: Runs = "always"  # what is in a branch, or in a loop of unknown length, is counted once


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A compiled program in numbers. Bytes are those of one device."""

    collectives: tuple[Collective, ...] = ()
    stablehlo_bytes: int = 0  # of the program's text, before it is compiled
    constants_bytes: int = 0  # of the arrays that are part of the compiled program
    argument_bytes: int | None = None  # this and the next two: None where the backend does not tell
    output_bytes: int | None = None
    temp_bytes: int | None = None

    @property
    def moved_bytes(self) -> float:
        """From each device, in one call."""
        return sum(each.count * each.moved_bytes for each in self.collectives)


def program_of(lowered: jax.stages.Lowered, mesh: Mesh | AbstractMesh | None = None) -> Program:
    """Compiles a lowered program, once, and takes its measures.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` returns.
      mesh: whose axes to name in the collectives; those of the program itself where not given.
    """
    stablehlo = lowered.as_text()
    compiled = lowered.compile()
    module = hlo.parse(compiled.as_text() or "")
    return Program(
        collectives=_collectives(module, [mesh.shape] if mesh else _meshes_in(stablehlo)),
        stablehlo_bytes=len(stablehlo.encode()),
        constants_bytes=_constants_bytes(module),
        **_memory(compiled),
    )


def collectives_of(
    compiled_text: str, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Collective, ...]:
    """The collectives of a compiled program, equal ones merged, in program order.

    Args:
      compiled_text: `lowered.compile().as_text()`.
      mesh: whose axes to name; where not given, collectives have no axes.
    """
    return _collectives(hlo.parse(compiled_text), [mesh.shape] if mesh else [])


_Sizes: TypeAlias = Mapping[Any, int]  # of the axes of a mesh, by name


def _collectives(module: hlo.Module, meshes: Sequence[_Sizes]) -> tuple[Collective, ...]:
    fitting = [
        {str(name): size for name, size in sizes.items()}
        for sizes in meshes
        if _product(sizes) == module.devices
    ]
    counts: dict[Collective, int] = {}
    for instruction, times, runs in _executed(module, module.entry, 1, "always"):
        each = _collective(instruction, module.devices, fitting, runs)
        if each is not None:
            counts[each] = counts.get(each, 0) + times
    return tuple(dataclasses.replace(each, count=count) for each, count in counts.items())


def _executed(
    module: hlo.Module, name: str, times: int, runs: Runs
) -> Iterator[tuple[hlo.Instruction, int, Runs]]:
    """The instructions of a computation and of what it calls, and how often each is run."""
    for instruction in module.computations.get(name, ()):
        yield instruction, times, runs
        for call in instruction.calls():
            often, inner = _repeats(call.role, instruction.trip_count(), runs)
            yield from _executed(module, call.callee, times * often, inner)


def _repeats(role: hlo.Role, trips: int | None, runs: Runs) -> tuple[int, Runs]:
    """How often one run of an instruction runs what it calls."""
    if role == "call":
        return 1, runs
    if role == "branch":
        return 1, "in a branch" if runs == "always" else runs
    if trips is None:
        return 1, "in a loop of unknown length"
    return trips + (role == "condition"), runs  # the condition is asked once more, to end the loop


def _collective(
    instruction: hlo.Instruction, devices: int, meshes: Sequence[_Sizes], runs: Runs
) -> Collective | None:
    """With a count of 1; None for other instructions, and for the second half of a split one."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS:
        return None
    groups = device_groups.groups_of(instruction.unquoted(), devices)
    result_bytes = hlo.shape_bytes(_result(instruction, kind))
    in_pairs = kind == "collective-permute"
    axes, size = _joined(groups, meshes, in_pairs=in_pairs)
    moved = ring_bytes(_KINDS[kind], result_bytes, size)
    return Collective(kind, axes, size, 1, result_bytes, moved, runs)


def _joined(
    groups: device_groups.Groups, meshes: Sequence[_Sizes], *, in_pairs: bool
) -> tuple[tuple[str, ...], int]:
    """The axes of the first mesh that has such groups, or (); and the devices in one group."""
    for sizes in meshes:
        if in_pairs and (axes := device_groups.axes_crossed(groups, sizes)):
            return axes, _product({axis: sizes[axis] for axis in axes})
        if not in_pairs and (axes := device_groups.axes_joined(groups, sizes)):
            return axes, len(groups[0])
    return (), len(set(itertools.chain(*groups))) if in_pairs else max(map(len, groups))


def _result(instruction: hlo.Instruction, kind: str) -> str:
    """The shape of the result. The first half of a split one also has its operands, and more."""
    if instruction.opcode == kind or kind == "all-reduce":  # whose first half has only results
        return instruction.shape
    return hlo.elements(instruction.shape)[:2][-1]


def _meshes_in(stablehlo: str) -> list[_Sizes]:
    """The meshes that a lowered program names. Without those that number devices otherwise."""
    return [
        {name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', axes)}
        for axes in re.findall(r"sdy\.mesh @\S+ = <\[([^\]]*)\]>", stablehlo)
    ]


def _constants_bytes(module: hlo.Module) -> int:
    return sum(
        hlo.shape_bytes(instruction.shape)
        for body in module.computations.values()
        for instruction in body
        if instruction.opcode == "constant"
    )


def _memory(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    measured = compiled.memory_analysis()
    fields = ("argument", "output", "temp")
    return {f"{field}_bytes": getattr(measured, f"{field}_size_in_bytes", None) for field in fields}


def _product(sizes: _Sizes) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product


_KINDS = {  # HLO's kinds, and whose bytes on the ring they have
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-permute",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}
