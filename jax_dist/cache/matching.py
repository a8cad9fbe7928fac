"""Which program of one run is which of another, and where two differ, operation by operation."""

import collections
import dataclasses
import difflib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

from jax_dist.cache.records import (
    CONSTANT,
    Compile,
    Operation,
    line_of,
)
from jax_dist.errors import shown

_MOST = 2000  # operations between the first and the last difference that are aligned

_Build: TypeAlias = tuple[str, tuple[tuple[str, str], ...], str]
_Reads: TypeAlias = collections.Counter[tuple[_Build | None, int]]

NAMES_OF_FUNCTIONS = ("sym_name", "callee")


@dataclasses.dataclass(frozen=True, slots=True)
class OperationChange:
    """One difference. The text of what one program lacks is ""."""

    kind: str  # of the operation
    what: str  # the attribute; or "types", "operands", "operation"
    before: str
    after: str
    line: str  # of the user, in the first program if it has the operation
    operations: tuple[Operation | None, Operation | None]

    @property
    def place(self) -> str:
        """The line, as one would write it here."""
        file, _, number = self.line.rpartition(":")
        return f"{shown(file)}:{number}" if file else ""

    def __str__(self) -> str:
        place = f"{self.place}: " if self.line else ""
        if self.what == "operation":
            return f"{place}{self.before or 'nothing'}, then {self.after or 'nothing'}"
        if self.kind == CONSTANT and self.what == "value":
            type_ = self.before.split()[0]
            return f"{place}{type_}: {_numbers_of(self.before)}, then {_numbers_of(self.after)}"
        return f"{place}{self.kind} {self.what}: {_cut(self.before)}, then {_cut(self.after)}"


def _numbers_of(value: str) -> str:
    """The first numbers; else, as for bfloat16, the hash."""
    return value.split(" = ")[-1] if " = " in value else value.split()[-1][:8]


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def changes(ones: Sequence[Operation], others: Sequence[Operation]) -> tuple[OperationChange, ...]:
    """All differences, in the order of the programs."""
    if [one.kind for one in ones] == [other.kind for other in others]:
        return tuple(
            change
            for number, (one, other) in enumerate(zip(ones, others, strict=True))
            if one is not other
            for change in _in_place(ones, number, one, other)
        )
    return tuple(_aligned(ones, others))


def _in_place(
    ones: Sequence[Operation], number: int, one: Operation, other: Operation
) -> Iterator[OperationChange]:
    attributes, other_attributes = dict(one.attributes), dict(other.attributes)
    texts = {
        name: (attributes.get(name, ""), other_attributes.get(name, ""))
        for name in dict.fromkeys((*attributes, *other_attributes))
    }
    texts["types"] = one.types, other.types
    texts["operands"] = _numbers(one), _numbers(other)
    for name, (before, after) in texts.items():
        if before != after:
            yield OperationChange(
                one.kind, name, before, after, line_of(ones, number), (one, other)
            )


def _numbers(operation: Operation) -> str:
    return " ".join(map(str, operation.operands))


def _aligned(ones: Sequence[Operation], others: Sequence[Operation]) -> Iterator[OperationChange]:
    """What has to be taken out of the first program, and put in, to make the second."""
    builds, other_builds = list(map(build, ones)), list(map(build, others))
    first = next(
        (i for i, pair in enumerate(zip(builds, other_builds, strict=False)) if pair[0] != pair[1]),
        min(len(ones), len(others)),
    )
    matcher = difflib.SequenceMatcher(
        None,
        builds[first : first + _MOST],
        other_builds[first : first + _MOST],
        autojunk=False,
    )
    for tag, start, stop, other_start, other_stop in matcher.get_opcodes():
        if tag == "equal":
            continue
        for number in range(first + start, first + stop):
            one = ones[number]
            text = f"{one.kind} {one.types}".strip()
            yield OperationChange(
                one.kind, "operation", text, "", line_of(ones, number), (one, None)
            )
        for number in range(first + other_start, first + other_stop):
            other = others[number]
            text = f"{other.kind} {other.types}".strip()
            line = line_of(others, number)
            yield OperationChange(other.kind, "operation", "", text, line, (None, other))


