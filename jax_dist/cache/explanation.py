"""From what differs between two compilations of one program to the causes, by name.

A setting beside the program shows one cause if it differs. Inside the program, the operations of
both are matched, and each difference of a pair has one cause. What has none is unknown: a missing
rule is no reason to guess.
"""

import dataclasses
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TypeVar

from jax_dist.cache.causes import NAMES, UNKNOWN, CauseFinding, finding
from jax_dist.cache.records import CONSTANT, Compile, Operation
from jax_dist.errors import shown

_T = TypeVar("_T")


def explained(one: Compile, other: Compile) -> tuple[CauseFinding, ...]:
    """Why the keys of one program differ in two runs."""
    found = {
        "xla-flags": _only_in_one(one.flags, other.flags),
        "cache-directory": _told_apart(one.directory, other.directory),
        "compiler-options": _only_in_one(one.options, other.options),
    }
    if sorted(one.devices) == sorted(other.devices):
        found["device-order"] = _told_apart(*(str(list(each.devices)) for each in (one, other)))
    found |= _inside(one, other, moved=bool(found.get("device-order")))
    return tuple(finding(name, *found[name]) for name in NAMES if found.get(name)) or (
        finding(UNKNOWN),
    )


def _told_apart(before: str, after: str) -> list[str]:
    return [] if before == after else [f"{_cut(before)}, then {_cut(after)}"]


def _only_in_one(ones: Sequence[str], others: Sequence[str]) -> list[str]:
    first = [f"{each} only in the first" for each in ones if each not in others]
    return first + [f"{each} only in the second" for each in others if each not in ones]


# --- inside the program


_NAMES = ("sym_name", "callee")  # of functions
_NAME_OF_RESULT = "jax.result_info"
_PARTITIONING = '"CustomSPMDPartitioning"'
_LISTS_OF_DEVICES = ("mhlo.sharding", "replica_groups", "source_target_pairs")
_LISTS = re.compile(
    r"^(mesh|replica_groups|source_target_pairs|\w*_shardings|manual_axes)$|sharding"
)
_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r'"[^"]*"')
_AXIS = re.compile(r'("[^"]*")=(\d+)')
_DEVICE_IDS = re.compile(r"device_ids=\[[^\]]*\]")
_ARRAY = re.compile(r"tensor<\d")  # a scalar has its type there


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """One difference of two operations. The text of what one lacks is ""."""

    operation: Operation  # of the first program
    what: str  # the attribute, or "operands"
    before: str
    after: str

    @property
    def moves_devices(self) -> bool:
        ids = [_DEVICE_IDS.findall(text) for text in (self.before, self.after)]
        return self.what == "mesh" and ids[0] != ids[1]

    def __str__(self) -> str:
        kind, before, after = self.operation.kind, self.before, self.after
        label = f"{kind} {self.what}: "
        if kind == CONSTANT and self.what == "value":
            label, before, after = f"{before.split()[0]}: ", _numbers(before), _numbers(after)
        elif self.what in _NAMES:
            label, before, after = "", before.strip('@"'), after.strip('@"')
        return _told(self.operation, f"{label}{_cut(before)}, then {_cut(after)}")


def _told(operation: Operation, text: str) -> str:
    file, _, number = operation.line.rpartition(":")
    return f"{shown(file)}:{number}: {text}" if file else text


