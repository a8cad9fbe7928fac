"""The collectives, sizes and memory of a compiled program.

Read from the compiled program, for the compiler merges, splits and moves collectives: the traced
program only says what was asked for. A collective of the compiled text names groups of devices;
what is reported are the mesh axes that it runs over.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

_Groups: TypeAlias = tuple[tuple[int, ...], ...]
_Sizes: TypeAlias = Mapping[Any, int]  # of the axes of a mesh, by name
_Role: TypeAlias = Literal["body", "condition", "branch", "call"]
Runs: TypeAlias = Literal["always", "in a branch", "in a loop of unknown length"]


# `n` devices take part, and `b` are the bytes of the result on one device.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


def ring_bytes(kind: str, result_bytes: float, size: int) -> float:
    """The bytes that one device sends on a ring, in one call, by the bytes of its result.

    `kind` is one of HLO's: all-gather, all-reduce, all-to-all, collective-permute or
    reduce-scatter; `size` says how many devices take part: those of the axes, or of one group.

    >>> ring_bytes("all-gather", 400, 4), ring_bytes("all-reduce", 100, 4)
    (300.0, 150.0)

    Raises:
      ValueError: another kind.
    """
    if kind not in _SENT:
        raise ValueError(f"no collective of the name {kind!r}; there are {', '.join(_SENT)}")
    return float(_SENT[kind](result_bytes, size))


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
    argument_bytes: int | None = None  # this and the next four: None where the compiler is silent
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None  # of results that take over the memory of arguments
    peak_bytes: int | None = None  # of all of them together; the compiler of CPUs leaves out some
    cycles: int | None = None  # as the compiler of TPUs estimates each instruction; others do not

    @property
    def moved_bytes(self) -> float:
        """From each device, in one call."""
        return sum(each.count * each.moved_bytes for each in self.collectives)

    @classmethod
    def of(
        cls, lowered: jax.stages.Lowered, mesh: Mesh | AbstractMesh | None = None
    ) -> "ProgramCost":
        """Compiles a lowered program, once, and takes its measures.

        `mesh` is that whose axes to name in the collectives; by default those of the program
        itself.
        """
        return cls.of_compiled(lowered.compile(), lowered.as_text(), mesh)

    @classmethod
    def of_compiled(
        cls,
        compiled: jax.stages.Compiled,
        stablehlo: str,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> "ProgramCost":
        """The same of a program that is compiled already; `stablehlo`: its text before."""
        module = _parse(compiled.as_text() or "")
        # The meshes that the program names. Without those that number devices otherwise.
        named = [
            {name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', axes)}
            for axes in re.findall(r"sdy\.mesh @\S+ = <\[([^\]]*)\]>", stablehlo)
        ]
        instructions = itertools.chain(*module.computations.values())
        memory = compiled.memory_analysis()
        return cls(
            collectives=_collectives(module, [mesh.shape] if mesh else named),
            stablehlo_bytes=len(stablehlo.encode()),
            constants_bytes=sum(
                _shape_bytes(i.shape) for i in instructions if i.opcode == "constant"
            ),
            argument_bytes=getattr(memory, "argument_size_in_bytes", None),
            output_bytes=getattr(memory, "output_size_in_bytes", None),
            temp_bytes=getattr(memory, "temp_size_in_bytes", None),
            alias_bytes=getattr(memory, "alias_size_in_bytes", None),
            peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
            cycles=_cycles(module),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    shape: str  # "f32[2,3]{1,0}", or of several results "(f32[2,3]{1,0}, f32[])"
    opcode: str
    attributes: str  # from the operands on; still with the user's names, in quotes

    def calls(self) -> Iterator[tuple[str, _Role]]:
        """The names of the computations that it runs, in order, and what for."""
        if self.opcode in ("async-update", "async-done"):  # ran at the start of the three
            return
        for attribute, several, single in _CALLED.findall(self.unquoted()):
            for callee in re.findall(r"[^\s,%]+", several or single):
                yield callee, _ROLES.get(attribute, "call")

    def unquoted(self) -> str:
        """The attributes without the user's names, which may look like anything."""
        return _QUOTED.sub('""', self.attributes)


@dataclasses.dataclass(frozen=True, slots=True)
class _HloModule:
    """A compiled program."""

    entry: str  # the computation where it starts
    computations: dict[str, tuple[_Instruction, ...]]
    devices: int


def collectives_of(
    compiled_text: str, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Collective, ...]:
    """The collectives of a compiled program, equal ones merged, in program order.

    Args:
      compiled_text: `lowered.compile().as_text()`.
      mesh: whose axes to name; where not given, collectives have no axes.
    """
    return _collectives(_parse(compiled_text), [mesh.shape] if mesh else [])


