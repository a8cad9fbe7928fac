"""Several passes, one after the other, over what was traced once."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist.passes import interpreter
from jax_dist.passes.captures import Capture
from jax_dist.passes.findings import Finding, Plan
from jax_dist.passes.interpreter import Values
from jax_dist.passes.lifting import Traced, evaluator


class Pass(NamedTuple):
    """One pass, and without which primitives it has nothing to do."""

    needs: Collection[str] | None  # one of these; None: it looks at every program
    plan: Callable[[ClosedJaxpr], Plan]


def evaluate_through(
    passes: Sequence[Pass], traced: Traced, lifted: Sequence[Capture], inputs: Sequence
) -> tuple[Values, tuple[Finding, ...]]:
    """Evaluates a program in the current trace, changed by each pass in turn.

    Args:
      passes: in their order.
      traced: the program.
      lifted: its captured arrays that are inputs now.
      inputs: the lifted arrays, and then the dynamic leaves.

    Returns:
      The results, and what the passes found. What no pass changes is not traced again.
    """
    primitives = {eqn.primitive.name for eqn in interpreter.equations(traced.jaxpr)}
    jaxpr, as_it_is = traced.jaxpr, traced.as_it_is
    pending = evaluator(traced, lifted) if lifted else None
    findings: list[Finding] = []
    for each in passes:
        if each.needs is not None and primitives.isdisjoint(each.needs):
            continue
        if pending is not None:
            as_it_is = jax.jit(pending)
            jaxpr = as_it_is.trace(*inputs).jaxpr
        plan = each.plan(jaxpr)
        findings += plan.findings
        pending = plan.evaluate
    return (pending or as_it_is)(*inputs), tuple(findings)
