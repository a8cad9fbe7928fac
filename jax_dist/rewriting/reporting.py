"""Makes the report of a rewriting: both programs, compiled and measured, and nothing run."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_dist import _compat
from jax_dist._errors import CapturedArrayWarning
from jax_dist.passes.captures import Capture, find_captures
from jax_dist.rewriting import gradients, program, ways
from jax_dist.rewriting.arguments import Wishes
from jax_dist.rewriting.cost import program_of
from jax_dist.rewriting.program import RewrittenProgram
from jax_dist.rewriting.report import CapturedArray, Report
from jax_dist.rewriting.stability import verdict_of


def report_of(rewriting: RewrittenProgram, args: tuple, kwargs: dict) -> Report:
    """What a rewriting, which has traced nothing yet, does on these arguments."""
    fun, name, wishes = rewriting.fun, rewriting.name, rewriting.wishes
    before, jaxpr = _as_given(fun, args, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapturedArrayWarning)  # the report says it
        after = program.ask("lower", rewriting, args, kwargs)
    # Of one trace: what is derived anew in each, as in `table * 2`, is another array then.
    captured = rewriting.found or find_captures(jaxpr, fun)
    lifted = {capture.key for capture in rewriting.lifted}
    kept = [capture for capture in captured if capture.key not in lifted]
    programs = program_of(before), program_of(after)
    return Report(
        name=name,
        before=programs[0],
        after=programs[1],
        cache_before=verdict_of(before, _large(captured, wishes)),
        cache_after=verdict_of(after, _large(kept, wishes)),
        findings=(*rewriting.findings, *gradients.find_doubled_sums(jaxpr)),
        captured=tuple(_row(capture, lifted) for capture in captured),
        # With several processes, the program as it is may compute something else.
        compare=ways.compare(jaxpr, name, programs) if jax.process_count() == 1 else None,
    )


def _as_given(fun: Callable, args: tuple, kwargs: dict) -> tuple[jax.stages.Lowered, Any]:
    """The program of the function as it is, and its jaxpr."""
    traced = _compat.jit_like(fun).trace(*args, **kwargs)
    return traced.lower(), traced.jaxpr


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