def _collectives(module: _HloModule, meshes: Sequence[_Sizes]) -> tuple[Collective, ...]:
    fitting = [
        {str(name): size for name, size in sizes.items()}
        for sizes in meshes
        if math.prod(sizes.values()) == module.devices
    ]
    counts: dict[Collective, int] = {}
    begun: set[str] = set()
    for instruction, times, runs in _executed(module, module.entry, 1, "always"):
        # Those of TPUs run beside several fusions, and stand in each of them with the same number.
        if part := _PART_OF_CHAIN.search(instruction.attributes):
            if part[1] in begun:
                continue
            begun.add(part[1])
        each = _collective(instruction, module.devices, fitting, runs)
        if each is not None:
            counts[each] = counts.get(each, 0) + times
    return tuple(dataclasses.replace(each, count=count) for each, count in counts.items())


def _cycles(module: _HloModule) -> int | None:
    """What the compiler estimates for all instructions; None where it does not."""
    estimates = [
        int(found[1]) * times
        for instruction, times, _ in _executed(module, module.entry, 1, "always")
        if (found := _ESTIMATED.search(instruction.attributes))
    ]
    return sum(estimates) if estimates else None


def _executed(
    module: _HloModule, name: str, times: int, runs: Runs
) -> Iterator[tuple[_Instruction, int, Runs]]:
    """The instructions of a computation and of what it calls, and how often each is run."""
    for instruction in module.computations.get(name, ()):
        yield instruction, times, runs
        trips = _TRIP_COUNT.search(instruction.attributes)  # where the compiler found out
        for callee, role in instruction.calls():
            often, inner = 1, runs
            if role == "branch":
                inner = "in a branch" if runs == "always" else runs
            elif role != "call" and trips is None:
                inner = "in a loop of unknown length"
            elif role != "call" and trips is not None:
                # The condition is asked once more, to end the loop.
                often = int(trips[1]) + (role == "condition")
            yield from _executed(module, callee, times * often, inner)


