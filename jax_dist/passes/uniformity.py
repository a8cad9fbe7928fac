"""Along which axes of the mesh is a value the same on all devices.

Fails closed: of a primitive that is not named here, nothing is known. Constants are the same
everywhere, an input along the axes that its spec does not cut; a collective adds its axes or takes
them away; all else is the same where all of its operands are.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.passes.interpreter import (
    CALLS,
    DETERMINISTIC,
    Atom,
    bodies,
    open_jaxpr,
)

AxisName: TypeAlias = Any  # hashable; nearly always a string
Same: TypeAlias = frozenset[AxisName]  # the axes along which all devices hold the same
Facts: TypeAlias = Mapping[Var, Same]

NOWHERE: Same = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class AxisScope:
    """The axes of the shard_maps around an equation."""

    axes: Same  # all that collectives may name
    typed: Same  # those of them for which the types tell what varies (check_vma=True)

    def inside(self, eqn: JaxprEqn) -> "AxisScope":
        """The scope of the body of a shard_map."""
        new = frozenset(eqn.params["newly_manual_axes"])
        # Types made under check_vma=False say "varies nowhere" of everything.
        typed = self.typed | new if eqn.params["check_vma"] else NOWHERE
        return AxisScope(self.axes | new, typed)


OUTSIDE = AxisScope(NOWHERE, NOWHERE)


class Invariance:
    """Finds the facts of bodies, and keeps them: loops ask for the same ones again."""

    def __init__(self) -> None:
        self._known: dict[tuple[Jaxpr, tuple[Same, ...], AxisScope], dict[Var, Same]] = {}

    def facts(self, jaxpr: Any, ins: Sequence[Same], scope: AxisScope) -> Facts:
        """Of every variable of a body.

        Args:
          jaxpr: open or closed.
          ins: one for each input variable.
          scope: the axes around the body.
        """
        body = open_jaxpr(jaxpr)
        key = (body, tuple(ins), scope)
        if key not in self._known:
            self._known[key] = self._walk(body, ins, scope)
        return self._known[key]

    def of_body_inputs(
        self, eqn: JaxprEqn, ins: Sequence[Same], scope: AxisScope
    ) -> list[list[Same]]:
        """For each body of an equation, what is known of its inputs.

        `ins` is known of the operands, and `scope` is that of the equation.
        """
        name = eqn.primitive.name
        if name in _BODIES:
            return _BODIES[name](self, eqn, list(ins), scope)
        return [[NOWHERE] * len(open_jaxpr(body).invars) for body in bodies(eqn)]

    def outputs(self, jaxpr: Any, ins: Sequence[Same], scope: AxisScope) -> list[Same]:
        facts = self.facts(jaxpr, ins, scope)
        return [same_of(atom, facts, scope) for atom in open_jaxpr(jaxpr).outvars]

    def _walk(self, body: Jaxpr, ins: Sequence[Same], scope: AxisScope) -> dict[Var, Same]:
        facts: dict[Var, Same] = dict.fromkeys(body.constvars, scope.axes)
        for var, same in zip(body.invars, ins, strict=True):
            facts[var] = _and_typed(same, var, scope)
        for eqn in body.eqns:
            operands = [same_of(atom, facts, scope) for atom in eqn.invars]
            for var, same in zip(eqn.outvars, self._results(eqn, operands, scope), strict=True):
                facts[var] = _and_typed(same, var, scope)
        return facts

    def _results(self, eqn: JaxprEqn, operands: list[Same], scope: AxisScope) -> Sequence[Same]:
        name = eqn.primitive.name
        if name in _RESULTS:
            return _RESULTS[name](self, eqn, operands, scope)
        if name in _COLLECTIVES:
            same = _COLLECTIVES[name](eqn, _everywhere(operands, scope), scope)
        elif name in DETERMINISTIC:
            same = _everywhere(operands, scope)
        else:
            same = NOWHERE
        return [same] * len(eqn.outvars)


def same_of(atom: Atom, facts: Facts, scope: AxisScope) -> Same:
    return scope.axes if isinstance(atom, Literal) else facts[atom]


def _everywhere(operands: Sequence[Same], scope: AxisScope) -> Same:
    return scope.axes.intersection(*operands)


def axes_of(eqn: JaxprEqn) -> tuple[AxisName, ...]:
    """The axes that a collective names: in `axes` or `axis_name`, as one name or several."""
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _and_typed(same: Same, var: Var, scope: AxisScope) -> Same:
    if not scope.typed or not hasattr(var.aval, "manual_axis_type"):  # a token has none
        return same
    return same | (scope.typed - _compat.varying_axes(var.aval))


# ---- collectives


def _made_alike(eqn: JaxprEqn, same: Same, scope: AxisScope) -> Same:
    """A sum, a maximum, a gather: within groups, devices of other groups get other results."""
    del scope
    alike = frozenset(axes_of(eqn))
    return same - alike if eqn.params.get("axis_index_groups") is not None else same | alike


def _made_different(eqn: JaxprEqn, same: Same, scope: AxisScope) -> Same:
    """Even of equal inputs: a scatter gives other parts, a permutation zeros to some."""
    del scope
    return same - frozenset(axes_of(eqn))


_COLLECTIVES: dict[str, Callable[[JaxprEqn, Same, AxisScope], Same]] = {
    **dict.fromkeys(
        ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"),
        _made_alike,
    ),
    **dict.fromkeys(("axis_index", "ppermute", "all_to_all", "reduce_scatter"), _made_different),
}


# ---- equations with bodies: what their inputs and results are


def _call_inputs(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> list[list[Same]]:
    del invariance, scope
    return [ins for _ in bodies(eqn)]


def _call_results(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> Sequence[Same]:
    return invariance.outputs(bodies(eqn)[0], ins, scope)


def _cond_inputs(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> list[list[Same]]:
    del invariance, scope
    return [ins[1:] for _ in bodies(eqn)]


def _cond_results(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> Sequence[Same]:
    """Devices that take other branches get other results."""
    branches = [invariance.outputs(branch, ins[1:], scope) for branch in eqn.params["branches"]]
    return [ins[0].intersection(*results) for results in zip(*branches, strict=True)]


def _scan_inputs(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> list[list[Same]]:
    layout = _compat.scan_layout(eqn.params, len(ins), len(eqn.outvars))
    while True:
        outs = invariance.outputs(eqn.params["jaxpr"], ins, scope)
        carried = list(ins)
        for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
            carried[into] = ins[into] & outs[out]
        if carried == ins:
            return [ins]
        ins = carried


def _scan_results(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> Sequence[Same]:
    (settled,) = _scan_inputs(invariance, eqn, ins, scope)
    outs = invariance.outputs(eqn.params["jaxpr"], settled, scope)
    layout = _compat.scan_layout(eqn.params, len(ins), len(eqn.outvars))
    for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
        outs[out] = settled[into]  # of no iterations, the result is what came in
    return outs


def _while_inputs(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> list[list[Same]]:
    """Of the condition and of the body. Devices may leave the loop at different times."""
    params = eqn.params
    for_cond = ins[: params["cond_nconsts"]]
    for_body = ins[len(for_cond) : len(for_cond) + params["body_nconsts"]]
    carries = ins[len(for_cond) + len(for_body) :]
    while True:
        (again,) = invariance.outputs(params["cond_jaxpr"], [*for_cond, *carries], scope)
        outs = invariance.outputs(params["body_jaxpr"], [*for_body, *carries], scope)
        carried = [before & out & again for before, out in zip(carries, outs, strict=True)]
        if carried == carries:
            parts = {
                "cond_jaxpr": [*for_cond, *carries],
                "body_jaxpr": [*for_body, *carries],
            }
            return [parts[name] for name in params if name in parts]  # as `bodies` gives them
        carries = carried


def _while_results(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> Sequence[Same]:
    inputs = _while_inputs(invariance, eqn, ins, scope)
    return inputs[0][-len(eqn.outvars) :] if eqn.outvars else []


def _shard_map_inputs(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> list[list[Same]]:
    """Along a new axis, a block is the same if its spec does not cut anything along it."""
    del invariance
    new = scope.inside(eqn).axes - scope.axes
    specs = eqn.params["in_specs"]
    return [[same | (new - cut_along(spec)) for same, spec in zip(ins, specs, strict=True)]]


def _shard_map_results(
    invariance: Invariance, eqn: JaxprEqn, ins: list[Same], scope: AxisScope
) -> Sequence[Same]:
    (inputs,) = _shard_map_inputs(invariance, eqn, ins, scope)
    outs = invariance.outputs(eqn.params["jaxpr"], inputs, scope.inside(eqn))
    return [same & scope.axes for same in outs]


def cut_along(spec: Any) -> Same:
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    return frozenset(name for part in parts for name in part if name is not None)


_BODIES = {
    **dict.fromkeys(CALLS, _call_inputs),
    "cond": _cond_inputs,
    "scan": _scan_inputs,
    "shard_map": _shard_map_inputs,
    "while": _while_inputs,
}
_RESULTS = {
    **dict.fromkeys(CALLS, _call_results),
    "cond": _cond_results,
    "scan": _scan_results,
    "shard_map": _shard_map_results,
    "while": _while_results,
}
