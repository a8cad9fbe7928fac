"""The collectives, sizes and memory of a compiled program, read from its HLO text.

It is the compiled program that is read, since the compiler merges, splits and moves collectives.
Its text has groups of devices, from which the mesh axes are found again.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import numpy as np

_Groups: TypeAlias = Sequence[Sequence[int]]  # the device numbers of each group
_Sizes: TypeAlias = Mapping[str, int]  # from the name of a mesh axis to its size, in mesh order
Runs: TypeAlias = Literal["always", "in a branch", "in a loop of unknown length"]

# The bytes that each of `n` devices sends in a ring algorithm, if the result has `b` on each.
_BYTES_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "ragged-all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of a program that have the same kind, devices and size, and their count."""

    kind: str  # in HLO: "all-gather"
    axes: tuple[str, ...]  # in mesh order; () if the groups are not those of mesh axes
    size: int  # devices in one group
    count: int  # in one call of the program; in a loop of known length, once an iteration
    result_bytes: int  # of one collective, on one device
    moved_bytes: float  # that each device sends for one collective, in a ring
    runs: Runs = "always"  # one in a branch, or in a loop of unknown length, is counted once


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramCost:
    """A compiled program in numbers. Bytes are those of one device."""

    collectives: tuple[Collective, ...] = ()
    stablehlo_bytes: int = 0  # of the program's text, before it is compiled
    constants_bytes: int = 0  # of the arrays that are part of the compiled program
    argument_bytes: int | None = None  # this and the next four: None if the compiler is silent
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None  # of results that reuse the memory of arguments
    peak_bytes: int | None = None  # of all of them together; the compiler of CPUs leaves out some

    @property
    def moved_bytes(self) -> float:
        """Return the bytes that each device sends in one call."""
        return sum(group.count * group.moved_bytes for group in self.collectives)

    @classmethod
    def measure(
        cls, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled | None = None
    ) -> "ProgramCost":
        """Return the cost of a lowered program; it is compiled unless `compiled` is given."""
        if compiled is None:
            compiled = lowered.compile()
        module = HloModule.parse(compiled.as_text() or "")
        stablehlo = lowered.as_text()
        meshes = []  # from lines such as: sdy.mesh @mesh = <["i"=4, "j"=2]>
        for axes in re.findall(r"sdy\.mesh @\S+ = <\[([^\]]*)\]>", stablehlo):
            meshes.append({name: int(n) for name, n in re.findall(r'"([^"]*)"=(\d+)', axes)})
        instructions = itertools.chain(*module.computations.values())
        constants = [i.shape for i in instructions if i.opcode == "constant"]
        memory = compiled.memory_analysis()  # None where the compiler has no analysis
        parts = ("argument", "output", "temp", "alias")
        return cls(
            collectives=module.collectives(meshes),
            stablehlo_bytes=len(stablehlo.encode()),
            constants_bytes=sum(sum(array_bytes(shape)) for shape in constants),
            peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
            **{f"{part}_bytes": getattr(memory, f"{part}_size_in_bytes", None) for part in parts},
        )


