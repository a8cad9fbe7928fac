"""Reads the text of a compiled program: its computations, their instructions, and what calls what.

Only what a bill of the communication needs: shapes, opcodes, called computations, trip counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["body", "condition", "branch", "call"]


@dataclasses.dataclass(frozen=True, slots=True)
class HloCall:
    """A computation that an instruction runs."""

    callee: str
    role: Role


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    shape: str  # "f32[2,3]{1,0}", or of several results "(f32[2,3]{1,0}, f32[])"
    opcode: str
    attributes: str  # from the operands on; still with the user's names, in quotes

    def calls(self) -> Iterator[HloCall]:
        """The computations that it runs, in order."""
        if self.opcode in ("async-update", "async-done"):  # ran at the start of the three
            return
        for attribute, several, single in _CALLED.findall(self.unquoted()):
            for callee in re.findall(r"[^\s,%]+", several or single):
                yield HloCall(callee, _ROLES.get(attribute, "call"))

    def unquoted(self) -> str:
        """The attributes without the user's names, which may look like anything."""
        return _QUOTED.sub('""', self.attributes)

    def trip_count(self) -> int | None:
        """How often a while runs its body, where the compiler found out."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class HloModule:
    """A compiled program."""

    entry: str  # the computation where it starts
    computations: dict[str, tuple[Instruction, ...]]
    devices: int


def parse(text: str) -> HloModule:
    """A compiled program from its text, `lowered.compile().as_text()`.

    Raises:
      ValueError: the text is not that of a compiled program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current: list[Instruction] = []  # lines before the first computation: none is an instruction
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif instruction := _instruction(line):
            current.append(instruction)
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    devices = math.prod(int(number) for number in _DEVICES.findall(text.partition("\n")[0]))
    return HloModule(entry, {name: tuple(body) for name, body in computations.items()}, devices)


def elements(shape: str) -> tuple[str, ...]:
    """The shapes of a tuple shape; of any other, itself."""
    if not shape.startswith("("):
        return (shape,)
    return tuple(part.strip() for part in _split(shape[1 : _closing(shape)]))


def shape_bytes(shape: str) -> int:
    """What the results of this shape take on one device, at any depth of tuples."""
    return sum(_array_bytes(dtype, sizes) for dtype, sizes in _ARRAY.findall(shape))


def _instruction(line: str) -> Instruction | None:
    found = _ASSIGNED.match(line)
    if found is None:
        return None
    rest = line[found.end() :]
    # A shape of several results holds spaces; a single one does not.
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    opcode, _, behind = rest[end:].strip().partition("(")
    return Instruction(rest[:end], opcode, behind)


def _closing(text: str) -> int:
    """Where the parenthesis closes that opens at the start."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text)


def _split(text: str) -> Sequence[str]:
    """At the commas that stand in no bracket."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _array_bytes(dtype: str, sizes: str) -> int:
    count = math.prod(int(size.removeprefix("<=")) for size in sizes.split(",") if size)
    return math.ceil(count * _bits(dtype) / 8)


def _bits(dtype: str) -> int:
    """Of one element: 32 for "f32", 8 for "f8e4m3fn"; 0 for what holds no data."""
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0  # "token", "opaque"


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(={]+) (\(.*)?\{\s*$")
_ASSIGNED = re.compile(r"\s+(?:ROOT )?%?[^\s=]+ = ")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|%?([^\s,}]+))"
)
_ROLES: dict[str, Role] = {
    "body": "body",
    "condition": "condition",
    "true_computation": "branch",
    "false_computation": "branch",
    "branch_computations": "branch",
}
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
