"""Loops and branches that run in the global view, with islands in their bodies.

What is carried keeps one form: a carry that varies once varies from the start, so a shared value
goes in as `[N, *s]`. A scan walks over the first dimension, so what varies comes as `[T, N, *s]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.interpreter import Values, bodies_of_while
from jax_dist.global_view.islands import BodyPlan, Step


class Runner(Protocol):
    """What runs the plans of bodies."""

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values: ...
    def laid(self, value: Any, spec: P) -> Any: ...
    def for_each_device(self, value: Any) -> Any: ...


def run(runs: Runner, plan: BodyPlan, step: Step, values: Values) -> Values:
    """The results of an equation that is entered; `plan` is that of the body that it stands in."""
    rule = {"scan": _scan, "while": _while, "cond": _cond}[_compat.name_of(step.eqn)]
    return rule(_Forms(runs, plan, step.eqn), step, values)


def scanned(turn: Callable, eqn: JaxprEqn, start: Values, walked: Values) -> Values:
    kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(turn, start, walked, **kept)
    return [*carry, *ys]


class _Forms:
    """The forms of the operands and of the results of a loop or a branch."""

    def __init__(self, runs: Runner, plan: BodyPlan, eqn: JaxprEqn):
        self.runs = runs
        self.ins = [plan.is_shared(atom) for atom in eqn.invars]
        self.outs = [plan.is_shared(var) for var in eqn.outvars]
        self.cuts = [plan.cuts.get(var) for var in eqn.outvars]

    def given(self, values: Sequence[Any], wanted: Sequence[bool], first: int = 0) -> Values:
        """Operands from `first` on, in the form in which a body takes them."""
        return self._changed(values, self.ins[first : first + len(values)], wanted)

    def run(self, inner: BodyPlan, args: Sequence[Any]) -> Values:
        """What a body gives, as results."""
        wanted = [inner.cuts.get(a) if isinstance(a, Var) else None for a in inner.body.outvars]
        outs = self.laid(self.runs.run(inner, args), wanted)
        return self._changed(outs, inner.outs, self.outs)

    def laid(self, values: Sequence[Any], specs: Sequence[Any]) -> Values:
        """Values as they are wanted."""
        pairs = zip(values, specs, strict=True)
        return [x if spec is None else self.runs.laid(x, spec) for x, spec in pairs]

    def _changed(
        self, values: Sequence[Any], had: Sequence[bool], wanted: Sequence[bool]
    ) -> Values:
        forms = zip(values, had, wanted, strict=True)
        return [x if was == will else self.runs.for_each_device(x) for x, was, will in forms]


def _scan(forms: _Forms, step: Step, values: Values) -> Values:
    (inner,) = step.inner
    layout = _compat.scan_layout(step.eqn.params, len(values), len(step.eqn.outvars))
    constants, carried = len(layout.constants), len(layout.carries_in)
    values = forms.given(values, inner.ins)
    fixed, start = values[:constants], values[constants : constants + carried]
    of_turns = zip(values[constants + carried :], inner.ins[constants + carried :], strict=True)
    walked = [x if is_shared else jnp.moveaxis(x, 1, 0) for x, is_shared in of_turns]

    def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = forms.run(inner, [*fixed, *carry, *xs])
        return outs[:carried], outs[carried:]

    outs = scanned(turn, step.eqn, forms.laid(start, forms.cuts[: len(start)]), walked)
    of_turns = zip(outs[carried:], forms.outs[carried:], strict=True)
    ys = [y if is_shared else jnp.moveaxis(y, 0, 1) for y, is_shared in of_turns]
    return [*outs[:carried], *ys]


def _while(forms: _Forms, step: Step, values: Values) -> Values:
    params = step.eqn.params
    plans = dict(zip(bodies_of_while(step.eqn), step.inner, strict=True))
    condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = forms.given(values[:first], condition.ins[:first])
    of_body = forms.given(values[first:second], body.ins[: second - first], first)
    start = forms.given(values[second:], body.ins[second - first :], second)
    return lax.while_loop(
        lambda carry: forms.runs.run(condition, [*of_condition, *carry])[0],
        lambda carry: forms.run(body, [*of_body, *carry]),
        forms.laid(start, forms.cuts[: len(start)]),
    )


def _cond(forms: _Forms, step: Step, values: Values) -> Values:
    index, *operands = values
    branches = [lambda *args, plan=plan: forms.run(plan, args) for plan in step.inner]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)
