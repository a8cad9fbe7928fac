"""Passes over a program that is being traced, their findings, and the line of the user."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import OURS_AND_JAX, Values
from jax_dist.errors import display_path

# --- the line of the user, from wherever in a trace; and warnings that point at it


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither ours nor JAX's.

    Counted here, for a trace has as many frames as JAX likes; `skip_file_prefixes` came with
    Python 3.12.
    """
    level, _ = _user_frame()
    warnings.warn(text, category, stacklevel=level)


def user_line() -> str:
    """Return the line of the user's code that runs now: "train.py:12", or "" without any."""
    _, frame = _user_frame()
    return "" if frame is None else f"{display_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def _user_frame() -> tuple[int, FrameType | None]:
    """Return the user's innermost frame, and its level as seen by the caller's caller."""
    level, frame = -1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(OURS_AND_JAX):
        level, frame = level + 1, frame.f_back
    return level + 1, frame


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
    """What a pass would do with a jaxpr."""

    evaluate: Callable[..., list[Any]] | None  # on the jaxpr's inputs; None: nothing to change
    findings: tuple[PassFinding, ...] = ()


# --- several passes, one after the other, over a program that is being traced


class Pass(NamedTuple):
    """One pass, and without which primitives it has nothing to do."""

    needs: Collection[str]  # one of these
    plan: Callable[[ClosedJaxpr], PassPlan]


def evaluate_through(
    passes: Sequence[Pass], source: ClosedJaxpr, inputs: Sequence[Any]
) -> tuple[Values, tuple[PassFinding, ...]]:
    """Evaluate a program in the current trace, changed by each pass; return also their findings."""
    primitives = {_compat.name_of(eqn) for eqn in interpreter.equations(source)}
    evaluate: Callable[..., Values] = lambda *args: interpreter.run(source, args, {})
    jaxpr: Any = source  # None once a pass has changed it
    findings: list[PassFinding] = []
    for step in passes:
        if primitives.isdisjoint(step.needs):
            continue
        if jaxpr is None:
            # A function of its own each time, for JAX remembers what it has traced.
            traced = jax.jit(lambda *args, evaluate=evaluate: evaluate(*args)).trace(*inputs)
            jaxpr = traced.jaxpr
        plan = step.plan(jaxpr)
        findings += plan.findings
        if plan.evaluate is not None:
            evaluate, jaxpr = plan.evaluate, None
    return evaluate(*inputs), tuple(findings)
