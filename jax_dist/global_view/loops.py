"""Loops and branches on global arrays, with manual regions in their bodies.

What is carried keeps one form: a carry that varies once varies from the start, so a uniform value
goes in as `[N, *s]`. A scan goes over the first dimension, so what varies comes as `[T, N, *s]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.interpreter import Values, bodies_of_while
from jax_dist.global_view.regions import BodyPlan, GlobalEquation


class Runner(Protocol):
    """An object that runs the plans of bodies."""

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values: ...
    def constrain(self, value: Any, spec: P) -> Any: ...
    def stack(self, value: Any) -> Any: ...


def run(runner: Runner, plan: BodyPlan, step: GlobalEquation, values: Values) -> Values:
    """Return the results of an equation that is entered, in the body of `plan`."""
    rule = {"scan": _scan, "while": _while, "cond": _cond}[_compat.name_of(step.eqn)]
    return rule(_Forms(runner, plan, step.eqn), step, values)


def scan_as(turn: Callable, eqn: JaxprEqn, start: Values, xs: Values) -> Values:
    """Return the results of a scan with another body."""
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(turn, start, xs, **params)
    return [*carry, *ys]


class _Forms:
    """The forms of the operands and results of a loop or a branch: uniform or `[N, *s]`."""

    def __init__(self, runner: Runner, plan: BodyPlan, eqn: JaxprEqn):
        self.runner = runner
        self.ins = [plan.is_uniform(atom) for atom in eqn.invars]
        self.outs = [plan.is_uniform(var) for var in eqn.outvars]
        self.specs = [plan.specs.get(var) for var in eqn.outvars]

    def operands(self, values: Sequence[Any], wanted: Sequence[bool], first: int = 0) -> Values:
        """Return operands from `first` on in the form in which a body takes them."""
        return self._convert(values, self.ins[first : first + len(values)], wanted)

    def run(self, inner: BodyPlan, args: Sequence[Any]) -> Values:
        """Return what a body gives, in the form of the results."""
        atoms = inner.body.outvars
        wanted = [inner.specs.get(a) if isinstance(a, Var) else None for a in atoms]
        outs = self.constrain(self.runner.run(inner, args), wanted)
        return self._convert(outs, inner.outs, self.outs)

    def constrain(self, values: Sequence[Any], specs: Sequence[Any]) -> Values:
        pairs = zip(values, specs, strict=True)
        return [x if spec is None else self.runner.constrain(x, spec) for x, spec in pairs]

    def _convert(
        self, values: Sequence[Any], before: Sequence[bool], after: Sequence[bool]
    ) -> Values:
        forms = zip(values, before, after, strict=True)
        return [x if was == becomes else self.runner.stack(x) for x, was, becomes in forms]


def _scan(forms: _Forms, step: GlobalEquation, values: Values) -> Values:
    (inner,) = step.inner
    layout = _compat.scan_layout(step.eqn.params, len(values), len(step.eqn.outvars))
    first, carried = len(layout.constants), len(layout.carries_in)
    values = forms.operands(values, inner.ins)
    pairs = zip(values[first + carried :], inner.ins[first + carried :], strict=True)
    xs = [x if is_uniform else jnp.moveaxis(x, 1, 0) for x, is_uniform in pairs]

    def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = forms.run(inner, [*values[:first], *carry, *xs])
        return outs[:carried], outs[carried:]

    start = forms.constrain(values[first : first + carried], forms.specs[:carried])
    outs = scan_as(turn, step.eqn, start, xs)
    pairs = zip(outs[carried:], forms.outs[carried:], strict=True)
    ys = [y if is_uniform else jnp.moveaxis(y, 0, 1) for y, is_uniform in pairs]
    return [*outs[:carried], *ys]


def _while(forms: _Forms, step: GlobalEquation, values: Values) -> Values:
    params = step.eqn.params
    plans = dict(zip(bodies_of_while(step.eqn), step.inner, strict=True))
    condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = forms.operands(values[:first], condition.ins[:first])
    of_body = forms.operands(values[first:second], body.ins[: second - first], first)
    start = forms.operands(values[second:], body.ins[second - first :], second)
    return lax.while_loop(
        lambda carry: forms.runner.run(condition, [*of_condition, *carry])[0],
        lambda carry: forms.run(body, [*of_body, *carry]),
        forms.constrain(start, forms.specs),
    )


def _cond(forms: _Forms, step: GlobalEquation, values: Values) -> Values:
    index, *operands = values
    branches = [lambda *args, plan=plan: forms.run(plan, args) for plan in step.inner]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)