def _numbers(value: str) -> str:
    """The first numbers; else, as for bfloat16, the hash."""
    return value.split(" = ")[-1] if " = " in value else value.split()[-1][:8]


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _inside(one: Compile, other: Compile, *, moved: bool) -> dict[str, list[str]]:
    """What differs in two programs, by cause. `moved`: their devices stand in another order."""
    inputs = [signature(each.operations).split(" -> ")[0] for each in (one, other)]
    if inputs[0] != inputs[1] and all(inputs):  # they go through the whole program
        return {"shapes": [f"{inputs[0]}, then {inputs[1]}"]}
    names = {*map(_name, one.operations)} & {*map(_name, other.operations)} - {""}
    ones, others = (_comparable(each.operations, names) for each in (one, other))
    pairs = matched(
        ones,
        others,
        lambda each: (each.kind, *each.attributes.items()),
        lambda each: (each.kind, each.attributes["types"]),
        lambda each: each.kind,
    )
    both = [(mine, its) for mine, its in pairs if mine is not None and its is not None]
    found: dict[str, list[str]] = defaultdict(list)
    if len(both) == len(pairs):
        # A pair counts as one operation here; what differs in it is told below.
        attributes = {id(its): mine.attributes for mine, its in both}
        same = [dataclasses.replace(each, attributes=attributes[id(each)]) for each in others]
        cause, found_elsewhere = _reordered(ones, same)
        found[cause] += found_elsewhere
    else:
        found[UNKNOWN] += [_alone(*pair) for pair in pairs if None in pair]
        # Of a program that is built otherwise, the numbers say nothing; its name does.
        both = [pair for pair in both if pair[0].kind == "builtin.module"]
    for change, cause in _causes([each for pair in both for each in _changes(*pair)], moved=moved):
        found[cause].append(str(change))
    return {cause: details for cause, details in found.items() if details}


def _causes(changes: Sequence[_Change], *, moved: bool) -> Iterator[tuple[object, str]]:
    """What is said of each change, and its cause: the first that fits."""
    moved = moved or any(change.moves_devices for change in changes)
    axes = _renamed_axes(changes)
    results = [change for change in changes if change.what.endswith(_NAME_OF_RESULT)]
    shuffled = Counter(c.before for c in results) == Counter(c.after for c in results)
    for change in changes:
        operation, what = change.operation, change.what
        before, after = change.before, change.after
        target = operation.attributes.get("call_target_name")
        if what == "backend_config" and target == _PARTITIONING:
            yield change, "custom-partitioning"
        elif change.moves_devices or (moved and what.endswith(_LISTS_OF_DEVICES)):
            yield change, "device-order"
        elif _LISTS.search(what) and _is_shuffled(before, after):
            yield change, "order"
        elif axes and _QUOTED.sub(lambda name: axes.get(name[0], name[0]), before) == after:
            # By the names alone: they are in all shardings.
            made_up = any("<axis 0x" in name for name in axes)
            told = ", ".join(f"{old}, then {new}" for old, new in axes.items())
            yield told, "unnamed-pmap" if made_up else "axis-name"
        elif what in _NAMES:
            yield change, "function-name"
        elif what.endswith(_NAME_OF_RESULT):
            yield change, "order" if shuffled else "result-name"
        elif operation.kind == CONSTANT and before.split()[0] == after.split()[0]:  # the same type
            yield change, "captured-array" if _ARRAY.match(before) else "traced-value"
        else:
            yield change, UNKNOWN


def _is_shuffled(before: str, after: str) -> bool:
    """The same words in the same frame: not `[{"i"}, {}]` for `[{}, {"i"}]`."""
    same_words = sorted(_WORD.findall(before)) == sorted(_WORD.findall(after))
    return same_words and _WORD.sub("", before) == _WORD.sub("", after)


def _renamed_axes(changes: Sequence[_Change]) -> dict[str, str]:
    """The axes of meshes of one shape that have another name in the second program."""
    renamed = {}
    for change in changes:
        before, after = (_AXIS.findall(text) for text in (change.before, change.after))
        if change.what == "mesh" and [size for _, size in before] == [size for _, size in after]:
            renamed |= {one: other for (one, _), (other, _) in zip(before, after, strict=True)}
    return {one: other for one, other in renamed.items() if one != other}


def _name(operation: Operation) -> str:
    """That of the function which it is or calls; else ""."""
    own = operation.attributes
    return (own.get("sym_name") or own.get("callee") or "").strip('@"')