def _collective(
    instruction: _Instruction, devices: int, meshes: Sequence[_Sizes], runs: Runs
) -> Collective | None:
    """With a count of 1; None for other instructions, and for the second half of a split one."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS:
        return None
    shape = instruction.shape
    # The first half of a split one also has its operands, and more; of an all-reduce only results.
    if kind not in (instruction.opcode, "all-reduce") and shape.startswith("("):
        shape = _split(shape[1 : _closing(shape)])[:2][-1]
    result_bytes = _shape_bytes(shape)
    groups, in_pairs = groups_of(instruction.unquoted(), devices), kind == "collective-permute"
    # The axes of the first mesh that has such groups.
    axes, size = (), len({*itertools.chain(*groups)}) if in_pairs else max(map(len, groups))
    for sizes in meshes:
        if axes := (axes_crossed if in_pairs else axes_joined)(groups, sizes):
            size = math.prod(sizes[axis] for axis in axes) if in_pairs else len(groups[0])
            break
    moved = ring_bytes(_KINDS[kind], result_bytes, size)
    return Collective(kind, axes, size, 1, result_bytes, moved, runs)


_KINDS = {  # HLO's kinds, and whose bytes on the ring they have
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-permute",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}


# --- reads the text of a compiled program: computations, instructions, and what calls what
#
# Only what a bill of the communication needs: shapes, opcodes, called computations, trip counts.


def _parse(text: str) -> _HloModule:
    """A compiled program from its text, `lowered.compile().as_text()`.

    Raises:
      ValueError: the text is not that of a compiled program.
    """
    computations: dict[str, list[_Instruction]] = {}
    entry = ""
    current: list[_Instruction] = []  # lines before the first computation: none is an instruction
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif found := _ASSIGNED.match(line):
            rest = line[found.end() :]
            # A shape of several results holds spaces; a single one does not.
            end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
            opcode, _, behind = rest[end:].strip().partition("(")
            current.append(_Instruction(rest[:end], opcode, behind))
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    devices = math.prod(int(number) for number in _DEVICES.findall(text.partition("\n")[0]))
    return _HloModule(entry, {name: tuple(body) for name, body in computations.items()}, devices)


def _shape_bytes(shape: str) -> int:
    """What the results of this shape take on one device, at any depth of tuples."""
    total = 0
    for dtype, sizes in _ARRAY.findall(shape):
        count = math.prod(int(size.removeprefix("<=")) for size in sizes.split(",") if size)
        # Of one element: 32 bits for "f32", 8 for "f8e4m3fn"; none for "token" and "opaque".
        width = re.match(r"[a-z]+(\d+)", dtype)
        bits = 8 if dtype == "pred" else int(width[1]) if width else 0
        total += math.ceil(count * bits / 8)
    return total


def _closing(text: str) -> int:
    """Where the parenthesis closes that opens at the start."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text)


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(={]+) (\(.*)?\{\s*$")
_ASSIGNED = re.compile(r"\s+(?:ROOT )?%?[^\s=]+ = ")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|%?([^\s,}]+))"
)
_ROLES: dict[str, _Role] = {
    "body": "body",
    "condition": "condition",
    "true_computation": "branch",
    "false_computation": "branch",
    "branch_computations": "branch",
}
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PART_OF_CHAIN = re.compile(r"channel_id=(\d+), .*frontend_attributes=\{chain_id=")
_ESTIMATED = re.compile(r'"estimated_cycles":"(\d+)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


# --- the groups of devices that a collective names, and the mesh axes that they run along


def groups_of(attributes: str, devices: int) -> _Groups:
    """The groups of devices that a collective names by its attributes; all are one by default.

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


def axes_joined(groups: _Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which every group runs, in mesh order; () if they are no axes' groups.

    The groups are those of a reduction, a gather or an exchange: the order within each is ignored.
    """
    wanted = {frozenset(group) for group in groups}
    for axes in _choices(sizes, math.prod(sizes.values()), groups):
        if wanted == {frozenset(group) for group in _groups_along(axes, sizes)}:
            return axes
    return ()


def axes_crossed(pairs: _Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which every (source, target) pair runs; () if there are none."""
    for axes in _choices(sizes, math.prod(sizes.values()), pairs):
        group_of = {
            device: place
            for place, group in enumerate(_groups_along(axes, sizes))
            for device in group
        }
        if all(group_of[source] == group_of[target] for source, target in pairs):
            return axes
    return ()


def _choices(sizes: Mapping[str, int], devices: int, groups: _Groups) -> list[tuple[str, ...]]:
    """The sets of axes, the small ones first; none if the groups are not of this mesh."""
    if max(itertools.chain(*groups), default=devices) >= devices:
        return []
    counts = range(1, len(sizes) + 1)
    return [axes for count in counts for axes in itertools.combinations(sizes, count)]


def _groups_along(axes: Sequence[str], sizes: Mapping[str, int]) -> _Groups:
    names = tuple(sizes)
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    return _rows(_last(numbers, [names.index(axis) for axis in axes]))


def _last(numbers: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    """`[groups, devices of a group]`: along the given dimensions, in their order."""
    others = [place for place in range(numbers.ndim) if place not in dimensions]
    size = math.prod(numbers.shape[place] for place in dimensions)
    return numbers.transpose([*others, *dimensions]).reshape(-1, size)


def _rows(numbers: np.ndarray) -> _Groups:
    return tuple(map(tuple, numbers.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _counted(found: re.Match[str]) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)": 0 to 7 as [4, 2], transposed, then as [2, 4] if that is said."""
    start = np.arange(math.prod(_numbers(found["reshape"]))).reshape(_numbers(found["reshape"]))
    moved = start.transpose(_numbers(found["order"])) if found["order"] else start
    return moved.reshape(_numbers(found["shape"])) if found["shape"] else moved


def _along_axes(found: re.Match[str]) -> _Groups:
    """ "mesh['i'=4,'j'=2] {'j'}", also along a part of an axis: "{'i':(2)2}"."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(found["axes"])}
    joined = _JOINED_AXIS.findall(found["joined"])
    # Where parts of an axis begin and end, as products of the sizes before, without its ends.
    cuts: dict[str, set[int]] = {name: set() for name in sizes}
    for name, before, size in joined:
        if before and name in cuts:
            cuts[name] |= {int(before), int(before) * int(size)} - {1}
    edges = {name: [1, *sorted(cuts[name]), size] for name, size in sizes.items()}
    shape: list[int] = []
    starts: dict[str, int] = {}  # of each axis, among the dimensions of `shape`
    for name in sizes:
        starts[name] = len(shape)
        shape += [after // before for before, after in itertools.pairwise(edges[name])]
    dimensions = [starts[name] + edges[name].index(int(before or 1)) for name, before, _ in joined]
    text, numbers = found["devices"], np.arange(math.prod(sizes.values()))
    if text:
        counted = re.fullmatch(_COUNTED, text) or re.fullmatch(_TRANSPOSED, text)
        listed = re.sub(r"[\[\]]", "", text)
        numbers = _counted(counted) if counted else np.array(_numbers(listed))
    return _rows(_last(numbers.reshape(shape), dimensions))


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
