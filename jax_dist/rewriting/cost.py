"""The collectives, sizes and memory of a compiled program.

A collective of the compiled text names groups of devices; what is reported are the mesh axes that
it runs over.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_dist.passes.gather_states import ring_bytes
from jax_dist.rewriting import hlo

Groups: TypeAlias = tuple[tuple[int, ...], ...]


def groups_of(attributes: str, devices: int) -> Groups:
    """The groups that the attributes of an instruction name.

    Args:
      attributes: those of a collective, as compiled programs write them.
      devices: how many the program runs on; all of them are one group where none is named.

    Raises:
      ValueError: the groups are written in a way that this does not know.
    """
    lists = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if lists and (lists[1] or "source_target_pairs" in lists[0]):
        return tuple(map(_numbers, re.findall(r"\{([\d,]*)\}", lists[1])))
    counted = re.search(rf"replica_groups={_COUNTED}", attributes)
    if counted:
        return _rows(_counted(counted))
    mesh = _MESH.search(attributes)
    if mesh:
        return _along_axes(mesh)
    named = re.search(r"(?:replica_groups|source_target_pairs)=.{,60}", attributes)
    if named and not lists:
        raise ValueError(f"cannot read which devices a collective joins: {named[0]}")
    return (tuple(range(devices)),)


def axes_joined(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which every group runs, in mesh order; () if they are no axes' groups.

    Args:
      groups: of a reduction, a gather or an exchange: the order within each is ignored.
      sizes: of the mesh axes, by name.
    """
    wanted = {frozenset(group) for group in groups}
    for axes in _choices(sizes, math.prod(sizes.values()), groups):
        if wanted == {frozenset(group) for group in _groups_along(axes, sizes)}:
            return axes
    return ()


def axes_crossed(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which every (source, target) pair runs; () if there are none.

    Args:
      pairs: of a permutation.
      sizes: of the mesh axes, by name.
    """
    for axes in _choices(sizes, math.prod(sizes.values()), pairs):
        group_of = {
            device: place
            for place, group in enumerate(_groups_along(axes, sizes))
            for device in group
        }
        if all(group_of[source] == group_of[target] for source, target in pairs):
            return axes
    return ()


def _choices(sizes: Mapping[str, int], devices: int, groups: Groups) -> list[tuple[str, ...]]:
    """The sets of axes, the small ones first; none if the groups are not of this mesh."""
    if max(itertools.chain(*groups), default=devices) >= devices:
        return []
    counts = range(1, len(sizes) + 1)
    return [axes for count in counts for axes in itertools.combinations(sizes, count)]


def _groups_along(axes: Sequence[str], sizes: Mapping[str, int]) -> Groups:
    names = tuple(sizes)
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    return _rows(_last(numbers, [names.index(axis) for axis in axes]))


def _last(numbers: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    """`[groups, devices of a group]`: along the given dimensions, in their order."""
    others = [place for place in range(numbers.ndim) if place not in dimensions]
    size = math.prod(numbers.shape[place] for place in dimensions)
    return numbers.transpose([*others, *dimensions]).reshape(-1, size)


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _counted(found: re.Match[str]) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)": 0 to 7 as [4, 2], transposed, then as [2, 4] if that is said."""
    start = np.arange(math.prod(_numbers(found["reshape"]))).reshape(_numbers(found["reshape"]))
    moved = start.transpose(_numbers(found["order"])) if found["order"] else start
    return moved.reshape(_numbers(found["shape"])) if found["shape"] else moved


def _along_axes(found: re.Match[str]) -> Groups:
    """ "mesh['i'=4,'j'=2] {'j'}", also along a part of an axis: "{'i':(2)2}"."""
    sizes = dict(_MESH_AXIS.findall(found["axes"]))
    numbers = _assigned(found["devices"], [int(size) for size in sizes.values()])
    shape: list[int] = []
    starts: dict[str, int] = {}  # of each axis, among the dimensions of `shape`
    cuts: dict[str, list[int]] = {name: _cuts(name, found["joined"]) for name in sizes}
    for name, size in sizes.items():
        starts[name] = len(shape)
        edges = [1, *cuts[name], int(size)]
        shape += [after // before for before, after in itertools.pairwise(edges)]
    joined = [
        starts[name] + [1, *cuts[name]].index(int(before or 1))
        for name, before, _ in _JOINED_AXIS.findall(found["joined"])
    ]
    return _rows(_last(numbers.reshape(shape), joined))


def _cuts(name: str, joined: str) -> list[int]:
    """Where parts of an axis begin and end, as products of the sizes before, without its ends."""
    edges = {
        edge
        for axis, before, size in _JOINED_AXIS.findall(joined)
        if axis == name and before
        for edge in (int(before), int(before) * int(size))
    }
    return sorted(edges - {1})


def _assigned(text: str | None, shape: Sequence[int]) -> np.ndarray:
    if not text:
        return np.arange(math.prod(shape)).reshape(shape)
    counted = re.fullmatch(_COUNTED, text) or re.fullmatch(_TRANSPOSED, text)
    numbers = _counted(counted) if counted else np.array(_numbers(re.sub(r"[\[\]]", "", text)))
    return numbers.reshape(shape)


_COUNTED = r"\[(?P<shape>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
# Without a shape, as jax 0.10.2 prints the devices of a mesh: "[4,2]T(1,0)".
_TRANSPOSED = r"(?P<shape>)\[(?P<reshape>[\d,]+)\]T\((?P<order>[\d,]+)\)"
_NAME = r"'?([^',={}\[\]:]+)'?"
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>[^)]*(?:\([^)]*\))?)\))?"
    r" \{(?P<joined>[^}]*)\}"
)
_MESH_AXIS = re.compile(rf"{_NAME}=(\d+)")
_JOINED_AXIS = re.compile(rf"{_NAME}(?::\((\d+)\)(\d+))?")


# --- what a program costs between devices and on one: its collectives, its sizes, its memory
#
# Read from the compiled program, for the compiler merges, splits and moves collectives: the traced
# program only says what was asked for.


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
class ProgramCost:
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


def program_of(lowered: jax.stages.Lowered, mesh: Mesh | AbstractMesh | None = None) -> ProgramCost:
    """Compiles a lowered program, once, and takes its measures.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` returns.
      mesh: whose axes to name in the collectives; those of the program itself where not given.
    """
    stablehlo = lowered.as_text()
    compiled = lowered.compile()
    module = hlo.parse(compiled.as_text() or "")
    return ProgramCost(
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


def _collectives(module: hlo.HloModule, meshes: Sequence[_Sizes]) -> tuple[Collective, ...]:
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
    module: hlo.HloModule, name: str, times: int, runs: Runs
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
    groups = groups_of(instruction.unquoted(), devices)
    result_bytes = hlo.shape_bytes(_result(instruction, kind))
    in_pairs = kind == "collective-permute"
    axes, size = _joined(groups, meshes, in_pairs=in_pairs)
    moved = ring_bytes(_KINDS[kind], result_bytes, size)
    return Collective(kind, axes, size, 1, result_bytes, moved, runs)


def _joined(
    groups: Groups, meshes: Sequence[_Sizes], *, in_pairs: bool
) -> tuple[tuple[str, ...], int]:
    """The axes of the first mesh that has such groups, or (); and the devices in one group."""
    for sizes in meshes:
        if in_pairs and (axes := axes_crossed(groups, sizes)):
            return axes, _product({axis: sizes[axis] for axis in axes})
        if not in_pairs and (axes := axes_joined(groups, sizes)):
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


def _constants_bytes(module: hlo.HloModule) -> int:
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