def _comparable(operations: Sequence[Operation], names: Collection[str]) -> list[Operation]:
    """The operations of a program; those in `names` are the functions that both programs have.

    Such a name is no attribute, for functions of one name are numbered as they are met: it is what
    the function makes, and what a call reads.
    """
    readers: dict[object, str] = {}
    for each in operations:
        for value in each.operands if each.line else ():
            readers.setdefault(value, each.line)
    found = []
    for each in operations:
        if each.kind == CONSTANT:  # of which JAX says only where the jitted function was called
            line = readers.get(each.results[0], each.line)
            each = dataclasses.replace(each, line=line)
        elif (name := _name(each)) in names:
            rest = {what: text for what, text in each.attributes.items() if what not in _NAMES}
            if "callee" in each.attributes:
                each = dataclasses.replace(each, operands=(*each.operands, name), attributes=rest)
            else:
                each = dataclasses.replace(each, results=(name,), attributes=rest)
        found.append(each)
    return found


def _alone(mine: Operation | None, its: Operation | None) -> str:
    only = mine or its
    assert only is not None
    text = f"{only.kind} {only.attributes['types']}".strip()
    return _told(only, f"{text}, then nothing" if its is None else f"nothing, then {text}")


def _changes(mine: Operation, its: Operation) -> Iterator[_Change]:
    for what in dict.fromkeys((*mine.attributes, *its.attributes)):
        before, after = (each.attributes.get(what, "") for each in (mine, its))
        if before != after:
            yield _Change(mine, what, before, after)


def _reordered(ones: Sequence[Operation], others: Sequence[Operation]) -> tuple[str, list[str]]:
    """What stands elsewhere or is read elsewhere, in two programs of the same operations.

    It is not the order if a value is read more often in one of them: then the cause is unknown.
    """
    found = []
    for mine, its in zip(ones, others, strict=True):
        if mine.kind != its.kind:
            found.append(_told(mine, f"{mine.kind}, then {its.kind}"))
            continue
        found += map(str, _changes(mine, its))
        if mine.operands != its.operands:
            before, after = (" ".join(map(str, each.operands)) for each in (mine, its))
            found.append(str(_Change(mine, "operands", before, after)))
    return "order" if _readers(ones) == _readers(others) else UNKNOWN, found


def _readers(operations: Sequence[Operation]) -> Counter[tuple[Hashable, int]]:
    """How often each result is read, and each function called; arguments count together."""
    made: dict[object, list[Hashable]] = defaultdict(list)  # a function: all that is in it
    function: tuple[object, ...] = ()
    for each in operations:
        if each.kind == "func.func":
            function = each.results
        for value in (*function, *each.results):
            made[value].append(content(each))
    times = Counter(value for each in operations for value in each.operands)
    return Counter((tuple(made[value]), count) for value, count in times.items())


def content(operation: Operation) -> Hashable:
    """All of an operation but its operands, its line, and names of functions."""
    pairs = operation.attributes.items()
    return operation.kind, *(pair for pair in pairs if pair[0] not in _NAMES)


def signature(operations: Sequence[Operation]) -> str:
    """What the program takes and gives: "(tensor<3xf32>) -> tensor<f32>"."""
    for operation in operations:
        if operation.attributes.get("sym_name") == '"main"':
            return operation.attributes.get("function_type", "")
    return ""


# --- which of some things is which of some others


def matched(
    ones: Sequence[_T], others: Sequence[_T], *identities: Callable[[_T], Hashable]
) -> list[tuple[_T | None, _T | None]]:
    """Pairs of things with the same identity, the strictest first; None where there is no other."""
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for identity in identities:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for number, other in enumerate(others):
            if number not in taken:
                waiting[identity(other)].append(number)
        for number, one in enumerate(ones):
            if number not in partner and (found := waiting.get(identity(one))):
                partner[number] = found.popleft()
                taken.add(partner[number])
    return [
        *((one, others[partner[n]] if n in partner else None) for n, one in enumerate(ones)),
        *((None, other) for n, other in enumerate(others) if n not in taken),
    ]