# The text of a compiled program: computations of instructions, which may call computations by name.

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(={]+) (\(.*)?\{\s*$")
# "%name = shape opcode(operands), attributes"; a shape of several results is in parentheses.
_ASSIGNED = re.compile(r"\s+(?:ROOT )?%?[^\s=]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|%?([^\s,}]+))"
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN_ID = re.compile(r"channel_id=(\d+), .*frontend_attributes=\{chain_id=")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    shape: str  # "f32[2,3]{1,0}", or of several results "(f32[2,3]{1,0}, f32[])"
    opcode: str
    attributes: str  # the rest of the line: "operands), attributes"


@dataclasses.dataclass(frozen=True, slots=True)
class HloModule:
    """The parsed HLO text of a compiled program."""

    entry: str  # the name of the computation where it starts
    computations: dict[str, list[Instruction]]  # by name
    devices: int

    @classmethod
    def parse(cls, text: str) -> "HloModule":
        """Parse the HLO text of a compiled program; raise ValueError if the text is not one."""
        computations: dict[str, list[Instruction]] = {}
        entry = ""
        current: list[Instruction] = []  # replaced at the header of the first computation
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = computations.setdefault(header["name"], [])
                entry = header["name"] if header["entry"] else entry
            elif assignment := _ASSIGNED.match(line):
                current.append(Instruction(*assignment.groups()))
        if not entry:
            raise ValueError("not the text of a compiled program: it has no ENTRY computation")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
        return cls(entry, computations, devices=math.prod(map(int, counts)))

    def walk_executed(
        self, name: str, times: int = 1, runs: Runs = "always"
    ) -> Iterator[tuple[Instruction, int, Runs]]:
        """Yield the instructions of a computation and of those it calls, and how often each runs.

        `times` and `runs` are those of the computation. A branch, or a loop of unknown length,
        counts as run once.
        """
        for instruction in self.computations.get(name, ()):
            yield instruction, times, runs
            if instruction.opcode in ("async-update", "async-done"):  # counted at async-start
                continue
            trip_count = _TRIP_COUNT.search(instruction.attributes)
            for attribute, name_list, single_name in _CALLED.findall(instruction.attributes):
                callee_times, callee_runs = times, runs
                if attribute in _BRANCHES:
                    callee_runs = "in a branch" if runs == "always" else runs
                elif attribute in ("body", "condition") and trip_count is None:
                    callee_runs = "in a loop of unknown length"
                elif attribute in ("body", "condition") and trip_count is not None:
                    is_condition = attribute == "condition"  # once more, to end the loop
                    callee_times = times * (int(trip_count[1]) + is_condition)
                for callee in re.findall(r"[^\s,%]+", name_list or single_name):
                    yield from self.walk_executed(callee, callee_times, callee_runs)

    def collectives(self, meshes: Sequence[_Sizes] = ()) -> tuple[Collective, ...]:
        """Return the collectives in order, equal ones merged; `meshes` are such as {"i": 4}."""
        meshes = [sizes for sizes in meshes if math.prod(sizes.values()) == self.devices]
        counts: dict[Collective, int] = {}
        seen_ids: set[str] = set()
        for instruction, times, runs in self.walk_executed(self.entry):
            # On TPUs, a collective that overlaps with several fusions is in each, with one id.
            channel_id = _CHAIN_ID.search(instruction.attributes)
            if channel_id and channel_id[1] in seen_ids:
                continue
            if channel_id:
                seen_ids.add(channel_id[1])
            if collective := self._collective(instruction, meshes, runs):
                counts[collective] = counts.get(collective, 0) + times
        return tuple(dataclasses.replace(key, count=count) for key, count in counts.items())

    def _collective(
        self, instruction: Instruction, meshes: Sequence[_Sizes], runs: Runs
    ) -> Collective | None:
        """Return the collective that an instruction is or starts; None if it is another one."""
        kind = instruction.opcode.removesuffix("-start")  # "all-gather-start" runs in background
        if kind not in _BYTES_SENT:
            return None
        is_start, shape = kind != instruction.opcode, instruction.shape
        sizes = array_bytes(shape)  # of "(f32[2], f32[8])", [8, 32]
        if is_start and kind != "all-reduce" and shape.startswith("("):
            # Here the shape is "(operands, results)", perhaps with integers for synchronization.
            sizes = array_bytes(re.sub(r", [us]32\[\]", "", shape))
            sizes = sizes[len(sizes) // 2 :]
        result_bytes = sum(sizes)
        groups = groups_of(instruction.attributes, self.devices)  # of devices: [[0, 1], [2, 3]]
        axes, size = axes_of(groups, meshes, is_permute=kind == "collective-permute")
        moved_bytes = float(_BYTES_SENT[kind](result_bytes, size))
        return Collective(kind, axes, size, 1, result_bytes, moved_bytes, runs)


def array_bytes(shape: str) -> list[int]:
    """Return the bytes of each array in an HLO shape, such as "(f32[2,3]{1,0}, pred[<=4])"."""
    sizes = []
    for dtype, bits, dims in re.findall(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]", shape):
        bits = bits or (8 if dtype == "pred" else 0)  # the number in the dtype, but for booleans
        elements = math.prod(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
        sizes.append(math.ceil(elements * int(bits) / 8))
    return sizes


# The groups of devices of a collective: lists "{{0,1},{2,3}}", reshaped numbers
# "[2,4]<=[4,2]T(1,0)", or axes of a mesh "mesh['i'=4,'j'=2] {'j'}".

_LISTS = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
# The part before "<=" is missing where jax 0.10.2 prints the devices of a mesh: "[4,2]T(1,0)".
_IOTA = re.compile(
    r"(?:\[(?P<shape>[\d,]+)\]<=)?\[(?P<reshape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
_NAME = r"'?([^',={}\[\]:]+)'?"
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>[^)]*(?:\([^)]*\))?)\))?"
    r" \{(?P<group_axes>[^}]*)\}"
)
_MESH_AXIS = re.compile(rf"{_NAME}=(\d+)")
_GROUP_AXIS = re.compile(rf"{_NAME}(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, devices: int) -> _Groups:
    """Return the groups of devices of a collective, or the (source, target) pairs of a permute.

    A collective without groups joins all `devices`. Raises ValueError for an unknown notation.
    """
    match = re.search(r"\b(replica_groups|source_target_pairs)=(.*)", attributes)
    attribute, text = match.groups() if match else ("replica_groups", "{}")
    if lists := _LISTS.match(text):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", lists[1])]
        if not groups and attribute == "replica_groups":
            return [list(range(devices))]
        return groups
    if iota := _IOTA.match(text):
        return _iota(iota).tolist()
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    raise ValueError(f"cannot read which devices a collective joins: {attribute}={text[:60]}")


def axes_of(
    groups: _Groups, meshes: Sequence[_Sizes], *, is_permute: bool = False
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which groups of devices lie, and the size of a group.

    The axes are () if the groups are not along whole axes of a mesh. With `is_permute`, the groups
    are the (source, target) pairs of a permutation.
    """
    for sizes in meshes:
        shape = tuple(sizes.values())
        varies = np.zeros(len(sizes), bool)  # for each axis: do coordinates in a group differ?
        for group in groups:
            coordinates = np.array(np.unravel_index(group, shape))  # [axes, devices in the group]
            varies |= (coordinates != coordinates[:, :1]).any(axis=1)
        axes = tuple(itertools.compress(sizes, varies))
        size = math.prod(sizes[axis] for axis in axes)
        has_whole_groups = all(len(group) == size for group in groups)
        covers_mesh = len(groups) * size == math.prod(shape)
        if axes and (is_permute or (has_whole_groups and covers_mesh)):
            return axes, size
    return (), len(set().union(*groups)) if is_permute else max(map(len, groups))


def _numbers(text: str) -> list[int]:
    """Return the integers in a text such as "0,1,2"."""
    return [int(number) for number in text.split(",") if number]


def _iota(match: re.Match[str]) -> np.ndarray:
    """Return the numbers of "[2,4]<=[4,2]T(1,0)": 0 to 7 as [4, 2], transposed, then as [2, 4]."""
    shape = _numbers(match["reshape"])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if match["order"]:
        numbers = numbers.transpose(_numbers(match["order"]))
    if match["shape"]:
        numbers = numbers.reshape(_numbers(match["shape"]))
    return numbers


def _mesh_groups(match: re.Match[str]) -> _Groups:
    """Return the groups of devices in a match of `_MESH`: "mesh['i'=4,'j'=2] {'j'}".

    Devices in a group differ along the axes in braces only: [0, 1], [2, 3] and so on. Of an axis,
    that may be a part, "{'i':(2)2}": split 'i' of size 4 into (2, 2), and take the second of these.
    """
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match["axes"])}
    positions = np.arange(math.prod(sizes.values()))  # in the mesh
    # For each axis, the coordinate of every device.
    coordinates = dict(zip(sizes, np.unravel_index(positions, tuple(sizes.values())), strict=True))
    inside = []  # coordinates in which the devices of a group differ
    for name, size_before, part_size in _GROUP_AXIS.findall(match["group_axes"]):
        size = int(part_size or sizes[name])
        stride = sizes[name] // (int(size_before or 1) * size)
        part = coordinates[name] // stride % size
        inside.append(part)
        coordinates[name] = coordinates[name] - part * stride  # what is left numbers the groups
    devices = positions
    if text := match["devices"]:
        iota = _IOTA.fullmatch(text)
        devices = _iota(iota).ravel() if iota else np.array(_numbers(text))
    # Sort by group, then by the coordinates inside: lexsort's last key is its first.
    order = np.lexsort([*reversed(inside), *reversed(coordinates.values())])
    group_size = math.prod(int(part.max()) + 1 for part in inside)
    return devices[order].reshape(-1, group_size).tolist()
