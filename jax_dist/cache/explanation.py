"""From what differs between two compilations of one program to the cause, by name.

A case is two compilations, and what of their difference is not explained yet. Each rule takes the
differences that it can explain, the most telling rules first. What no rule takes is unknown: a
missing rule is no reason to guess.
"""

import dataclasses
import difflib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jax_dist.cache.causes import UNKNOWN, CauseFinding, finding
from jax_dist.cache.records import (
    ALL_DEVICES,
    COMPILER_OPTION,
    CONSTANT,
    DEBUG_OPTION,
    DEVICES,
    DIRECTORY_OPTIONS,
    FLAGS,
    METADATA,
    PROCESSES,
    Compile,
    Operation,
)
from jax_dist.errors import shown

_MOST_DETAILS = 3
_MOST = 2000  # operations between the first and the last difference that are aligned
_PROGRAM = "computation"  # the component of the key
_NAMES_OF_FUNCTIONS = ("sym_name", "callee")

_Build: TypeAlias = tuple[str, tuple[tuple[str, str], ...], str]


@dataclasses.dataclass(frozen=True, slots=True)
class _OperationChange:
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


@dataclasses.dataclass(slots=True)
class _Case:
    """Two compilations, and what no rule has explained yet."""

    one: Compile
    other: Compile
    components: list[str]
    changes: list[_OperationChange]
    settings: dict[str, tuple[str, str]]  # those that differ
    is_read: bool  # there were changes; if there are none, we cannot see what differs

    def explain(self, *components: str) -> None:
        """Takes components away that a rule has explained."""
        self.components = [name for name in self.components if name not in components]

    def explain_all(self, *, besides: tuple[str, ...] = ()) -> None:
        """Takes all away: one cause explains whatever else differs."""
        self.components = [name for name in self.components if name in besides]
        self.changes = []

    def take(self, wanted: Callable[[_OperationChange], bool]) -> list[_OperationChange]:
        """Takes the changes away that a rule explains."""
        taken = [change for change in self.changes if wanted(change)]
        self.changes = [change for change in self.changes if not wanted(change)]
        return taken

    def take_exchanged(self, wanted: Callable[[_OperationChange], bool]) -> list[_OperationChange]:
        """The same, if all their texts are in both programs."""
        found = list(filter(wanted, self.changes))
        same = Counter(each.before for each in found) == Counter(each.after for each in found)
        return self.take(wanted) if same else []

    def explain_options(self) -> None:
        """Takes the options away once all of them are explained."""
        kinds = (DEBUG_OPTION, COMPILER_OPTION)
        if DEVICES not in self.settings and not any(n.startswith(kinds) for n in self.settings):
            self.explain("compile_options")


def explained(one: Compile, other: Compile) -> tuple[CauseFinding, ...]:
    """Why the keys of one program differ in two runs; nothing if they do not."""
    components = list(one.key.differing(other.key))
    if not components:
        return ()
    seen = _changes(one.operations, other.operations) if _PROGRAM in components else ()
    names = dict.fromkeys((*one.settings, *other.settings))
    texts = {name: (one.settings.get(name, ""), other.settings.get(name, "")) for name in names}
    settings = {name: pair for name, pair in texts.items() if pair[0] != pair[1]}
    case = _Case(one, other, components, list(seen), settings, is_read=bool(seen))
    return tuple(found for rule in _RULES for found in rule(case))


def _told(
    name: str, taken: Sequence[_OperationChange], *, texts: bool = True
) -> Iterator[CauseFinding]:
    if not taken:
        return
    details = dict.fromkeys(str(change) if texts else change.place for change in taken)
    more = len(details) - _MOST_DETAILS
    yield finding(name, *list(details)[:_MOST_DETAILS], *([f"and {more} more"] if more > 0 else []))


# --- causes that stand beside the program: versions, devices, flags, options of the compiler


def _versions(case: _Case) -> Iterator[CauseFinding]:
    """First: another jax makes other programs of the same functions."""
    pairs = {name: case.settings.get(name) for name in ("jax", "jaxlib", "backend version")}
    details = [f"{name}: {pair[0]}, then {pair[1]}" for name, pair in pairs.items() if pair]
    if details:
        yield finding("versions", *details)
        case.explain_all()


def _device_count(case: _Case) -> Iterator[CauseFinding]:
    """It changes shapes, meshes, options, and numbers such as those that a mean divides by."""
    for name in (ALL_DEVICES, DEVICES, PROCESSES):
        before, after = case.settings.get(name) or ("", "")
        if name == DEVICES:  # these are listed
            before, after = str(len(before.split())), str(len(after.split()))
        if before != after:
            yield finding("device-count", f"{name}: {before}, then {after}")
            case.explain_all(besides=("XLA flags",))
            return


