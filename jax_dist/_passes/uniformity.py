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

# Names of mesh axes. Of a value, those along which it is replicated: all devices hold the same.
Axes: TypeAlias = frozenset[Any]

NO_AXES: Axes = frozenset()


class ReplicationAnalysis:
    """Analysis of along which mesh axes the values in jaxprs are replicated.

    `manual_axes` are those of all shard_maps around a jaxpr, which its collectives may name. The
    axes of its values are cached, because loops ask for the same jaxprs again.
    """

    def __init__(self) -> None:
        self._cache: dict[Hashable, dict[Any, Axes]] = {}

    def analyze_values(
        self, jaxpr: Any, inputs: Sequence[Axes], manual_axes: Axes
    ) -> Mapping[Any, Axes]:
        """Return for every variable of a jaxpr the mesh axes along which it is replicated.

        `inputs` has these axes for the inputs. Of `{ lambda ; a b. let c = mul a b in (c,) }` with
        `inputs` of `[{"i", "j"}, {"i"}]` that is `{a: {"i", "j"}, b: {"i"}, c: {"i"}}`. Constants
        are replicated along all `manual_axes`.
        """
        jaxpr = open_jaxpr(jaxpr)
        key = (jaxpr, tuple(inputs), manual_axes)
        if key in self._cache:
            return self._cache[key]
        axes_of: dict[Any, Axes] = dict.fromkeys(jaxpr.constvars, manual_axes)
        axes_of.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = look_up_axes(eqn.invars, axes_of, manual_axes)
            results = self._analyze_eqn(eqn, operands, manual_axes)
            axes_of.update(zip(eqn.outvars, results, strict=True))
        self._cache[key] = axes_of
        return axes_of

    def analyze_results(self, jaxpr: Any, inputs: Sequence[Axes], manual_axes: Axes) -> list[Axes]:
        """Return the axes along which a jaxpr's results are replicated; see `analyze_values`."""
        axes_of = self.analyze_values(jaxpr, inputs, manual_axes)
        return look_up_axes(open_jaxpr(jaxpr).outvars, axes_of, manual_axes)

    def analyze_body_inputs(
        self, eqn: JaxprEqn, operands: list[Axes], manual_axes: Axes
    ) -> list[list[Axes]]:
        """Return for each body of an equation the axes along which its inputs are replicated.

        `operands` has these axes for each operand of the equation. For `cond index a b` with two
        branches, `[{"i"}, {"i"}, {}]` gives `[[{"i"}, {}], [{"i"}, {}]]`: both take a and b.
        `manual_axes` are the axes of the shard_maps around the equation.
        """
        kind = record_of(eqn).kind
        if kind == "shard_map":
            # Along its axes all devices get the same block, but along those that the spec names.
            new_axes = frozenset(eqn.params["newly_manual_axes"]) - manual_axes
            sharded_axes = map(find_sharded_axes, eqn.params["in_specs"])
            pairs = zip(operands, sharded_axes, strict=True)
            return [[replicated | (new_axes - sharded) for replicated, sharded in pairs]]
        if kind not in ("branch", "call", "loop"):  # how operands become inputs is not known
            return [[NO_AXES] * len(open_jaxpr(body).invars) for body in bodies(eqn)]
        if kind == "loop":
            operands = self._analyze_loop(eqn, operands, manual_axes)
        return [[operands[n] for n in numbers] for numbers in operands_of_bodies(eqn)]

    def _analyze_eqn(self, eqn: JaxprEqn, operands: list[Axes], manual_axes: Axes) -> list[Axes]:
        """Return for each result of an equation the mesh axes along which it is replicated.

        `operands` has these axes for each operand: for `c = mul a b`, `[{"i", "j"}, {"i"}]` gives
        `[{"i"}]`. `manual_axes` are all axes of the shard_maps around the equation: those that its
        collectives may name. What a callback or an unknown primitive returns may differ along all.
        """
        shared_axes = manual_axes.intersection(*operands)  # along which all operands are replicated
        axes = NO_AXES  # of each result
        match record_of(eqn).kind:
            case "plain":
                # How it connects its bodies is unknown: equal operands have to give equal results.
                inner = itertools.chain(*map(interpreter.equations, bodies(eqn)))
                if all(record_of(e).kind in ("plain", "call", "branch", "loop") for e in inner):
                    axes = shared_axes
            case "collective":
                axes = _apply_collective(eqn, shared_axes, manual_axes)
            case "call":
                return self.analyze_results(bodies(eqn)[0], operands, manual_axes)
            case "branch":  # devices that take different branches get different results
                index, *others = operands
                branches = [self.analyze_results(b, others, manual_axes) for b in bodies(eqn)]
                return [index.intersection(*results) for results in zip(*branches, strict=True)]
            case "loop":
                operands = self._analyze_loop(eqn, operands, manual_axes)
                counts = interpreter.loop_counts(eqn)
                carries = operands[counts.constants : counts.first_x]
                if _compat.name_of(eqn) == "while":
                    return carries
                results = self.analyze_results(eqn.params["jaxpr"], operands, manual_axes)
                return [*carries, *results[counts.carries :]]
            case "shard_map":
                (inputs,) = self.analyze_body_inputs(eqn, operands, manual_axes)
                axes_inside = manual_axes | frozenset(eqn.params["newly_manual_axes"])
                results = self.analyze_results(bodies(eqn)[0], inputs, axes_inside)
                return [replicated & manual_axes for replicated in results]
            case "opaque" if (expanded := _compat.expand(eqn)) is not None:
                return self.analyze_results(expanded, operands, manual_axes)
        return [axes] * len(eqn.outvars)

    def _analyze_loop(self, eqn: JaxprEqn, operands: list[Axes], manual_axes: Axes) -> list[Axes]:
        """Return the axes along which each operand of a loop is replicated in all iterations.

        `operands` has these axes before the first one. A carry that starts as 0 has `{"i"}` there;
        it has `{}` in the result if each iteration adds `axis_index("i")` to it.
        """
        counts = interpreter.loop_counts(eqn)
        replicated = list(operands)
        while True:
            # One body of a scan; the condition and the body of a while loop.
            *conditions, results = [
                self.analyze_results(body, [replicated[n] for n in numbers], manual_axes)
                for body, numbers in zip(bodies(eqn), operands_of_bodies(eqn), strict=True)
            ]
            # Along other axes than these, devices may leave the loop at different times.
            axes_of_condition = manual_axes.intersection(*itertools.chain(*conditions))
            before = list(replicated)
            for number in range(counts.carries):
                replicated[counts.constants + number] &= results[number] & axes_of_condition
            if replicated == before:  # one more iteration takes no further axis away
                return replicated


