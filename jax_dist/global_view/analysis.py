"""Analysis of a step: which values are uniform, and how these are wanted sharded.

A value is uniform if all devices along the mapped axis have the same one, and else varies. As the
state is sharded, so may be all that it is made of: a new parameter is the old one less a part of
the gradient, element by element, so the sum of a gradient over devices can be scattered.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import Atom, record_of
from jax_dist._passes.uniformity import NO_AXES, Axes, ReplicationAnalysis


class AxisAnalysis:
    """Analysis of which values of a step are uniform along the mapped axis, which has this name."""

    def __init__(self, name: Any):
        self.name = name
        self._scope: Axes = frozenset({name})
        self._replication = ReplicationAnalysis()

    def uniform_values(self, body: Any, ins: Sequence[bool]) -> dict[Var, bool]:
        """Return for every variable of a body whether it is uniform; `ins` says so of inputs."""
        facts = self._replication.analyze_values(body, self._same(ins), self._scope)
        return {var: self.name in same for var, same in facts.items()}

    def uniform_in_bodies(self, eqn: JaxprEqn, ins: Sequence[bool]) -> list[list[bool]]:
        """Return for each body of a loop or branch whether each input is always uniform."""
        inputs = self._replication.analyze_body_inputs(eqn, self._same(ins), self._scope)
        return [[self.name in same for same in body] for body in inputs]

    def settle_state(
        self, body: Any, ins: Sequence[bool], pairs: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """Return for each input whether all devices hold the same ("uniform") in every call.

        The new state that a step returns is an input of its next call: `pairs` are the (input,
        result) numbers of its leaves. In `mean, x -> mean + x`, with another x on each device, mean
        varies from the second call on: `[True, False]` becomes `[False, False]`.
        """
        uniform = list(ins)
        while True:  # each input that varies may make more results vary
            uniform_axes = self._replication.analyze_results(body, self._same(uniform), self._scope)
            varies = [self.name not in axes for axes in uniform_axes]  # for each result
            newly_varying = [number for number, out in pairs if uniform[number] and varies[out]]
            if not newly_varying:
                return uniform
            for number in newly_varying:
                uniform[number] = False

    def is_used_by(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation, or one in its bodies, is a collective over the axis."""
        return interpreter.holds(eqn, lambda inner: self.name in interpreter.named_axes(inner))

    def is_unified_by(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation, or one in its bodies, makes varying values uniform (psum)."""
        is_over_axis = lambda inner: self.name in interpreter.named_axes(inner)
        # With axis_index_groups, each group of devices has another result.
        has_groups = lambda inner: inner.params.get("axis_index_groups") is not None
        unifies = lambda e: is_over_axis(e) and record_of(e).makes_replicated and not has_groups(e)
        return interpreter.holds(eqn, unifies)

    def _same(self, uniform: Sequence[bool]) -> list[Axes]:
        """Return for each value the set of axes along which it is uniform: this one, or none."""
        return [self._scope if is_uniform else NO_AXES for is_uniform in uniform]


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


@dataclasses.dataclass(frozen=True, slots=True)
class ValueFacts:
    """Facts about the values of one body."""

    uniform: Mapping[Var, bool]
    specs: dict[Var, P]  # how uniform values are wanted sharded, where that is known

    def is_uniform(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or self.uniform[atom]

    def spec_of(self, atom: Atom) -> P | None:
        return None if isinstance(atom, Literal) else self.specs.get(atom)


def infer_specs(body: Jaxpr, results: Sequence[P | None], uniform: dict[Var, bool]) -> dict[Var, P]:
    """Return specs for a body's uniform values from those of its results; None leaves one open.

    For `new_w = w - 0.1 * g` with new_w at `P("i")`, also w, `0.1 * g` and g get `P("i")`.
    """
    specs: dict[Var, P] = {}

    def assign(atoms: Sequence[Any], atom_specs: Sequence[P | None]) -> None:
        """Set the specs of uniform variables that have none yet."""
        for atom, spec in zip(atoms, atom_specs, strict=True):
            if spec is not None and isinstance(atom, Var) and uniform.get(atom, True):
                specs.setdefault(atom, spec)

    assign(body.outvars, results)
    for eqn in reversed(body.eqns):  # from results to operands
        result_specs = [specs.get(var) for var in eqn.outvars]
        if any(spec is not None for spec in result_specs):
            assign(eqn.invars, operand_specs(eqn, result_specs))
    for eqn in body.eqns:  # then from operands to results, as to the transpose of a sharded w
        if len(eqn.outvars) == 1:
            assign(eqn.outvars, [_result_spec(eqn, specs)])
    return specs


def body_result_specs(eqn: JaxprEqn, result_specs: Sequence[P | None]) -> list[list[P | None]]:
    """Return for each body of a call, loop or branch how its results should be sharded.

    `result_specs` says so for the equation, with None for a result that is left open. A scan stacks
    what its iterations return: for `P(None, "i")` of all, `[T, *s]`, one `[*s]` has `P("i")`.
    """
    name = _compat.name_of(eqn)
    if name == "while":  # its bodies are the condition, of one scalar result, and the loop body
        return [[None], list(result_specs)]
    specs = list(result_specs)
    if name == "scan":
        first_stacked = interpreter.loop_counts(eqn).carries
        for n, spec in enumerate(specs[first_stacked:], start=first_stacked):
            if spec is not None:  # what is sharded along T is left open in an iteration
                specs[n] = P(*spec[1:]) if tuple(spec[:1]) == (None,) else None
    return [list(specs) for _ in interpreter.bodies(eqn)]


def operand_specs(eqn: JaxprEqn, result_specs: Sequence[P | None]) -> list[P | None]:
    """Return how the operands should be sharded; of `mul 0.1 g` at `P("i")`, `[None, P("i")]`."""
    record = record_of(eqn)
    if record.elementwise:
        shape = _shape(eqn.outvars[0])  # a scalar operand, as a learning rate, gets no spec
        return [result_specs[0] if _shape(atom) == shape else None for atom in eqn.invars]
    if record.kind in ("call", "branch", "loop"):
        return _operand_specs_by_bodies(eqn, result_specs)
    return [None] * len(eqn.invars)


def _operand_specs_by_bodies(eqn: JaxprEqn, result_specs: Sequence[P | None]) -> list[P | None]:
    """Return the spec that the bodies of a call, loop or branch want for each operand, or None.

    In each body, specs are propagated from its results back to its inputs, which are operands of
    the equation. If several bodies want one operand sharded, the first decides.
    """
    specs: list[P | None] = [None] * len(eqn.invars)  # of the operands
    is_scan = _compat.name_of(eqn) == "scan"
    first_x = interpreter.loop_counts(eqn).first_x if is_scan else len(eqn.invars)
    bodies = map(interpreter.open_jaxpr, interpreter.bodies(eqn))
    results_of_bodies = body_result_specs(eqn, result_specs)
    operands_of_bodies = interpreter.operands_of_bodies(eqn)  # the operand number of each input
    for body, results, operands in zip(bodies, results_of_bodies, operands_of_bodies, strict=True):
        body_specs = infer_specs(body, results, {})
        for var, operand in zip(body.invars, operands, strict=True):
            spec = body_specs.get(var)
            if specs[operand] is None and spec is not None:
                # A scan slices its xs: `P("i")` in one iteration is `P(None, "i")` of the operand.
                specs[operand] = P(None, *spec) if operand >= first_x else spec
    return specs


def _result_spec(eqn: JaxprEqn, specs: dict[Var, P]) -> P | None:
    """Return the spec of a cast, transpose, squeeze or slice of a sharded value, else None."""
    sharded_operands = [var for var in variables(eqn.invars) if var in specs]
    shape = _shape(eqn.outvars[0])
    if record_of(eqn).elementwise:
        return next((specs[var] for var in sharded_operands if _shape(var) == shape), None)
    if not sharded_operands:
        return None
    operand_shape, spec = _shape(sharded_operands[0]), specs[sharded_operands[0]]
    parts = [*spec, *[None] * (len(operand_shape) - len(spec))]  # one for each dimension
    match _compat.name_of(eqn):
        case "transpose":  # P("i", None) becomes P(None, "i")
            return P(*[parts[dim] for dim in eqn.params["permutation"]])
        case "squeeze":  # P(None, "i") of [1, 8] becomes P("i")
            dropped = eqn.params["dimensions"]
            return P(*[part for dim, part in enumerate(parts) if dim not in dropped])
        case "slice":  # only of other dimensions than the sharded ones
            sharded_dims = [dim for dim, part in enumerate(parts) if part is not None]
            return spec if all(operand_shape[dim] == shape[dim] for dim in sharded_dims) else None
    return None


def _shape(atom: Atom) -> tuple[int, ...]:
    return atom.aval.shape
