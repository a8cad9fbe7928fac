"""Passes over one traced program: what it captures, gathers and partitions.

A pass takes a closed jaxpr, and returns a `PassPlan`: its findings, and the changed jaxpr or None.
`interpreter` reads and builds jaxprs, and all passes go through it; `uniformity` tells which values
all devices share. An equation that no rule covers stays as it is, with the reason in a finding. A
pass never drops an equation, changes a type, or assumes what it cannot see in the jaxpr.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

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

    def then(self, run_pass: Callable[..., "PassPlan"], *args: Any, **kwargs: Any) -> "PassPlan":
        """Run another pass, with these further arguments, on the program; return both plans."""
        plan = run_pass(self.jaxpr, *args, **kwargs)
        return PassPlan(plan.jaxpr or self.jaxpr, (*self.findings, *plan.findings))