def _xla_flags(case: _Case) -> Iterator[CauseFinding]:
    pair = case.settings.get(FLAGS)
    if "XLA flags" not in case.components or pair is None:
        return
    before, after = (Counter(text.split()) for text in pair)
    gone, new = sorted((before - after).elements()), sorted((after - before).elements())
    yield finding(
        "xla-flags",
        *(f"{flag} only in the first" for flag in gone),
        *(f"{flag} only in the second" for flag in new),
    )
    case.explain("XLA flags")
    for flag in (*gone, *new):  # JAX also parses those that it knows into its options
        case.settings.pop(DEBUG_OPTION + flag.lstrip("-").split("=")[0], None)
    case.explain_options()


def _directory(case: _Case) -> Iterator[CauseFinding]:
    names = [DEBUG_OPTION + name for name in DIRECTORY_OPTIONS]
    pairs = [case.settings.pop(name) for name in names if name in case.settings]
    if "compile_options" in case.components and pairs:
        yield finding("cache-directory", f"{pairs[0][0]}, then {pairs[0][1]}")
        case.explain_options()


def _compiler_options(case: _Case) -> Iterator[CauseFinding]:
    names = [name for name in case.settings if name.startswith((COMPILER_OPTION, DEBUG_OPTION))]
    if "compile_options" not in case.components or not names:
        return
    details = [
        f"{name.split()[-1]}: {before or 'not set'}, then {after or 'not set'}"
        for name, (before, after) in ((name, case.settings.pop(name)) for name in names)
    ]
    yield finding("compiler-options", *details[:_MOST_DETAILS])
    case.explain_options()


def _device_order(case: _Case) -> Iterator[CauseFinding]:
    pair = case.settings.get(DEVICES)
    meshes = case.take(lambda change: _is_mesh(change) and len(set(_device_ids(change))) == 2)
    if pair is not None and sorted(pair[0].split()) == sorted(pair[1].split()):
        details = [f"{pair[0]}, then {pair[1]}"]
        case.explain("compile_options", "accelerator_config")
    elif meshes:
        details = [", then ".join(text or "in order" for text in _device_ids(meshes[0]))]
    else:
        return
    lists = ("mhlo.sharding", "replica_groups", "source_target_pairs")
    case.take(lambda change: change.what.endswith(lists))
    if _PROGRAM in case.components and not case.changes:
        case.explain(_PROGRAM)
    yield finding("device-order", *details)


def _others(case: _Case) -> Iterator[CauseFinding]:
    """Components that are one thing each."""
    for component, name, setting in (
        ("compression", "compression", "compression"),
        ("custom_hook", "custom-hook", ""),
        ("accelerator_config", "hardware", "kinds of devices"),
    ):
        if component in case.components:
            pair = case.settings.get(setting)
            yield finding(name, *([f"{pair[0]}, then {pair[1]}"] if pair else []))
            case.explain(component)


_IDS = re.compile(r"device_ids=\[([^\]]*)\]")


def _device_ids(change: _OperationChange) -> tuple[str, str]:
    before, after = (_IDS.search(text) for text in (change.before, change.after))
    return before[1] if before else "", after[1] if after else ""


def _is_mesh(change: _OperationChange) -> bool:
    return change.kind == "sdy.mesh" and change.what == "mesh"


# --- causes inside the program: values, names, orders, addresses


def _custom_partitioning(case: _Case) -> Iterator[CauseFinding]:
    def is_pointer(change: _OperationChange) -> bool:
        operation = change.operations[0]
        if operation is None or change.what != "backend_config":
            return False
        return operation.attribute("call_target_name") == '"CustomSPMDPartitioning"'

    yield from _told("custom-partitioning", case.take(is_pointer), texts=False)


def _shapes(case: _Case) -> Iterator[CauseFinding]:
    """They go through the whole program, also as numbers."""
    before, after = (signature(each.operations).split(" -> ")[0] for each in (case.one, case.other))
    if _PROGRAM in case.components and before != after:
        yield finding("shapes", f"{before}, then {after}")
        case.changes = []
        case.explain(_PROGRAM)


def _reordered(case: _Case) -> Iterator[CauseFinding]:
    """All of the program, or the operations that differ, stand there in another order."""

    def is_shuffled(change: _OperationChange) -> bool:
        """The same words in the same frame: not `[{"i"}, {}]` for `[{}, {"i"}]`."""
        if not _LISTS.search(change.what):
            return False
        texts = change.before, change.after
        words = {tuple(sorted(_WORD.findall(text))) for text in texts}
        frames = {_WORD.sub("#", text) for text in texts}
        return len(words) == len(frames) == 1

    taken = case.take(is_shuffled)
    taken += case.take_exchanged(_is_result_name)
    if _is_reordered(case.one.operations, case.other.operations):
        taken += _exchanged(case)
    yield from _told("order", taken)


