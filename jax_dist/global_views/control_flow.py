"""Loops and branches that run in the global view, with islands in their bodies.

What is carried keeps one form: a carry that varies once varies from the start, so a shared value
goes in as `[N, *s]`. A scan walks over the first dimension, so what varies comes as `[T, N, *s]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist.global_views.islands import BodyPlan, Step
from jax_dist.passes.interpreter import Values


class Runs(Protocol):
    """What runs a plan, and moves values between their two forms."""

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values: ...

    def as_varying(self, value: Any, *, is_shared: bool) -> Any: ...

    def laid(self, value: Any, spec: Any) -> Any: ...


def run_entered(runs: Runs, plan: BodyPlan, step: Step, values: Values) -> Values:
    """The results of a loop or a branch.

    Args:
      runs: runs the bodies.
      plan: of the body that the equation stands in.
      step: the equation, with the plans of its bodies.
      values: of its operands.
    """
    ins = [plan.is_shared(atom) for atom in step.eqn.invars]
    outs = [plan.is_shared(var) for var in step.eqn.outvars]
    cuts = [plan.cuts.get(var) for var in step.eqn.outvars]
    rule = {"scan": _scan, "while": _while, "cond": _cond}[step.eqn.primitive.name]
    return rule(_Forms(runs, ins, outs, cuts), step, values)


class _Forms:
    """The forms of the operands and of the results of an equation."""

    def __init__(self, runs: Runs, ins: Sequence[bool], outs: Sequence[bool], cuts: Sequence[Any]):
        self.runs, self.ins, self.outs, self.cuts = runs, ins, outs, cuts

    def given(self, values: Sequence[Any], wanted: Sequence[bool], first: int = 0) -> Values:
        """Operands from `first` on, in the form in which a body takes them."""
        had = self.ins[first : first + len(values)]
        return self._changed(values, had, wanted)

    def results(self, values: Sequence[Any], had: Sequence[bool], first: int = 0) -> Values:
        """What a body gives, as results from `first` on."""
        wanted = self.outs[first : first + len(values)]
        return self.carried(self._changed(values, had, wanted), first)

    def carried(self, values: Sequence[Any], first: int = 0) -> Values:
        """Values that lie as the results from `first` on are wanted."""
        specs = self.cuts[first : first + len(values)]
        laid = zip(values, specs, strict=True)
        return [x if spec is None else self.runs.laid(x, spec) for x, spec in laid]

    def _changed(
        self, values: Sequence[Any], had: Sequence[bool], wanted: Sequence[bool]
    ) -> Values:
        return [
            value if was == will else self.runs.as_varying(value, is_shared=True)
            for value, was, will in zip(values, had, wanted, strict=True)
        ]


def _scan(forms: _Forms, step: Step, values: Values) -> Values:
    (inner,), params = step.inner, step.eqn.params
    layout = _compat.scan_layout(params, len(values), len(step.eqn.outvars))
    constants, carried = len(layout.constants), len(layout.carries_in)
    values = forms.given(values, inner.ins)
    fixed, start = values[:constants], values[constants : constants + carried]
    walked = [
        x if is_shared else jnp.moveaxis(x, 1, 0)
        for x, is_shared in zip(
            values[constants + carried :], inner.ins[constants + carried :], strict=True
        )
    ]

    def body(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = forms.runs.run(inner, [*fixed, *carry, *xs])
        outs = forms.results(outs, inner.outs)
        return outs[:carried], outs[carried:]

    carry, ys = lax.scan(
        body,
        forms.carried(start),
        walked,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    of_steps = zip(ys, forms.outs[carried:], strict=True)
    return [*carry, *[y if is_shared else jnp.moveaxis(y, 0, 1) for y, is_shared in of_steps]]


def _while(forms: _Forms, step: Step, values: Values) -> Values:
    params = step.eqn.params
    plans = dict(zip(_bodies_of_while(step.eqn), step.inner, strict=True))
    condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = forms.given(values[:first], condition.ins[:first])
    of_body = forms.given(values[first:second], body.ins[: second - first], first)
    start = forms.given(values[second:], body.ins[second - first :], second)

    def again(carry: Values) -> Any:
        return forms.runs.run(condition, [*of_condition, *carry])[0]

    def once(carry: Values) -> Values:
        return forms.results(forms.runs.run(body, [*of_body, *carry]), body.outs)

    return lax.while_loop(again, once, forms.carried(start))


def _bodies_of_while(eqn: JaxprEqn) -> list[str]:
    return [name for name in eqn.params if name in ("cond_jaxpr", "body_jaxpr")]


def _cond(forms: _Forms, step: Step, values: Values) -> Values:
    index, *operands = values

    def branch(plan: BodyPlan) -> Callable[..., Values]:
        return lambda *args: forms.results(forms.runs.run(plan, args), plan.outs)

    branches = [branch(plan) for plan in step.inner]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)


def reads_whole(step: Step) -> set[int]:
    """The operands that islands in the bodies read, and that do not change from turn to turn.

    They are gathered before the loop, if they are cut, and not in each turn.
    """
    eqn = step.eqn
    if eqn.primitive.name == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        offsets = {0: list(layout.constants)}
    elif eqn.primitive.name == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of = {"cond_jaxpr": range(first), "body_jaxpr": range(first, first + second)}
        offsets = {n: list(of[name]) for n, name in enumerate(_bodies_of_while(eqn))}
    else:
        return set()
    found = set()
    for number, places in offsets.items():
        inner = step.inner[number]
        read = inner.reads_in_islands()
        inputs = inner.body.invars[len(inner.consts) :]
        found.update(place for at, place in enumerate(places) if inputs[at] in read)
    return found