def build(operation: Operation) -> _Build:
    """All of an operation but its operands, its line, and the names of functions.

    Functions of one name are numbered in the order in which they are met.
    """
    named = NAMES_OF_FUNCTIONS
    attributes = tuple(pair for pair in operation.attributes if pair[0] not in named)
    return operation.kind, attributes, operation.types


def is_reordered(ones: Sequence[Operation], others: Sequence[Operation]) -> bool:
    """Whether both have the same operations, and read the same values as often.

    The numbers of constants may differ: that is another matter, told by `other_values`.
    """
    same = collections.Counter(map(_blank, ones)) == collections.Counter(map(_blank, others))
    return same and _read_as_often(ones) == _read_as_often(others)


def _blank(operation: Operation) -> _Build:
    kind, attributes, types = build(operation)
    return kind, () if kind == CONSTANT else attributes, types


def _read_as_often(operations: Sequence[Operation]) -> _Reads:
    """How often the result of each operation is read; of all arguments together."""
    producers = {number: _blank(each) for each in operations for number in each.results}
    counts = collections.Counter(number for each in operations for number in each.operands)
    return collections.Counter((producers.get(number), times) for number, times in counts.items())


def other_values(
    ones: Sequence[Operation], others: Sequence[Operation]
) -> tuple[OperationChange, ...]:
    """Constants of one program that the other has not, each with one of the same type there.

    Wherever they stand: a reordered program has its constants elsewhere.
    """
    before, after = _constants(ones), _constants(others)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    waiting = collections.defaultdict(collections.deque)
    for text in after:  # in the order of the program, as all that follows
        if text in new:
            waiting[text.split()[0]].append(text)
    found = []
    for text, number in before.items():
        if text in gone and waiting[text.split()[0]]:
            other = waiting[text.split()[0]].popleft()
            pair = ones[number], others[after[other]]
            found.append(
                OperationChange(CONSTANT, "value", text, other, line_of(ones, number), pair)
            )
    return tuple(found)


def _constants(operations: Sequence[Operation]) -> dict[str, int]:
    return {
        operation.attribute("value") or "": number
        for number, operation in enumerate(operations)
        if operation.kind == CONSTANT
    }


# --- which program of one run is which of another: by key, else by name and shapes, else by build


Pair: TypeAlias = tuple[Compile | None, Compile | None]


def matched(ones: Sequence[Compile], others: Sequence[Compile]) -> tuple[Pair, ...]:
    """Each program of both runs once, in the order of the first; None: the other lacks it."""
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for identity in _IDENTITIES:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for number, other in enumerate(others):
            if number not in taken:
                waiting[identity(other)].append(number)
        for number, one in enumerate(ones):
            if number not in partner and waiting[identity(one)]:
                partner[number] = waiting[identity(one)].popleft()
                taken.add(partner[number])
    pairs: list[Pair] = [
        (one, others[partner[number]] if number in partner else None)
        for number, one in enumerate(ones)
    ]
    pairs += [(None, other) for number, other in enumerate(others) if number not in taken]
    return tuple(pairs)


def _by_key(compiled: Compile) -> Hashable:
    return compiled.process, compiled.key.name


def _by_name_and_shapes(compiled: Compile) -> Hashable:
    return compiled.process, compiled.key.function, signature(compiled.operations)


def _by_name(compiled: Compile) -> Hashable:
    return compiled.process, compiled.key.function


def _by_made_up_name(compiled: Compile) -> Hashable:
    """As "step_0x7f31" and "step_0x7f9c", which no two processes share."""
    stem = _MADE_UP.sub("#", compiled.key.function)
    return compiled.process, stem, signature(compiled.operations)


def _by_build(compiled: Compile) -> Hashable:
    """The same in all but names; a function of the same shape alone may be another one."""
    return compiled.process, tuple(map(build, compiled.operations))


_MADE_UP = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+")
_IDENTITIES: tuple[Callable[[Compile], Hashable], ...] = (
    _by_key,
    _by_name_and_shapes,
    _by_made_up_name,
    _by_build,
    _by_name,
)


def signature(operations: Sequence[Operation]) -> str:
    """What the program takes and gives: "(tensor<3xf32>) -> tensor<f32>"."""
    for operation in operations:
        if operation.kind == "func.func" and operation.attribute("sym_name") == '"main"':
            return operation.attribute("function_type") or ""
    return ""
