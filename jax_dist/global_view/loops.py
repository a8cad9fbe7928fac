"""Loops and branches on global arrays, with manual regions in their bodies.

What is carried keeps one form: a carry that varies once varies from the start, so a uniform value
goes in as `[N, *s]`. A scan goes over the first dimension, so what varies comes as `[T, N, *s]`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._rewrite.interpreter import Values, bodies_of_while
from jax_dist.global_view.analysis import ValueFacts
from jax_dist.global_view.regions import BodyPlan, GlobalEquation


def scan_as(turn: Callable, eqn: JaxprEqn, start: Values, xs: Values) -> Values:
    """Run the scan `eqn` with the function `turn` instead of its jaxpr; return carry and ys."""
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(turn, start, xs, **params)
    return [*carry, *ys]


class EnteredEquation:
    """A scan, while loop or cond on global arrays; the emitter runs the plans of its bodies."""

    def __init__(self, emitter: Any, facts: ValueFacts, step: GlobalEquation):
        self._emitter, self._eqn, self._plans = emitter, step.eqn, step.inner
        self._ins = [*map(facts.is_uniform, step.eqn.invars)]
        self._outs = [*map(facts.is_uniform, step.eqn.outvars)]
        self._specs = [*map(facts.spec_of, step.eqn.outvars)]

    def run(self, values: Values) -> Values:
        """Return the results for operands, each uniform or `[N, *s]`."""
        match _compat.name_of(self._eqn):
            case "scan":
                return self._scan(values)
            case "while":
                return self._while(values)
        index, *operands = values
        branches = [functools.partial(self._run_body, plan) for plan in self._plans]
        return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)

    def _scan(self, values: Values) -> Values:
        (plan,) = self._plans
        layout = _compat.scan_layout(self._eqn.params, len(values), len(self._outs))
        first, carried = len(layout.constants), len(layout.carries_in)
        values = self._convert(values, self._ins, plan.ins)
        pairs = zip(values[first + carried :], plan.ins[first + carried :], strict=True)
        xs = [x if is_uniform else jnp.moveaxis(x, 1, 0) for x, is_uniform in pairs]

        def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
            outs = self._run_body(plan, *values[:first], *carry, *xs)
            return outs[:carried], outs[carried:]

        start = self._constrain(values[first : first + carried], self._specs[:carried])
        outs = scan_as(turn, self._eqn, start, xs)
        pairs = zip(outs[carried:], self._outs[carried:], strict=True)
        ys = [y if is_uniform else jnp.moveaxis(y, 0, 1) for y, is_uniform in pairs]
        return [*outs[:carried], *ys]

    def _while(self, values: Values) -> Values:
        plans = dict(zip(bodies_of_while(self._eqn), self._plans, strict=True))
        condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
        first = self._eqn.params["cond_nconsts"]
        second = first + self._eqn.params["body_nconsts"]
        values = self._convert(values, self._ins, [*condition.ins[:first], *body.ins])
        return lax.while_loop(
            lambda carry: self._emitter.run(condition, [*values[:first], *carry])[0],
            lambda carry: self._run_body(body, *values[first:second], *carry),
            self._constrain(values[second:], self._specs),
        )

    def _run_body(self, plan: BodyPlan, *args: Any) -> Values:
        """Run a body; stack its uniform results over devices where the equation's vary."""
        specs = map(plan.facts.spec_of, plan.body.outvars)
        outs = self._constrain(self._emitter.run(plan, args), specs)
        return self._convert(outs, plan.outs, self._outs)

    def _constrain(self, values: Sequence[Any], specs: Iterable[Any]) -> Values:
        """Constrain each value to its spec; None leaves it as it is."""
        pairs = zip(values, specs, strict=True)
        return [x if spec is None else self._emitter.constrain(x, spec) for x, spec in pairs]

    def _convert(
        self, values: Sequence[Any], before: Sequence[bool], after: Sequence[bool]
    ) -> Values:
        """Stack as `[N, *s]` the values that are uniform `before` and vary `after`."""
        flags = zip(values, before, after, strict=True)
        return [x if old == new else self._emitter.stack(x) for x, old, new in flags]