def _exchanged(case: _Case) -> list[_OperationChange]:
    """Operations that stand elsewhere in the other program, and those that read them.

    Operations that changed in the same way wherever they stand are none: a constant with numbers
    that the other program has not, a function with another name.
    """
    if any(change.what == "operation" for change in case.changes):
        return case.take(lambda _: True)
    mine, theirs = (
        {build(each) for each in compiled.operations} for compiled in (case.one, case.other)
    )

    def has_moved(change: _OperationChange) -> bool:
        one, other = change.operations
        assert one is not None
        assert other is not None
        if _is_function_name(change) or build(one) == build(other):
            return False
        return build(one) in theirs or build(other) in mine

    moved = case.take(has_moved)
    if moved or all(
        # Other rules explain the names of functions and constants, without an order.
        change.what == "operands" or change.kind == CONSTANT or _is_function_name(change)
        for change in case.changes
    ):
        moved += case.take(lambda change: change.what == "operands")
    return moved + case.take_exchanged(_is_function_name)


_LISTS = re.compile(
    r"^(mesh|replica_groups|source_target_pairs|\w*_shardings|manual_axes)$|sharding"
)
_WORD = re.compile(r"\w+")


def _axis_names(case: _Case) -> Iterator[CauseFinding]:
    """A name that differs is followed into all shardings that use it."""
    names = []
    for change in filter(_is_mesh, case.changes):
        before, after = (_AXIS.findall(text) for text in (change.before, change.after))
        if [size for _, size in before] == [size for _, size in after]:
            pairs = zip(before, after, strict=True)
            names += [(one, other) for (one, _), (other, _) in pairs if one != other]
    if not names:
        return

    def is_renamed(change: _OperationChange) -> bool:
        text = change.before
        for before, after in names:
            text = text.replace(before, after)
        return text == change.after

    taken = case.take(is_renamed)
    cause = "unnamed-pmap" if _NAMED_BY_ADDRESS.search(names[0][0]) else "axis-name"
    if taken:
        yield finding(cause, f"{names[0][0]}, then {names[0][1]}")


_AXIS = re.compile(r'("[^"]*")=(\d+)')
_NAMED_BY_ADDRESS = re.compile(r"<axis 0x[0-9a-f]+>")


def _function_names(case: _Case) -> Iterator[CauseFinding]:
    one, other = case.one.key.function, case.other.key.function
    if one != other:
        case.take(lambda change: change.kind == "builtin.module" and change.what == "sym_name")
        yield finding("function-name", f"{one}, then {other}")
    yield from _told("function-name", case.take(_is_function_name))


def _is_function_name(change: _OperationChange) -> bool:
    return change.what in _NAMES_OF_FUNCTIONS


def _result_names(case: _Case) -> Iterator[CauseFinding]:
    yield from _told("result-name", case.take(_is_result_name))


def _is_result_name(change: _OperationChange) -> bool:
    return change.what.endswith("jax.result_info")


def _values(case: _Case) -> Iterator[CauseFinding]:
    if _PROGRAM not in case.components or any(c.what == "operation" for c in case.changes):
        return  # of a program that is built otherwise, the numbers say nothing
    case.take(
        lambda change: (
            change.kind == CONSTANT
            and change.what == "value"
            and change.before.split()[0] == change.after.split()[0]
        )  # of the same type
    )
    found = _other_values(case.one.operations, case.other.operations)
    arrays = [change for change in found if _ARRAY.match(change.before)]
    yield from _told("captured-array", arrays)
    yield from _told("traced-value", [change for change in found if change not in arrays])


_ARRAY = re.compile(r"tensor<\d")  # a scalar has its type there


def _metadata(case: _Case) -> Iterator[CauseFinding]:
    keeps = case.one.settings.get(METADATA) == case.other.settings.get(METADATA) == "True"
    pairs = zip(case.one.operations, case.other.operations, strict=False)
    moved = [(one.line, other.line) for one, other in pairs if one.line != other.line]
    if keeps and moved:
        yield finding("metadata", f"{moved[0][0]}, then {moved[0][1]}")
        if not case.changes:
            case.explain(_PROGRAM)


def _unknown(case: _Case) -> Iterator[CauseFinding]:
    """Last: whatever is left."""
    if not case.changes and case.is_read:
        case.explain(_PROGRAM)
    if case.changes or case.components:
        if case.changes:
            case.explain(_PROGRAM)  # the lines say it better
        seen = [str(change) for change in case.changes[:_MOST_DETAILS]]
        yield finding(UNKNOWN, *seen, *(f"it is in {name}" for name in case.components))


