"""The collectives, sizes and memory of a compiled program, read from its text.

The compiled program counts, since the compiler merges, splits and moves collectives. Its text names
groups of devices; the mesh axes that they run along are found again.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import numpy as np

_Groups: TypeAlias = Sequence[Sequence[int]]  # of devices
_Sizes: TypeAlias = Mapping[str, int]  # of the axes of a mesh, by name
Runs: TypeAlias = Literal["always", "in a branch", "in a loop of unknown length"]

# What each of `n` devices sends around a ring; `b` are the bytes of the result on one device.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "ragged-all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of a program: same kind, same devices, same size."""

    kind: str  # in HLO: "all-gather"
    axes: tuple[str, ...]  # in mesh order; () if the groups are not those of mesh axes
    size: int  # devices in one group
    count: int  # in one call of the program; loops of known length multiplied out
    result_bytes: int  # of one, on one device
    moved_bytes: float  # by one, from each device, around a ring
    runs: Runs = "always"  # those in a branch, or in a loop of unknown length, count once


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
        return sum(one.count * one.moved_bytes for one in self.collectives)

    @classmethod
    def of(
        cls, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled | None = None
    ) -> "ProgramCost":
        """Return the cost of a lowered program, which is compiled if it is not yet."""
        compiled, stablehlo = compiled or lowered.compile(), lowered.as_text()
        module = Module.parse(compiled.as_text() or "")
        meshes = [
            {name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', axes)}
            for axes in re.findall(r"sdy\.mesh @\S+ = <\[([^\]]*)\]>", stablehlo)
        ]
        memory = compiled.memory_analysis()
        parts = ("argument", "output", "temp", "alias")
        sizes = {f"{p}_bytes": getattr(memory, f"{p}_size_in_bytes", None) for p in parts}
        instructions = itertools.chain(*module.computations.values())
        return cls(
            collectives=module.collectives(meshes),
            stablehlo_bytes=len(stablehlo.encode()),
            constants_bytes=sum(
                sum(array_bytes(i.shape)) for i in instructions if i.opcode == "constant"
            ),
            peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
            **sizes,
        )


# The text of a compiled program: computations, instructions, and which calls which.

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(={]+) (\(.*)?\{\s*$")
# "%name = shape opcode(operands), attributes"; a shape of several results is in parentheses.
_ASSIGNED = re.compile(r"\s+(?:ROOT )?%?[^\s=]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|%?([^\s,}]+))"
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN_PART = re.compile(r"channel_id=(\d+), .*frontend_attributes=\{chain_id=")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    shape: str  # "f32[2,3]{1,0}", or of several results "(f32[2,3]{1,0}, f32[])"
    opcode: str
    attributes: str  # from the operands on


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A compiled program."""

    entry: str  # the computation where it starts
    computations: dict[str, list[Instruction]]
    devices: int

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Return a compiled program; raise ValueError if the text is not one."""
        computations: dict[str, list[Instruction]] = {}
        entry = ""
        current: list[Instruction] = []  # no instruction stands before the first computation
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = computations.setdefault(header["name"], [])
                entry = header["name"] if header["entry"] else entry
            elif assigned := _ASSIGNED.match(line):
                current.append(Instruction(*assigned.groups()))
        if not entry:
            raise ValueError("not the text of a compiled program: it has no ENTRY computation")
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
        return cls(entry, computations, math.prod(map(int, sizes)))

    def executed(
        self, name: str, times: int = 1, runs: Runs = "always"
    ) -> Iterator[tuple[Instruction, int, Runs]]:
        """Yield the instructions of a computation and of what it calls, and how often each runs."""
        for instruction in self.computations.get(name, ()):
            yield instruction, times, runs
            if instruction.opcode in ("async-update", "async-done"):  # it ran at async-start
                continue
            trips = _TRIP_COUNT.search(instruction.attributes)  # if the compiler found out
            for attribute, several, single in _CALLED.findall(instruction.attributes):
                often, inner = 1, runs
                if attribute in _BRANCHES:
                    inner = "in a branch" if runs == "always" else runs
                elif attribute in ("body", "condition") and trips:
                    often = int(trips[1]) + (attribute == "condition")  # once more, to end the loop
                elif attribute in ("body", "condition"):
                    inner = "in a loop of unknown length"
                for callee in re.findall(r"[^\s,%]+", several or single):
                    yield from self.executed(callee, times * often, inner)

    def collectives(self, meshes: Sequence[_Sizes] = ()) -> tuple[Collective, ...]:
        """Return the collectives, equal ones merged, in order, with axes of one of the meshes."""
        meshes = [sizes for sizes in meshes if math.prod(sizes.values()) == self.devices]
        counts: dict[Collective, int] = {}
        started: set[str] = set()
        for instruction, times, runs in self.executed(self.entry):
            # On TPUs, one that runs beside several fusions is in each, with the same number.
            if part := _CHAIN_PART.search(instruction.attributes):
                if part[1] in started:
                    continue
                started.add(part[1])
            if collective := self._collective(instruction, meshes, runs):
                counts[collective] = counts.get(collective, 0) + times
        return tuple(dataclasses.replace(one, count=count) for one, count in counts.items())

    def _collective(
        self, instruction: Instruction, meshes: Sequence[_Sizes], runs: Runs
    ) -> Collective | None:
        """Return the collective that an instruction starts; None if it starts none."""
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _SENT:
            return None
        sizes = array_bytes(instruction.shape)
        # The first half of a split one has operands before results, and perhaps two contexts.
        if kind not in (instruction.opcode, "all-reduce") and instruction.shape.startswith("("):
            sizes = array_bytes(re.sub(r", [us]32\[\]", "", instruction.shape))
            sizes = sizes[len(sizes) // 2 :]
        groups = groups_of(instruction.attributes, self.devices)
        axes, size = axes_of(groups, meshes, is_permute=kind == "collective-permute")
        moved = float(_SENT[kind](sum(sizes), size))
        return Collective(kind, axes, size, 1, sum(sizes), moved, runs)


def array_bytes(shape: str) -> list[int]:
    """Return the bytes of each array in a shape, at any depth of tuples."""
    sizes = []
    for dtype, bits, dims in re.findall(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]", shape):
        count = math.prod(int(size.removeprefix("<=")) for size in dims.split(",") if size)
        sizes.append(math.ceil(count * int(bits or 8 * (dtype == "pred")) / 8))
    return sizes


# The groups of devices that a collective names, and the mesh axes that they run along.

_LISTS = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
# Without a shape, as jax 0.10.2 prints the devices of a mesh: "[4,2]T(1,0)".
_IOTA = re.compile(
    r"(?:\[(?P<shape>[\d,]+)\]<=)?\[(?P<reshape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
_NAME = r"'?([^',={}\[\]:]+)'?"
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>[^)]*(?:\([^)]*\))?)\))?"
    r" \{(?P<joined>[^}]*)\}"
)
_MESH_AXIS = re.compile(rf"{_NAME}=(\d+)")
_JOINED = re.compile(rf"{_NAME}(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, devices: int) -> _Groups:
    """Return the groups of devices that a collective names; by default all are one group.

    Raises:
      ValueError: the groups are written in an unknown form.
    """
    named = re.search(r"\b(replica_groups|source_target_pairs)=(.*)", attributes)
    attribute, text = named.groups() if named else ("replica_groups", "{}")
    if lists := _LISTS.match(text):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", lists[1])]
        return groups if groups or attribute == "source_target_pairs" else [[*range(devices)]]
    if iota := _IOTA.match(text):
        return _iota(iota).tolist()
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    raise ValueError(f"cannot read which devices a collective joins: {attribute}={text[:60]}")


def axes_of(
    groups: _Groups, meshes: Sequence[_Sizes], *, is_permute: bool = False
) -> tuple[tuple[str, ...], int]:
    """Return the axes of a mesh along which the groups run, and the size of a group.

    There are no axes if the groups are not theirs. In a permutation, groups are (source, target).
    """
    for sizes in meshes:
        shape, varies = tuple(sizes.values()), np.zeros(len(sizes), bool)
        for group in groups:
            places = np.array(np.unravel_index(group, shape))  # a row for each axis
            varies |= (places != places[:, :1]).any(axis=1)
        axes = tuple(itertools.compress(sizes, varies))
        size = math.prod(sizes[axis] for axis in axes)
        is_whole = all(len(group) == size for group in groups)
        if axes and (is_permute or (is_whole and len(groups) * size == math.prod(shape))):
            return axes, size
    return (), len(set().union(*groups)) if is_permute else max(map(len, groups))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _iota(match: re.Match[str]) -> np.ndarray:
    """Return "[2,4]<=[4,2]T(1,0)": 0 to 7 as [4, 2], transposed, then as [2, 4]."""
    shape = _numbers(match["reshape"])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if match["order"]:
        numbers = numbers.transpose(_numbers(match["order"]))
    return numbers.reshape(_numbers(match["shape"])) if match["shape"] else numbers


def _mesh_groups(match: re.Match[str]) -> _Groups:
    """Return the groups of "mesh['i'=4,'j'=2] {'j'}", or along a part of an axis, "{'i':(2)2}".

    "(2)2" is the part of size 2 after one of size 2: of a place along an axis of 4, the last bit.
    """
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match["axes"])}
    devices = np.arange(math.prod(sizes.values()))
    others = dict(zip(sizes, np.unravel_index(devices, tuple(sizes.values())), strict=True))
    along = []  # the place of each device in its group, by part
    for name, before, size in _JOINED.findall(match["joined"]):
        size = int(size or sizes[name])
        step = sizes[name] // (int(before or 1) * size)
        along.append(others[name] // step % size)
        others[name] = others[name] - along[-1] * step
    if text := match["devices"]:
        iota = _IOTA.fullmatch(text)
        devices = _iota(iota).ravel() if iota else np.array(_numbers(text))
    order = np.lexsort([*reversed(along), *reversed(others.values())])  # the last sorts first
    size = math.prod(int(places.max()) + 1 for places in along)
    return devices[order].reshape(-1, size).tolist()
