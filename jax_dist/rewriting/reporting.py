"""Makes the report of a rewriting: both programs, compiled and measured, and nothing run."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from jax_dist import _codes, _compat
from jax_dist.errors import CapturedArrayWarning
from jax_dist.passes.captures import Capture, find_captures
from jax_dist.passes.findings import PassFinding
from jax_dist.passes.randomness import find_noise
from jax_dist.rewriting import alternatives, gradients
from jax_dist.rewriting.arguments import Wishes
from jax_dist.rewriting.comparison import Comparison
from jax_dist.rewriting.cost import ProgramCost, program_of
from jax_dist.rewriting.program import RewrittenProgram
from jax_dist.rewriting.report import CapturedArray, Report
from jax_dist.rewriting.stability import CacheVerdict, verdict_of


def report_of(rewriting: RewrittenProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """What a rewriting, which has traced nothing yet, does on these arguments."""
    fun, name, wishes = rewriting.fun, rewriting.name, rewriting.wishes
    traced = _compat.jit_like(fun).trace(*args, **kwargs)
    before = _as_given(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapturedArrayWarning)  # the report says it
        after = rewriting.lower(args, kwargs)
    # Of one trace: what each derives again, as in `table * 2`, is another array then.
    captured = rewriting.found or find_captures(traced.jaxpr, fun)
    lifted = {capture.key for capture in rewriting.lifted}
    kept = [capture for capture in captured if capture.key not in lifted]
    program_after = program_of(after)
    return Report(
        name=name,
        before=before.program,
        after=program_after,
        cache_before=_verdict_before(before, _large(captured, wishes)),
        cache_after=verdict_of(after, _large(kept, wishes)),
        findings=(
            *rewriting.findings,
            *gradients.find_doubled_sums(traced.jaxpr),  # left to the user
            *find_noise(traced.jaxpr),
            *before.failure,
        ),
        captured=tuple(_row(capture, lifted) for capture in captured),
        compare=_comparison(rewriting, traced, (args, kwargs), before, program_after),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _AsGiven:
    """The program as it is."""

    lowered: jax.stages.Lowered | None  # None: it does not compile
    program: ProgramCost
    failure: tuple[PassFinding, ...]


def _as_given(traced: jax.stages.Traced) -> _AsGiven:
    """Also of a program that only compiles when it is rewritten."""
    try:
        lowered = traced.lower()
        return _AsGiven(lowered, program_of(lowered), ())
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        what = "the program as it is does not compile: before, all is unknown"
        return _AsGiven(
            None, ProgramCost(), (PassFinding(_codes.JIT_OF_PMAP, "noted", what, reason, ""),)
        )


def _verdict_before(before: _AsGiven, captured: Sequence[str]) -> CacheVerdict:
    if before.lowered is None:
        return CacheVerdict(stable=False, causes=("It does not compile.",))
    return verdict_of(before.lowered, captured)


def _comparison(
    rewriting: RewrittenProgram,
    traced: jax.stages.Traced,
    arguments: tuple[tuple, dict],
    before: _AsGiven,
    after: ProgramCost,
) -> Comparison | None:
    """None also with several processes, where the program as it is may compute something else."""
    if before.lowered is None or jax.process_count() > 1:
        return None
    programs = (before.program, after)
    return alternatives.compare(traced, rewriting.fun, rewriting.name, arguments, programs)


def _large(captured: Sequence[Capture], wishes: Wishes) -> list[str]:
    least = wishes.policy.warn_bytes
    return [capture.name for capture in captured if capture.bytes >= least or capture.is_key]


def _row(capture: Capture, lifted: set) -> CapturedArray:
    return CapturedArray(
        name=capture.name,
        shape=capture.shape,
        dtype=capture.dtype,
        bytes=capture.bytes,
        captured_at=capture.captured_at,
        used_at=capture.used_at,
        action="lifted" if capture.key in lifted else "kept",
    )
