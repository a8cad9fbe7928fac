"""Replication analysis: along which axes of the mesh a value is the same on all devices.

It fails closed: of a primitive without a record, nothing is known. Constants are the same
everywhere, an input along the axes that its spec does not name; a collective adds its axes or takes
them away; all else is the same where all of its operands are. The types that JAX gives under
`check_vma=True` are not asked: they call results of branches, loops and callbacks the same
everywhere though they differ.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import bodies, open_jaxpr, operands_of_bodies, record_of

Same: TypeAlias = frozenset[Any]  # the names of axes along which all devices hold the same
Facts: TypeAlias = Mapping[Any, Same]  # by variable

NOWHERE: Same = frozenset()
_PURE_KINDS = ("plain", "call", "branch", "loop")  # equal operands give equal results


class Invariance:
    """Analysis of bodies; what it finds is kept, because loops ask for the same bodies again.

    `Same` is the set of mesh axes along which all devices hold the same value. A `scope` holds the
    axes of the shard_maps around a body: all that its collectives may name.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Any, Same]] = {}

    def facts(self, body: Any, ins: Sequence[Same], scope: Same) -> Facts:
        """Return for every variable of a body the axes along which it is the same on all devices.

        Of `{ lambda ; a b. let c = mul a b in (c,) }` with `ins` of `[{"i", "j"}, {"i"}]` that is
        `{a: {"i", "j"}, b: {"i"}, c: {"i"}}`.

        Args:
          body: open or closed.
          ins: these axes for each input variable.
          scope: the axes of the shard_maps around the body; constants are the same along them all.
        """
        body = open_jaxpr(body)
        key = (body, tuple(ins), scope)
        if key in self._known:
            return self._known[key]
        facts: dict[Any, Same] = dict.fromkeys(body.constvars, scope)
        facts.update(zip(body.invars, ins, strict=True))
        for eqn in body.eqns:
            operands = same_of(eqn.invars, facts, scope)
            facts.update(zip(eqn.outvars, self._results(eqn, operands, scope), strict=True))
        self._known[key] = facts
        return facts

    def outputs(self, body: Any, ins: Sequence[Same], scope: Same) -> list[Same]:
        """Return for each result of a body the axes along which it is the same; see `facts`."""
        return same_of(open_jaxpr(body).outvars, self.facts(body, ins, scope), scope)

    def body_inputs(self, eqn: JaxprEqn, ins: Sequence[Same], scope: Same) -> list[list[Same]]:
        """Return for each body of an equation the axes along which each of its inputs is the same.

        `ins` has these axes for the operands, and `scope` is that of the equation. In a loop they
        hold for all iterations. Inputs of other bodies, as of a custom primitive, get no axes.
        """
        kind = record_of(eqn).kind
        if kind == "region":
            # Along a new axis, all devices get the same block if the spec does not name the axis.
            new_axes = frozenset(eqn.params["newly_manual_axes"]) - scope
            pairs = zip(ins, map(cut_along, eqn.params["in_specs"]), strict=True)
            return [[same | (new_axes - sharded_over) for same, sharded_over in pairs]]
        if kind not in ("branch", "call", "loop"):
            return [[NOWHERE] * len(open_jaxpr(body).invars) for body in bodies(eqn)]
        if kind == "loop":
            ins = self._operands_in_all_iterations(eqn, list(ins), scope)
        return [[ins[n] for n in operands] for operands in operands_of_bodies(eqn)]

    def _results(self, eqn: JaxprEqn, operands: list[Same], scope: Same) -> Sequence[Same]:
        """Return for each result of an equation the axes along which it is the same.

        `operands` has these axes for each operand: for `c = mul a b`, `[{"i", "j"}, {"i"}]` gives
        `[{"i"}]`. A callback and an unknown primitive give no axes.
        """
        match record_of(eqn).kind:
            case "plain":
                # How it connects its bodies is not known, so they may hold nothing that differs.
                inner = itertools.chain(*map(interpreter.equations, bodies(eqn)))
                is_known = all(record_of(e).kind in _PURE_KINDS for e in inner)
                axes = scope.intersection(*operands) if is_known else NOWHERE
            case "collective":
                axes = _same_after_collective(eqn, scope.intersection(*operands), scope)
            case "call":
                return self.outputs(bodies(eqn)[0], operands, scope)
            case "branch":  # devices that take different branches get different results
                index, *others = operands
                branches = [self.outputs(body, others, scope) for body in bodies(eqn)]
                return [index.intersection(*results) for results in zip(*branches, strict=True)]
            case "loop":
                settled = self._operands_in_all_iterations(eqn, operands, scope)
                counts = interpreter.loop_counts(eqn)
                carries = settled[counts.constants : counts.first_x]
                if _compat.name_of(eqn) == "while":
                    return carries
                outs = self.outputs(eqn.params["jaxpr"], settled, scope)
                return [*carries, *outs[counts.carries :]]
            case "region":
                (inputs,) = self.body_inputs(eqn, operands, scope)
                inside = scope | frozenset(eqn.params["newly_manual_axes"])
                return [same & scope for same in self.outputs(bodies(eqn)[0], inputs, inside)]
            case "opaque" if (expanded := _compat.expand(eqn)) is not None:
                return self.outputs(expanded, operands, scope)
            case _:
                axes = NOWHERE
        return [axes] * len(eqn.outvars)

    def _operands_in_all_iterations(
        self, eqn: JaxprEqn, ins: list[Same], scope: Same
    ) -> list[Same]:
        """Return for each operand of a loop the axes along which it is the same in all iterations.

        `ins` has these axes before the loop. A carry loses axes with each pass over the body, until
        no further one is lost: 0, to which each iteration adds `axis_index("i")`, is the same along
        "i" only before the first one.
        """
        counts = interpreter.loop_counts(eqn)
        while True:
            inputs = [[ins[n] for n in operands] for operands in operands_of_bodies(eqn)]
            outs = map(self.outputs, bodies(eqn), inputs, itertools.repeat(scope))
            *conditions, results = outs  # a scan has no condition
            # Where the condition of a while loop differs, devices leave it at different times.
            continues = scope.intersection(*itertools.chain(*conditions))
            settled = list(ins)
            for number in range(counts.carries):
                settled[counts.constants + number] &= results[number] & continues
            if settled == ins:
                return ins
            ins = settled


def _same_after_collective(eqn: JaxprEqn, same: Same, scope: Same) -> Same:
    """Return the axes along which a collective's results are the same; `same` is of its operands.

    A psum over "i" of what is the same along "j" gives `{"i", "j"}`; axis_index takes "i" away.
    """
    record, over = record_of(eqn), frozenset(interpreter.named_axes(eqn))
    if record.over == "unknown":
        return NOWHERE
    # In groups, devices of other groups get other results. And even of equal operands, a scatter
    # gives other parts, and a permutation gives zeros to some.
    is_unified = record.makes_alike and eqn.params.get("axis_index_groups") is None
    return same | (over & scope) if is_unified else same - over


def same_of(atoms: Sequence[Any], facts: Facts, scope: Same) -> list[Same]:
    """Return for each atom the axes along which it is the same: of a literal, those of `scope`."""
    return [scope if isinstance(atom, Literal) else facts[atom] for atom in atoms]


def cut_along(spec: Any) -> Same:
    """Return the mesh axes that a PartitionSpec shards over."""
    return frozenset(itertools.chain(*map(interpreter.names_of, spec)))