_RULES: tuple[Callable[[_Case], Iterator[CauseFinding]], ...] = (
    _versions,
    _device_count,
    _xla_flags,
    _directory,
    _compiler_options,
    _device_order,
    _others,
    _custom_partitioning,
    _shapes,
    _reordered,
    _axis_names,
    _function_names,
    _result_names,
    _values,
    _metadata,
    _unknown,
)


# --- where two programs differ, operation by operation


def _changes(
    ones: Sequence[Operation], others: Sequence[Operation]
) -> tuple[_OperationChange, ...]:
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
) -> Iterator[_OperationChange]:
    attributes, other_attributes = dict(one.attributes), dict(other.attributes)
    texts = {
        name: (attributes.get(name, ""), other_attributes.get(name, ""))
        for name in dict.fromkeys((*attributes, *other_attributes))
    }
    texts["types"] = one.types, other.types
    numbers = [" ".join(map(str, each.operands)) for each in (one, other)]
    texts["operands"] = numbers[0], numbers[1]
    for name, (before, after) in texts.items():
        if before != after:
            yield _OperationChange(
                one.kind, name, before, after, _line_of(ones, number), (one, other)
            )


def _aligned(ones: Sequence[Operation], others: Sequence[Operation]) -> Iterator[_OperationChange]:
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

    def change(program: Sequence[Operation], number: int) -> _OperationChange:
        operation = program[number]
        text, line = f"{operation.kind} {operation.types}".strip(), _line_of(program, number)
        if program is ones:
            return _OperationChange(operation.kind, "operation", text, "", line, (operation, None))
        return _OperationChange(operation.kind, "operation", "", text, line, (None, operation))

    for tag, start, stop, other_start, other_stop in matcher.get_opcodes():
        if tag != "equal":
            yield from (change(ones, number) for number in range(first + start, first + stop))
            span = range(first + other_start, first + other_stop)
            yield from (change(others, number) for number in span)


def _line_of(operations: Sequence[Operation], position: int) -> str:
    """The line of an operation; of a constant, that of the first operation that reads it.

    JAX says of a constant only where the jitted function was called.
    """
    operation = operations[position]
    if operation.kind == CONSTANT:
        for user in operations[position + 1 :]:
            if user.line and not set(operation.results).isdisjoint(user.operands):
                return user.line
    return operation.line


def build(operation: Operation) -> _Build:
    """All of an operation but its operands, its line, and the names of functions.

    Functions of one name are numbered in the order in which they are met.
    """
    named = _NAMES_OF_FUNCTIONS
    attributes = tuple(pair for pair in operation.attributes if pair[0] not in named)
    return operation.kind, attributes, operation.types


def _is_reordered(ones: Sequence[Operation], others: Sequence[Operation]) -> bool:
    """Whether both have the same operations, and read the same values as often.

    The numbers of constants may differ: that is another matter, told by `_other_values`.
    """
    same = Counter(map(_blank, ones)) == Counter(map(_blank, others))
    return same and _read_as_often(ones) == _read_as_often(others)


def _blank(operation: Operation) -> _Build:
    kind, attributes, types = build(operation)
    return kind, () if kind == CONSTANT else attributes, types


def _read_as_often(operations: Sequence[Operation]) -> Counter[tuple[_Build | None, int]]:
    """How often the result of each operation is read; of all arguments together."""
    producers = {number: _blank(each) for each in operations for number in each.results}
    counts = Counter(number for each in operations for number in each.operands)
    return Counter((producers.get(number), times) for number, times in counts.items())


def _other_values(
    ones: Sequence[Operation], others: Sequence[Operation]
) -> tuple[_OperationChange, ...]:
    """Constants of one program that the other has not, each with one of the same type there.

    Wherever they stand: a reordered program has its constants elsewhere.
    """
    before, after = _constants(ones), _constants(others)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    waiting = defaultdict(deque)
    for text in after:  # in the order of the program, as all that follows
        if text in new:
            waiting[text.split()[0]].append(text)
    found = []
    for text, number in before.items():
        if text in gone and waiting[text.split()[0]]:
            other = waiting[text.split()[0]].popleft()
            pair = ones[number], others[after[other]]
            found.append(
                _OperationChange(CONSTANT, "value", text, other, _line_of(ones, number), pair)
            )
    return tuple(found)


def _constants(operations: Sequence[Operation]) -> dict[str, int]:
    return {
        operation.attribute("value") or "": number
        for number, operation in enumerate(operations)
        if operation.kind == CONSTANT
    }


def signature(operations: Sequence[Operation]) -> str:
    """What the program takes and gives: "(tensor<3xf32>) -> tensor<f32>"."""
    for operation in operations:
        if operation.kind == "func.func" and operation.attribute("sym_name") == '"main"':
            return operation.attribute("function_type") or ""
    return ""
