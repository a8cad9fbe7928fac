"""Which program of one run is which of another: by key, else by name and shapes, else by build."""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from jax_dist.cache.changes import build
from jax_dist.cache.operations import Operation
from jax_dist.cache.records import Compile

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
