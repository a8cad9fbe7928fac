"""What a pass did, or refused to do, and where."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["rewritten", "refused", "noted"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place in the user's program that a pass looked at."""

    code: str  # of the rule: "JXD301"
    outcome: Outcome
    what: str  # "all_gather over 'i', then reduce_sum: one psum"
    why: str  # the reason of a refusal; "" where there is nothing to explain
    where: str  # "train.py:12", or "" if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a pass would do with a jaxpr."""

    evaluate: Callable[..., list[Any]] | None  # on the jaxpr's inputs; None: nothing to change
    findings: tuple[Finding, ...] = ()
