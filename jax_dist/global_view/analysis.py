"""Analysis of a step: which values are uniform, and how these are wanted sharded.

A value is uniform if all devices along the mapped axis have the same one, and else varies. The
facts are those of `_passes.uniformity`. A leaf of the state is taken to be uniform until the step
makes it vary.

How a value is wanted sharded follows from the shardings of the state. A new parameter is the old
one less a part of the gradient, element by element; if it is sharded, so may all be that it is made
of. So the sum of a gradient over devices can be scattered. From the results, this goes backwards
through equations that work element by element, and through the bodies of loops and branches. What
is made of such shards, element by element or by moving dimensions, is sharded as they are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import Atom, record_of
from jax_dist._passes.uniformity import NOWHERE, Invariance, Same


class AxisAnalysis:
    """Analysis of which values of a step are uniform along the mapped axis, which has this name."""

    def __init__(self, name: Any):
        self.name = name
        self._scope: Same = frozenset({name})
        self._invariance = Invariance()

    def uniform_values(self, body: Any, ins: Sequence[bool]) -> dict[Var, bool]:
        """Return for every variable of a body whether it is uniform."""
        facts = self._invariance.facts(body, self._same(ins), self._scope)
        return {var: self.name in same for var, same in facts.items()}

    def uniform_in_bodies(self, eqn: JaxprEqn, ins: Sequence[bool]) -> list[list[bool]]:
        """Return for each body of a loop or branch whether each input is always uniform."""
        inputs = self._invariance.body_inputs(eqn, self._same(ins), self._scope)
        return [[self.name in same for same in body] for body in inputs]

    def settle_state(
        self, body: Any, ins: Sequence[bool], pairs: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """Return for every input whether it is uniform in all calls of a step that feeds its state.

        `pairs` are the numbers of the input and the result that are one leaf of the state. A leaf
        whose result varies comes in varying at the next call, which may make other leaves vary.
        """
        ins = list(ins)
        while True:
            results = self._invariance.outputs(body, self._same(ins), self._scope)
            newly_varying = [n for n, out in pairs if ins[n] and self.name not in results[out]]
            if not newly_varying:
                return ins
            for number in newly_varying:
                ins[number] = False

    def is_used_by(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation, or one in its bodies, is a collective over the axis."""
        return interpreter.holds(eqn, lambda inner: self.name in interpreter.named_axes(inner))

    def is_unified_by(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation, or one in its bodies, makes varying values uniform (psum)."""

        def unifies(inner: JaxprEqn) -> bool:
            has_groups = inner.params.get("axis_index_groups") is not None
            is_over_axis = self.name in interpreter.named_axes(inner)
            return is_over_axis and record_of(inner).makes_alike and not has_groups

        return interpreter.holds(eqn, unifies)

    def _same(self, uniform: Sequence[bool]) -> list[Same]:
        return [self._scope if is_uniform else NOWHERE for is_uniform in uniform]


def find_origin(body: Jaxpr, uniform: Mapping[Var, bool], result: Atom) -> str | None:
    """Return where a result of `body` began to vary, "train.py:12 (add)"; None if it is uniform.

    That is the nearest equation with a varying result of uniform operands, such as `axis_index`; if
    there is none, because inputs vary, the equation that computes the result.
    """
    if not isinstance(result, Var) or uniform[result]:
        return None
    producers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    if result not in producers:
        return "an unknown line (as an argument does)"
    origin = producers[result]
    queue = [result]
    for var in queue:  # breadth-first: operands are appended while the loop runs
        eqn = producers.pop(var, None)
        if eqn is None:  # an input of the body, or visited before
            continue
        varying_operands = [var for var in variables(eqn.invars) if not uniform[var]]
        if not varying_operands:
            origin = eqn
            break
        queue += varying_operands
    return f"{interpreter.source_line(origin) or 'an unknown line'} ({_compat.name_of(origin)})"


def variables(atoms: Sequence[Atom]) -> list[Var]:
    """Return the variables among the atoms, without the literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


Specs: TypeAlias = dict[Var, Any]  # a PartitionSpec for each value that is wanted sharded


@dataclasses.dataclass(frozen=True, slots=True)
class ValueFacts:
    """Facts about the values of one body."""

    uniform: Mapping[Var, bool]
    specs: Specs  # how uniform values are wanted sharded, where that is known

    def is_uniform(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or self.uniform[atom]

    def spec_of(self, atom: Atom) -> P | None:
        return None if isinstance(atom, Literal) else self.specs.get(atom)


def wanted_specs(body: Jaxpr, results: Sequence[Any], uniform: Mapping[Var, bool]) -> Specs:
    """Return the specs wanted of the uniform values of a body, given those of its results.

    None leaves a result open. A varying value is sharded over the mapped axis already.
    """
    specs: Specs = {}

    def want(atoms: Sequence[Any], wanted: Sequence[Any]) -> None:
        """Record specs for uniform variables; the first spec that a variable gets stays."""
        for atom, spec in zip(atoms, wanted, strict=True):
            if spec is not None and isinstance(atom, Var) and uniform.get(atom, True):
                specs.setdefault(atom, spec)

    want(body.outvars, results)
    for eqn in reversed(body.eqns):
        wanted = [specs.get(var) for var in eqn.outvars]
        if any(spec is not None for spec in wanted):
            want(eqn.invars, operand_specs(eqn, wanted))
    for eqn in body.eqns:
        if len(eqn.outvars) == 1:
            want(eqn.outvars, [_result_spec(eqn, specs)])
    return specs


def wanted_in_bodies(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[list[Any]]:
    """Return for each body the specs of its results, given those of the equation; None: open."""
    if _compat.name_of(eqn) == "while":
        of_body = {"cond_jaxpr": [None], "body_jaxpr": list(wanted)}
        return [of_body[name] for name in interpreter.bodies_of_while(eqn)]
    results = list(wanted)
    if _compat.name_of(eqn) == "scan":
        _, carried = interpreter.loop_counts(eqn)
        for n in range(carried, len(results)):  # stacked: the body's lack the first dimension
            spec = results[n]
            results[n] = P(*spec[1:]) if spec is not None and tuple(spec[:1]) == (None,) else None
    return [list(results) for _ in interpreter.bodies(eqn)]


def operand_specs(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[Any]:
    """Return the specs that the operands of an equation should have, given those of its results."""
    record = record_of(eqn)
    if record.elementwise:
        shape = _shape(eqn.outvars[0])
        return [wanted[0] if _shape(atom) == shape else None for atom in eqn.invars]
    if record.kind in ("call", "branch", "loop"):
        return _through_bodies(eqn, wanted)
    return [None] * len(eqn.invars)


def _through_bodies(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[Any]:
    """Return the spec that the bodies of a loop or branch want for each operand; None: none.

    `wanted` has the specs of the results. The operands from number `first_scanned` on are those
    that a scan slices: an iteration reads them without the first dimension.
    """
    specs: list[Any] = [None] * len(eqn.invars)
    is_scan = _compat.name_of(eqn) == "scan"
    first_scanned = sum(interpreter.loop_counts(eqn)) if is_scan else len(eqn.invars)
    results, numbers = wanted_in_bodies(eqn, wanted), interpreter.operands_of_bodies(eqn)
    for jaxpr, of_results, operands in zip(interpreter.bodies(eqn), results, numbers, strict=True):
        body = interpreter.open_jaxpr(jaxpr)
        body_specs = wanted_specs(body, of_results, {})
        for var, number in zip(body.invars, operands, strict=True):
            spec = body_specs.get(var)
            if specs[number] is None and spec is not None:
                specs[number] = spec if number < first_scanned else P(None, *spec)
    return specs


def _result_spec(eqn: JaxprEqn, specs: Specs) -> P | None:
    """Return the spec of a cast, transpose, squeeze or slice of a sharded value, else None."""
    operands = [var for var in variables(eqn.invars) if var in specs]
    shape = _shape(eqn.outvars[0])
    if record_of(eqn).elementwise:
        return next((specs[var] for var in operands if _shape(var) == shape), None)
    if not operands:
        return None
    before, spec = _shape(operands[0]), specs[operands[0]]
    parts = [*spec, *[None] * (len(before) - len(spec))]
    match _compat.name_of(eqn):
        case "transpose":
            return P(*[parts[dim] for dim in eqn.params["permutation"]])
        case "squeeze":
            dropped = eqn.params["dimensions"]
            return P(*[part for dim, part in enumerate(parts) if dim not in dropped])
        case "slice":
            sharded = [dim for dim, part in enumerate(parts) if part is not None]
            return spec if all(before[dim] == shape[dim] for dim in sharded) else None
    return None


def _shape(atom: Atom) -> tuple[int, ...]:
    return atom.aval.shape
