"""From what differs between two compilations of one program to the cause, by name.

A case is two compilations, and what of their difference is not explained yet. Each rule takes the
differences that it can explain, the most telling rules first. What no rule takes is unknown: a
missing rule is no reason to guess.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jax_dist.cache.causes import UNKNOWN, CauseFinding, finding
from jax_dist.cache.matching import (
    NAMES_OF_FUNCTIONS,
    OperationChange,
    build,
    changes,
    is_reordered,
    other_values,
    signature,
)
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

MOST_DETAILS = 3
PROGRAM = "computation"  # the component of the key


@dataclasses.dataclass(slots=True)
class Case:
    """Two compilations, and what no rule has explained yet."""

    one: Compile
    other: Compile
    components: list[str]
    changes: list[OperationChange]
    settings: dict[str, tuple[str, str]]  # those that differ
    is_read: bool = False  # there were changes; if there are none, we cannot see what differs

    def __post_init__(self) -> None:
        self.is_read = bool(self.changes)

    def explain(self, *components: str) -> None:
        """Takes components away that a rule has explained."""
        self.components = [name for name in self.components if name not in components]

    def explain_all(self, *, besides: tuple[str, ...] = ()) -> None:
        """Takes all away: one cause explains whatever else differs."""
        self.components = [name for name in self.components if name in besides]
        self.changes = []

    def take(self, wanted: Callable[[OperationChange], bool]) -> list[OperationChange]:
        """Takes the changes away that a rule explains."""
        taken = [change for change in self.changes if wanted(change)]
        self.changes = [change for change in self.changes if not wanted(change)]
        return taken

    def differ(self, name: str) -> tuple[str, str] | None:
        """Both texts of a setting that differs."""
        return self.settings.get(name)


def told(
    name: str, taken: Sequence[OperationChange], *, texts: bool = True
) -> Iterator[CauseFinding]:
    if not taken:
        return
    details = dict.fromkeys(str(change) if texts else change.place for change in taken)
    more = len(details) - MOST_DETAILS
    shown = list(details)[:MOST_DETAILS]
    yield finding(name, *shown, *([f"and {more} more"] if more > 0 else []))


# --- causes that stand beside the program: versions, devices, flags, options of the compiler


def versions(case: Case) -> Iterator[CauseFinding]:
    """First: another jax makes other programs of the same functions."""
    pairs = {name: case.differ(name) for name in ("jax", "jaxlib", "backend version")}
    details = [f"{name}: {pair[0]}, then {pair[1]}" for name, pair in pairs.items() if pair]
    if details:
        yield finding("versions", *details)
        case.explain_all()


def device_count(case: Case) -> Iterator[CauseFinding]:
    """It changes shapes, meshes, options, and numbers such as those that a mean divides by."""
    for name, count in ((ALL_DEVICES, str), (DEVICES, _how_many), (PROCESSES, str)):
        before, after = map(count, case.differ(name) or ("", ""))
        if before != after:
            yield finding("device-count", f"{name}: {before}, then {after}")
            case.explain_all(besides=("XLA flags",))
            return


def _how_many(ids: str) -> str:
    return str(len(ids.split()))


def xla_flags(case: Case) -> Iterator[CauseFinding]:
    pair = case.differ(FLAGS)
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
    if not _options_left(case):
        case.explain("compile_options")


def _options_left(case: Case) -> bool:
    kinds = (DEBUG_OPTION, COMPILER_OPTION)
    return DEVICES in case.settings or any(name.startswith(kinds) for name in case.settings)


def directory(case: Case) -> Iterator[CauseFinding]:
    names = [DEBUG_OPTION + name for name in DIRECTORY_OPTIONS]
    pairs = [case.settings.pop(name) for name in names if name in case.settings]
    if "compile_options" in case.components and pairs:
        yield finding("cache-directory", f"{pairs[0][0]}, then {pairs[0][1]}")
        if not _options_left(case):
            case.explain("compile_options")


def compiler_options(case: Case) -> Iterator[CauseFinding]:
    names = [name for name in case.settings if name.startswith((COMPILER_OPTION, DEBUG_OPTION))]
    if "compile_options" not in case.components or not names:
        return
    details = [
        f"{name.split()[-1]}: {before or 'not set'}, then {after or 'not set'}"
        for name, (before, after) in ((name, case.settings.pop(name)) for name in names)
    ]
    yield finding("compiler-options", *details[:MOST_DETAILS])
    if not _options_left(case):
        case.explain("compile_options")


def device_order(case: Case) -> Iterator[CauseFinding]:
    pair = case.differ(DEVICES)
    meshes = case.take(lambda change: is_mesh(change) and len(set(device_ids(change))) == 2)
    if pair is not None and sorted(pair[0].split()) == sorted(pair[1].split()):
        details = [f"{pair[0]}, then {pair[1]}"]
        case.explain("compile_options", "accelerator_config")
    elif meshes:
        details = [", then ".join(text or "in order" for text in device_ids(meshes[0]))]
    else:
        return
    case.take(is_about_devices)
    if PROGRAM in case.components and not case.changes:
        case.explain(PROGRAM)
    yield finding("device-order", *details)


def others(case: Case) -> Iterator[CauseFinding]:
    """Components that are one thing each."""
    for component, name, setting in _SINGLE:
        if component in case.components:
            pair = case.differ(setting)
            yield finding(name, *([f"{pair[0]}, then {pair[1]}"] if pair else []))
            case.explain(component)


_SINGLE = (
    ("compression", "compression", "compression"),
    ("custom_hook", "custom-hook", ""),
    ("accelerator_config", "hardware", "kinds of devices"),
)


_IDS = re.compile(r"device_ids=\[([^\]]*)\]")


def device_ids(change: OperationChange) -> tuple[str, str]:
    before, after = (_IDS.search(text) for text in (change.before, change.after))
    return before[1] if before else "", after[1] if after else ""


def is_mesh(change: OperationChange) -> bool:
    return change.kind == "sdy.mesh" and change.what == "mesh"


def is_about_devices(change: OperationChange) -> bool:
    return change.what.endswith(("mhlo.sharding", "replica_groups", "source_target_pairs"))


# --- causes inside the program: values, names, orders, addresses


def custom_partitioning(case: Case) -> Iterator[CauseFinding]:
    yield from told("custom-partitioning", case.take(_is_partitioning_pointer), texts=False)


def _is_partitioning_pointer(change: OperationChange) -> bool:
    operation = change.operations[0]
    if operation is None or change.what != "backend_config":
        return False
    return operation.attribute("call_target_name") == '"CustomSPMDPartitioning"'


def shapes(case: Case) -> Iterator[CauseFinding]:
    """They go through the whole program, also as numbers."""
    before, after = (_inputs(each.operations) for each in (case.one, case.other))
    if PROGRAM in case.components and before != after:
        yield finding("shapes", f"{before}, then {after}")
        case.changes = []
        case.explain(PROGRAM)


def _inputs(operations: Sequence[Operation]) -> str:
    return signature(operations).split(" -> ")[0]


def reordered(case: Case) -> Iterator[CauseFinding]:
    """All of the program, or the operations that differ, stand there in another order."""
    taken = case.take(lambda change: bool(_LISTS.search(change.what)) and _is_shuffled(change))
    results = [change for change in case.changes if _is_result_name(change)]
    if Counter(c.before for c in results) == Counter(c.after for c in results):
        taken += case.take(_is_result_name)
    if is_reordered(case.one.operations, case.other.operations):
        taken += _exchanged(case)
    yield from told("order", taken)


def _exchanged(case: Case) -> list[OperationChange]:
    """Operations that stand elsewhere in the other program, and those that read them.

    Operations that changed in the same way wherever they stand are none: a constant with numbers
    that the other program has not, a function with another name.
    """
    if any(change.what == "operation" for change in case.changes):
        return case.take(lambda _: True)
    mine, theirs = (
        {build(each) for each in compiled.operations} for compiled in (case.one, case.other)
    )

    def has_moved(change: OperationChange) -> bool:
        one, other = change.operations
        assert one is not None
        assert other is not None
        if change.what in NAMES_OF_FUNCTIONS or build(one) == build(other):
            return False
        return build(one) in theirs or build(other) in mine

    moved = case.take(has_moved)
    only_operands = all(change.what == "operands" for change in case.changes if not _is_new(change))
    if moved or only_operands:
        moved += case.take(lambda change: change.what == "operands")
    called = [change for change in case.changes if change.what in NAMES_OF_FUNCTIONS]
    if Counter(c.before for c in called) == Counter(c.after for c in called):
        moved += case.take(lambda change: change.what in NAMES_OF_FUNCTIONS)
    return moved


def _is_new(change: OperationChange) -> bool:
    """What other rules explain, without an order."""
    return change.what in NAMES_OF_FUNCTIONS or change.kind == CONSTANT


_LISTS = re.compile(
    r"^(mesh|replica_groups|source_target_pairs|\w*_shardings|manual_axes)$|sharding"
)
_WORD = re.compile(r"\w+")


def _is_shuffled(change: OperationChange) -> bool:
    """The same words in the same frame: not `[{"i"}, {}]` for `[{}, {"i"}]`."""
    words = (sorted(_WORD.findall(text)) for text in (change.before, change.after))
    frames = (_WORD.sub("#", text) for text in (change.before, change.after))
    return len(set(map(tuple, words))) == len(set(frames)) == 1


def axis_names(case: Case) -> Iterator[CauseFinding]:
    """A name that differs is followed into all shardings that use it."""
    names = [pair for change in case.changes if is_mesh(change) for pair in _renamed(change)]
    if not names:
        return

    def is_renamed(change: OperationChange) -> bool:
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


def _renamed(change: OperationChange) -> Iterator[tuple[str, str]]:
    before, after = (_AXIS.findall(text) for text in (change.before, change.after))
    if [size for _, size in before] == [size for _, size in after]:
        pairs = zip(before, after, strict=True)
        yield from ((one[0], other[0]) for one, other in pairs if one[0] != other[0])


def function_names(case: Case) -> Iterator[CauseFinding]:
    if _is_module_renamed(case):
        case.take(lambda change: _is_module(change) and change.what == "sym_name")
        yield finding("function-name", f"{case.one.key.function}, then {case.other.key.function}")
    taken = case.take(lambda change: change.what in NAMES_OF_FUNCTIONS)
    yield from told("function-name", taken)


def _is_module_renamed(case: Case) -> bool:
    return case.one.key.function != case.other.key.function


def _is_module(change: OperationChange) -> bool:
    return change.kind == "builtin.module"


def result_names(case: Case) -> Iterator[CauseFinding]:
    yield from told("result-name", case.take(_is_result_name))


def _is_result_name(change: OperationChange) -> bool:
    return change.what.endswith("jax.result_info")


def values(case: Case) -> Iterator[CauseFinding]:
    if PROGRAM not in case.components or any(c.what == "operation" for c in case.changes):
        return  # of a program that is built otherwise, the numbers say nothing
    case.take(_is_value)
    found = other_values(case.one.operations, case.other.operations)
    arrays = [change for change in found if _ARRAY.match(change.before)]
    yield from told("captured-array", arrays)
    yield from told("traced-value", [change for change in found if change not in arrays])


_ARRAY = re.compile(r"tensor<\d")  # a scalar has its type there


def _is_value(change: OperationChange) -> bool:
    """A constant of the same type with other numbers."""
    if change.kind != CONSTANT or change.what != "value":
        return False
    return change.before.split()[0] == change.after.split()[0]


def metadata(case: Case) -> Iterator[CauseFinding]:
    keeps = case.one.settings.get(METADATA) == case.other.settings.get(METADATA) == "True"
    pairs = zip(case.one.operations, case.other.operations, strict=False)
    moved = [(one.line, other.line) for one, other in pairs if one.line != other.line]
    if keeps and moved:
        yield finding("metadata", f"{moved[0][0]}, then {moved[0][1]}")
        if not case.changes:
            case.explain(PROGRAM)


# --- from what differs between two compilations of one program to the cause, by name
#
# Each rule takes the differences that it can explain, the most telling rules first. What no rule
# takes is unknown: a missing rule is no reason to guess.


def explained(one: Compile, other: Compile) -> tuple[CauseFinding, ...]:
    """Why the keys of one program differ in two runs; nothing if they do not."""
    components = list(one.key.differing(other.key))
    names = dict.fromkeys((*one.settings, *other.settings))
    texts = {name: (one.settings.get(name, ""), other.settings.get(name, "")) for name in names}
    case = Case(
        one,
        other,
        components,
        list(changes(one.operations, other.operations)) if PROGRAM in components else [],
        {name: pair for name, pair in texts.items() if pair[0] != pair[1]},
    )
    if not components:
        return ()
    found = [each for rule in _RULES for each in rule(case)]
    return tuple(found)


def _unknown(case: Case) -> Iterator[CauseFinding]:
    """Last: whatever is left."""
    if not case.changes and case.is_read:
        case.explain(PROGRAM)
    if case.changes or case.components:
        if case.changes:
            case.explain(PROGRAM)  # the lines say it better
        seen = [str(change) for change in case.changes[:MOST_DETAILS]]
        yield finding(UNKNOWN, *seen, *(f"it is in {name}" for name in case.components))


_RULES: tuple[Callable[[Case], Iterator[CauseFinding]], ...] = (
    versions,
    device_count,
    xla_flags,
    directory,
    compiler_options,
    device_order,
    others,
    custom_partitioning,
    shapes,
    reordered,
    axis_names,
    function_names,
    result_names,
    values,
    metadata,
    _unknown,
)
