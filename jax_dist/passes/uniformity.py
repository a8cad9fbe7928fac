"""Along which axes of the mesh is a value the same on all devices.

Fails closed: of a primitive that is not named here, nothing is known. Constants are the same
everywhere, an input along the axes that its spec does not cut; a collective adds its axes or takes
them away; all else is the same where all of its operands are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.passes.interpreter import CALLS, DETERMINISTIC, Atom, bodies, open_jaxpr

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
        if key in self._known:
            return self._known[key]
        facts: dict[Var, Same] = dict.fromkeys(body.constvars, scope.axes)
        for var, same in zip(body.invars, ins, strict=True):
            facts[var] = _and_typed(same, var, scope)
        for eqn in body.eqns:
            operands = [same_of(atom, facts, scope) for atom in eqn.invars]
            for var, same in zip(eqn.outvars, self._results(eqn, operands, scope), strict=True):
                facts[var] = _and_typed(same, var, scope)
        self._known[key] = facts
        return facts

    def of_body_inputs(
        self, eqn: JaxprEqn, ins: Sequence[Same], scope: AxisScope
    ) -> list[list[Same]]:
        """For each body of an equation, what is known of its inputs.

        `ins` is known of the operands, and `scope` is that of the equation.
        """
        ins, inner = list(ins), bodies(eqn)
        match eqn.primitive.name:
            case "cond":
                return [ins[1:] for _ in inner]
            case "scan":
                return [self._scan_inputs(eqn, ins, scope)]
            case "while":
                return self._while_inputs(eqn, ins, scope)
            case "shard_map":
                # Along a new axis, a block is the same if its spec cuts nothing along it.
                new = scope.inside(eqn).axes - scope.axes
                pairs = zip(ins, eqn.params["in_specs"], strict=True)
                return [[same | (new - cut_along(spec)) for same, spec in pairs]]
            case name if name in CALLS:
                return [ins for _ in inner]
        return [[NOWHERE] * len(open_jaxpr(body).invars) for body in inner]

    def outputs(self, jaxpr: Any, ins: Sequence[Same], scope: AxisScope) -> list[Same]:
        facts = self.facts(jaxpr, ins, scope)
        return [same_of(atom, facts, scope) for atom in open_jaxpr(jaxpr).outvars]

    def _results(self, eqn: JaxprEqn, operands: list[Same], scope: AxisScope) -> Sequence[Same]:
        match eqn.primitive.name:
            case "cond":  # devices that take other branches get other results
                branches = [self.outputs(b, operands[1:], scope) for b in eqn.params["branches"]]
                return [operands[0].intersection(*each) for each in zip(*branches, strict=True)]
            case "scan":
                settled = self._scan_inputs(eqn, operands, scope)
                outs = self.outputs(eqn.params["jaxpr"], settled, scope)
                layout = _compat.scan_layout(eqn.params, len(operands), len(eqn.outvars))
                for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
                    outs[out] = settled[into]  # of no iterations, the result is what came in
                return outs
            case "while":
                inputs = self._while_inputs(eqn, operands, scope)
                return inputs[0][-len(eqn.outvars) :] if eqn.outvars else []
            case "shard_map":
                (inputs,) = self.of_body_inputs(eqn, operands, scope)
                outs = self.outputs(eqn.params["jaxpr"], inputs, scope.inside(eqn))
                return [same & scope.axes for same in outs]
            case name if name in CALLS:
                return self.outputs(bodies(eqn)[0], operands, scope)
            case name if name in DETERMINISTIC:
                return [scope.axes.intersection(*operands)] * len(eqn.outvars)
            # Of a collective; within groups, devices of other groups get other results.
            case name if name in MADE_ALIKE or name in _MADE_DIFFERENT:
                same, over = scope.axes.intersection(*operands), frozenset(axes_of(eqn))
                alike = name in MADE_ALIKE and eqn.params.get("axis_index_groups") is None
                return [same | over if alike else same - over] * len(eqn.outvars)
        return [NOWHERE] * len(eqn.outvars)

    def _scan_inputs(self, eqn: JaxprEqn, ins: list[Same], scope: AxisScope) -> list[Same]:
        layout = _compat.scan_layout(eqn.params, len(ins), len(eqn.outvars))
        while True:
            outs = self.outputs(eqn.params["jaxpr"], ins, scope)
            carried = list(ins)
            for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
                carried[into] = ins[into] & outs[out]
            if carried == ins:
                return ins
            ins = carried

    def _while_inputs(self, eqn: JaxprEqn, ins: list[Same], scope: AxisScope) -> list[list[Same]]:
        """Of the condition and of the body. Devices may leave the loop at different times."""
        params = eqn.params
        for_cond = ins[: params["cond_nconsts"]]
        for_body = ins[len(for_cond) : len(for_cond) + params["body_nconsts"]]
        carries = ins[len(for_cond) + len(for_body) :]
        while True:
            parts = {"cond_jaxpr": [*for_cond, *carries], "body_jaxpr": [*for_body, *carries]}
            (again,) = self.outputs(params["cond_jaxpr"], parts["cond_jaxpr"], scope)
            outs = self.outputs(params["body_jaxpr"], parts["body_jaxpr"], scope)
            carried = [before & out & again for before, out in zip(carries, outs, strict=True)]
            if carried == carries:
                return [parts[name] for name in params if name in parts]  # as `bodies` gives them
            carries = carried


# A sum, a maximum, a gather.
MADE_ALIKE = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
# Even of equal inputs: a scatter gives other parts, a permutation zeros to some.
_MADE_DIFFERENT = ("axis_index", "ppermute", "all_to_all", "reduce_scatter")


def same_of(atom: Atom, facts: Facts, scope: AxisScope) -> Same:
    return scope.axes if isinstance(atom, Literal) else facts[atom]


def axes_of(eqn: JaxprEqn) -> tuple[AxisName, ...]:
    """The axes that a collective names: in `axes` or `axis_name`, as one name or several."""
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _and_typed(same: Same, var: Var, scope: AxisScope) -> Same:
    if not scope.typed or not hasattr(var.aval, "manual_axis_type"):  # a token has none
        return same
    return same | (scope.typed - _compat.varying_axes(var.aval))


def cut_along(spec: Any) -> Same:
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    return frozenset(name for part in parts for name in part if name is not None)
