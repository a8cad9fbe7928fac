"""Several passes, one after the other, over a program that is being traced."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist.passes import interpreter
from jax_dist.passes.findings import PassFinding, PassPlan
from jax_dist.passes.interpreter import Values


class Pass(NamedTuple):
    """One pass, and without which primitives it has nothing to do."""

    needs: Collection[str]  # one of these
    plan: Callable[[ClosedJaxpr], PassPlan]


def evaluate_through(
    passes: Sequence[Pass],
    source: ClosedJaxpr,
    inputs: Sequence[Any],
    evaluate: Callable[..., Values] | None = None,
) -> tuple[Values, tuple[PassFinding, ...]]:
    """Evaluates a program in the current trace, changed by each pass in turn.

    Args:
      passes: in their order.
      source: the program, or at least its primitives, at any depth.
      inputs: of the program.
      evaluate: the program, if `source` is not yet all of it; runs nothing of the user.

    Returns:
      The results, and what the passes found.
    """
    primitives = {eqn.primitive.name for eqn in interpreter.equations(source)}
    jaxpr = source if evaluate is None else None
    if evaluate is None:
        evaluate = lambda *args: interpreter.run(source, args, {})
    findings: list[PassFinding] = []
    for each in passes:
        if primitives.isdisjoint(each.needs):
            continue
        if jaxpr is None:
            # A function of its own each time, for JAX remembers what it has traced.
            traced = jax.jit(lambda *args, evaluate=evaluate: evaluate(*args)).trace(*inputs)
            jaxpr = traced.jaxpr
        plan = each.plan(jaxpr)
        findings += plan.findings
        if plan.evaluate is not None:
            evaluate, jaxpr = plan.evaluate, None
    return evaluate(*inputs), tuple(findings)
