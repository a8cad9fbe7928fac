"""Causes inside the program: values, names, orders, addresses."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from jax_dist.cache.cases import PROGRAM, Case, told
from jax_dist.cache.causes import Finding, finding
from jax_dist.cache.causes_beside import is_mesh
from jax_dist.cache.changes import NAMES_OF_FUNCTIONS, Change, build, is_reordered, other_values
from jax_dist.cache.matching import signature
from jax_dist.cache.operations import CONSTANT, Operation
from jax_dist.cache.settings import METADATA


def custom_partitioning(case: Case) -> Iterator[Finding]:
    yield from told("custom-partitioning", case.take(_is_partitioning_pointer), texts=False)


def _is_partitioning_pointer(change: Change) -> bool:
    operation = change.operations[0]
    if operation is None or change.what != "backend_config":
        return False
    return operation.attribute("call_target_name") == '"CustomSPMDPartitioning"'


def shapes(case: Case) -> Iterator[Finding]:
    """They go through the whole program, also as numbers."""
    before, after = (_inputs(each.operations) for each in (case.one, case.other))
    if PROGRAM in case.components and before != after:
        yield finding("shapes", f"{before}, then {after}")
        case.changes = []
        case.explain(PROGRAM)


def _inputs(operations: Sequence[Operation]) -> str:
    return signature(operations).split(" -> ")[0]


def reordered(case: Case) -> Iterator[Finding]:
    """All of the program, or the operations that differ, stand there in another order."""
    taken = case.take(lambda change: bool(_LISTS.search(change.what)) and _is_shuffled(change))
    results = [change for change in case.changes if _is_result_name(change)]
    if Counter(c.before for c in results) == Counter(c.after for c in results):
        taken += case.take(_is_result_name)
    if is_reordered(case.one.operations, case.other.operations):
        taken += _exchanged(case)
    yield from told("order", taken)


def _exchanged(case: Case) -> list[Change]:
    """Operations that stand elsewhere in the other program, and those that read them.

    Operations that changed in the same way wherever they stand are none: a constant with numbers
    that the other program has not, a function with another name.
    """
    if any(change.what == "operation" for change in case.changes):
        return case.take(lambda _: True)
    mine, theirs = (
        {build(each) for each in compiled.operations} for compiled in (case.one, case.other)
    )

    def has_moved(change: Change) -> bool:
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


def _is_new(change: Change) -> bool:
    """What other rules explain, without an order."""
    return change.what in NAMES_OF_FUNCTIONS or change.kind == CONSTANT


_LISTS = re.compile(
    r"^(mesh|replica_groups|source_target_pairs|\w*_shardings|manual_axes)$|sharding"
)
_WORD = re.compile(r"\w+")


def _is_shuffled(change: Change) -> bool:
    """The same words in the same frame: not `[{"i"}, {}]` for `[{}, {"i"}]`."""
    words = (sorted(_WORD.findall(text)) for text in (change.before, change.after))
    frames = (_WORD.sub("#", text) for text in (change.before, change.after))
    return len(set(map(tuple, words))) == len(set(frames)) == 1


def axis_names(case: Case) -> Iterator[Finding]:
    """A name that differs is followed into all shardings that use it."""
    names = [pair for change in case.changes if is_mesh(change) for pair in _renamed(change)]
    if not names:
        return

    def is_renamed(change: Change) -> bool:
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


def _renamed(change: Change) -> Iterator[tuple[str, str]]:
    before, after = (_AXIS.findall(text) for text in (change.before, change.after))
    if [size for _, size in before] == [size for _, size in after]:
        pairs = zip(before, after, strict=True)
        yield from ((one[0], other[0]) for one, other in pairs if one[0] != other[0])


def function_names(case: Case) -> Iterator[Finding]:
    if _is_module_renamed(case):
        case.take(lambda change: _is_module(change) and change.what == "sym_name")
        yield finding("function-name", f"{case.one.key.function}, then {case.other.key.function}")
    taken = case.take(lambda change: change.what in NAMES_OF_FUNCTIONS)
    yield from told("function-name", taken)


def _is_module_renamed(case: Case) -> bool:
    return case.one.key.function != case.other.key.function


def _is_module(change: Change) -> bool:
    return change.kind == "builtin.module"


def result_names(case: Case) -> Iterator[Finding]:
    yield from told("result-name", case.take(_is_result_name))


def _is_result_name(change: Change) -> bool:
    return change.what.endswith("jax.result_info")


def values(case: Case) -> Iterator[Finding]:
    if PROGRAM not in case.components or any(c.what == "operation" for c in case.changes):
        return  # of a program that is built otherwise, the numbers say nothing
    case.take(_is_value)
    found = other_values(case.one.operations, case.other.operations)
    arrays = [change for change in found if _ARRAY.match(change.before)]
    yield from told("captured-array", arrays)
    yield from told("traced-value", [change for change in found if change not in arrays])


_ARRAY = re.compile(r"tensor<\d")  # a scalar has its type there


def _is_value(change: Change) -> bool:
    """A constant of the same type with other numbers."""
    if change.kind != CONSTANT or change.what != "value":
        return False
    return change.before.split()[0] == change.after.split()[0]


def metadata(case: Case) -> Iterator[Finding]:
    keeps = case.one.settings.get(METADATA) == case.other.settings.get(METADATA) == "True"
    pairs = zip(case.one.operations, case.other.operations, strict=False)
    moved = [(one.line, other.line) for one, other in pairs if one.line != other.line]
    if keeps and moved:
        yield finding("metadata", f"{moved[0][0]}, then {moved[0][1]}")
        if not case.changes:
            case.explain(PROGRAM)
