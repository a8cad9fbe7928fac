"""Passes over a traced program, their findings, and warnings at the user's line."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from jax.extend.core import ClosedJaxpr

from jax_dist._rewrite.interpreter import OURS_AND_JAX

# --- warnings that point at the user's line, from wherever in a trace


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither ours nor JAX's.

    Counted here, for a trace has as many frames as JAX likes; `skip_file_prefixes` came with
    Python 3.12.
    """
    level = _user_level()
    warnings.warn(text, category, stacklevel=level)


def _user_level() -> int:
    """Return the level of the user's innermost frame, as seen by the caller's caller."""
    level, frame = -1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(OURS_AND_JAX):
        level, frame = level + 1, frame.f_back
    return level + 1


# --- what a pass did, or refused to do, and where


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
