"""From what differs between two compilations of one program to the cause, by name.

Each rule takes the differences that it can explain, the most telling rules first. What no rule
takes is unknown: a missing rule is no reason to guess.
"""

from collections.abc import Callable, Iterator

from jax_dist.cache import causes_beside as beside
from jax_dist.cache import causes_inside as inside
from jax_dist.cache.cases import MOST_DETAILS, PROGRAM, Case
from jax_dist.cache.causes import UNKNOWN, Finding, finding
from jax_dist.cache.changes import changes
from jax_dist.cache.records import Compile


def explained(one: Compile, other: Compile) -> tuple[Finding, ...]:
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


def _unknown(case: Case) -> Iterator[Finding]:
    """Last: whatever is left."""
    if not case.changes and case.is_read:
        case.explain(PROGRAM)
    if case.changes or case.components:
        if case.changes:
            case.explain(PROGRAM)  # the lines say it better
        seen = [str(change) for change in case.changes[:MOST_DETAILS]]
        yield finding(UNKNOWN, *seen, *(f"it is in {name}" for name in case.components))


_RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    beside.versions,
    beside.device_count,
    beside.xla_flags,
    beside.directory,
    beside.compiler_options,
    beside.device_order,
    beside.others,
    inside.custom_partitioning,
    inside.shapes,
    inside.reordered,
    inside.axis_names,
    inside.function_names,
    inside.result_names,
    inside.values,
    inside.metadata,
    _unknown,
)
