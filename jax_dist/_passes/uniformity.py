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


class Invariance:
    """Analysis of bodies, whose facts are kept because loops ask for the same ones again.

    `Same` is the set of mesh axes along which all devices hold the same value. A `scope` holds the
    axes of the shard_maps around a body: all that its collectives may name.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Any, Same]] = {}

    def facts(self, body: Any, ins: Sequence[Same], scope: Same) -> Facts:
        """Return for every variable of a body the axes along which it is the same on all devices.

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
        hold for all iterations.
        """
        match record_of(eqn).kind:
            case "branch" | "call" | "loop" as kind:
                if kind == "loop":
                    ins = self._operands_in_all_iterations(eqn, list(ins), scope)
                return [[ins[n] for n in operands] for operands in operands_of_bodies(eqn)]
            case "region":
                # Along a new axis, a block is the same if its spec shards nothing over it.
                new = frozenset(eqn.params["newly_manual_axes"]) - scope
                pairs = zip(ins, map(cut_along, eqn.params["in_specs"]), strict=True)
                return [[same | (new - sharded_over) for same, sharded_over in pairs]]
        return [[NOWHERE] * len(open_jaxpr(body).invars) for body in bodies(eqn)]

    def _results(self, eqn: JaxprEqn, operands: list[Same], scope: Same) -> Sequence[Same]:
        """Return for each result of an equation the axes along which it is the same.

        `operands` has these axes for each operand. A primitive without a record and a callback may
        give each device another result, so they give no axes.
        """
        record, count = record_of(eqn), len(eqn.outvars)
        match record.kind:
            case "plain":
                # How it connects its bodies is not known, so they may hold nothing that differs.
                inner = [e for body in bodies(eqn) for e in interpreter.equations(body)]
                kinds = {record_of(e).kind for e in inner}
                is_known = kinds <= {"plain", "call", "branch", "loop"}
                return [scope.intersection(*operands) if is_known else NOWHERE] * count
            case "call":
                return self.outputs(bodies(eqn)[0], operands, scope)
            case "branch":  # devices that take other branches get other results
                branches = [self.outputs(body, operands[1:], scope) for body in bodies(eqn)]
                return [operands[0].intersection(*facts) for facts in zip(*branches, strict=True)]
            case "loop":
                settled = self._operands_in_all_iterations(eqn, operands, scope)
                first, count = interpreter.loop_counts(eqn)
                carries = settled[first : first + count]  # without any iteration, the operands
                if _compat.name_of(eqn) == "while":
                    return carries
                return [*carries, *self.outputs(eqn.params["jaxpr"], settled, scope)[count:]]
            case "region":
                (inputs,) = self.body_inputs(eqn, operands, scope)
                inside = scope | frozenset(eqn.params["newly_manual_axes"])
                outs = self.outputs(bodies(eqn)[0], inputs, inside)
                return [same & scope for same in outs]
            case "collective" if record.over != "unknown":
                # Within groups, devices of other groups get other results. Even of equal operands,
                # a scatter gives other parts, and a permutation gives zeros to some.
                same, over = scope.intersection(*operands), frozenset(interpreter.named_axes(eqn))
                is_unified = record.makes_alike and eqn.params.get("axis_index_groups") is None
                return [same | (over & scope) if is_unified else same - over] * count
        if (body := _compat.expand(eqn)) is not None:
            return self.outputs(body, operands, scope)
        return [NOWHERE] * count

    def _operands_in_all_iterations(
        self, eqn: JaxprEqn, ins: list[Same], scope: Same
    ) -> list[Same]:
        """Return for each operand of a loop the axes along which it is the same in all iterations.

        A carry loses axes with each pass over the body, until no further one is lost: 0, to which
        each iteration adds `axis_index("i")`, is the same along "i" only before the first one.
        """
        names = interpreter.bodies_of_while(eqn) or ["jaxpr"]
        while True:
            inputs = [[ins[n] for n in operands] for operands in operands_of_bodies(eqn)]
            pairs = zip(names, inputs, strict=True)
            outs = {name: self.outputs(eqn.params[name], part, scope) for name, part in pairs}
            # Along other axes than these, devices may leave a while loop at different times.
            same_count = scope.intersection(*outs.pop("cond_jaxpr", ()))
            (results,), after_iteration = outs.values(), list(ins)
            first, count = interpreter.loop_counts(eqn)
            for result in range(count):
                same = ins[first + result] & results[result] & same_count
                after_iteration[first + result] = same
            if after_iteration == ins:
                return ins
            ins = after_iteration


def same_of(atoms: Sequence[Any], facts: Facts, scope: Same) -> list[Same]:
    """Return for each atom the axes along which it is the same: of a literal, those of `scope`."""
    return [scope if isinstance(atom, Literal) else facts[atom] for atom in atoms]


def cut_along(spec: Any) -> Same:
    """Return the mesh axes that a PartitionSpec shards over."""
    return frozenset(itertools.chain(*map(interpreter.names_of, spec)))
