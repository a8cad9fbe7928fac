"""Passes over a traced program, and what they did, or refused to do, and where."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from jax.extend.core import ClosedJaxpr

Outcome: TypeAlias = Literal["rewritten", "refused", "noted"]


@dataclasses.dataclass(frozen=True, slots=True)
class PassFinding:
    """One place in the user's program that a pass looked at."""

    code: str  # of the rule: "JXD301"
    outcome: Outcome
    what: str  # "all_gather over 'i', then reduce_sum: one psum"
    why: str  # the reason of a refusal; "" where there is nothing to explain
    where: str  # "train.py:12", or "" if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class PassPlan:
    """A program as a pass leaves it, and what the pass found."""

    jaxpr: ClosedJaxpr | None  # of the same inputs and results; None: nothing to change
    findings: tuple[PassFinding, ...] = ()


def run_passes(
    passes: Sequence[Callable[[ClosedJaxpr], PassPlan]], jaxpr: ClosedJaxpr
) -> tuple[ClosedJaxpr, tuple[PassFinding, ...]]:
    """Return a program as the passes leave it, one after the other, and what they found."""
    findings: list[PassFinding] = []
    for plan_pass in passes:
        plan = plan_pass(jaxpr)
        findings += plan.findings
        jaxpr = plan.jaxpr or jaxpr
    return jaxpr, tuple(findings)