def _apply_collective(eqn: JaxprEqn, operand_axes: Axes, manual_axes: Axes) -> Axes:
    """Return the axes along which a collective's results are replicated, from its operands' axes.

    A psum over "i" of what is replicated along "j" gives `{"i", "j"}`. An all_to_all over "i" of
    what is replicated along both gives `{"j"}`: each device gets another part.
    """
    record, named_axes = record_of(eqn), frozenset(interpreter.named_axes(eqn))
    if record.collective == "unknown":
        return NO_AXES
    # In groups, devices of other groups get other results.
    if record.makes_replicated and eqn.params.get("axis_index_groups") is None:
        return operand_axes | (named_axes & manual_axes)
    return operand_axes - named_axes


def look_up_axes(atoms: Sequence[Any], axes_of: Mapping[Any, Axes], all_axes: Axes) -> list[Axes]:
    """Return the axes along which atoms are replicated: a literal is along `all_axes`."""
    return [all_axes if isinstance(atom, Literal) else axes_of[atom] for atom in atoms]


def find_sharded_axes(spec: Any) -> Axes:
    """Return the mesh axes that a PartitionSpec names: `{"i", "j"}` of `P(("i", "j"), None)`."""
    return frozenset(itertools.chain(*map(interpreter.names_of, spec)))
