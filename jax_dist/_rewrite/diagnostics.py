"""Diagnostic of `explain`: gradients that JAX sums over devices.

Under `check_vma=True` (the default of `jax.shard_map`), the gradient by a value that is replicated
is summed over devices: JAX transposes its broadcast (`pvary`) to a psum. The loss of one device
then has a gradient that is N times too large, and a pmean afterwards changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist import _codes, _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.pipeline import PassFinding
from jax_dist._rewrite.primitive_facts import record_of

_IsTransposed: TypeAlias = Callable[[JaxprEqn], bool]  # whether JAX made it in transposing

_WHY_SUMMED = (
    "under check_vma=True, JAX sums it over all devices, so for the loss of one device it is N "
    "times too large, also after a pmean; give shard_map check_vma=False, take lax.pmean of the "
    "loss before the gradient, or divide by lax.axis_size"
)


def find_gradient_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """Return a finding for each gradient that JAX sums over devices, and nobody divides again."""
    findings = []
    for eqn in interpreter.equations(jaxpr):
        if record_of(eqn).kind == "region" and eqn.params["check_vma"]:
            search = _GradientSums(eqn.params["mesh"].shape)
            search.walk(eqn.params["jaxpr"], {}, interpreter.source_line(eqn), _has_transposed_name)
            findings += search.findings.values()
    return tuple(dict.fromkeys(findings))


class _Value(NamedTuple):
    """Facts about one variable."""

    sums: frozenset[int] = frozenset()  # it is a gradient that these sums made, perhaps scaled
    of_global_loss: bool = False  # it is a cotangent of the user's own psum: right as it is


class _GradientSums:
    """The search through the body of one shard_map."""

    def __init__(self, axis_sizes: Mapping[Any, int]):
        self.findings: dict[int, PassFinding] = {}  # by the identity of the equation
        self._axis_sizes = axis_sizes

    def walk(
        self, body: Any, values: dict[Any, _Value], around: str, is_transposed: _IsTransposed
    ) -> None:
        """Add what is known of each variable in `body` to `values`."""
        for eqn in interpreter.open_jaxpr(body).eqns:
            record, by_jax = record_of(eqn), is_transposed(eqn)
            line = interpreter.source_line(eqn) or around
            operand = _join(values, eqn.invars)
            result = _Value(operand.sums if record.linear else frozenset(), operand.of_global_loss)
            if record.over == "sum":
                result = _Value(of_global_loss=by_jax and operand.of_global_loss)
                if by_jax and not operand.of_global_loss:
                    self.findings[id(eqn)] = _finding(eqn, line)
                    result = _Value(frozenset({id(eqn)}))
            elif by_jax and _compat.name_of(eqn) == "pvary" and _is_cotangent(eqn.invars[0]):
                result = result._replace(of_global_loss=True)
            elif record.scales and self._divides(eqn):
                for number in operand.sums:
                    self.findings.pop(number, None)
            values.update(dict.fromkeys(eqn.outvars, result))
            for inner in interpreter.bodies(eqn):
                inside = _in_transposed(eqn, inner) if by_jax else _has_transposed_name
                self._enter(eqn, inner, values, line, inside)

    def _enter(
        self,
        eqn: JaxprEqn,
        inner: Any,
        values: dict[Any, _Value],
        around: str,
        is_transposed: _IsTransposed,
    ) -> None:
        """Walk a body, with what is known of the operands and the results of its equation."""
        opened = interpreter.open_jaxpr(inner)
        outer = eqn.invars[1:] if record_of(eqn).kind == "branch" else eqn.invars
        inside: dict[Any, _Value] = {}
        if len(opened.invars) == len(outer):
            inside = {v: _join(values, [a]) for v, a in zip(opened.invars, outer, strict=True)}
        self.walk(inner, inside, around, is_transposed)
        if len(opened.outvars) == len(eqn.outvars):
            for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
                before, made = _join(values, [result]), _join(inside, [atom])
                is_global = before.of_global_loss or made.of_global_loss
                values[result] = _Value(before.sums | made.sums, is_global)

    def _divides(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation takes the mean over devices of what was summed."""
        factor = eqn.invars[1]
        if not isinstance(factor, Literal) or np.ndim(factor.val) or not factor.val:
            return False
        divisor = float(factor.val) if _compat.name_of(eqn) == "div" else 1 / float(factor.val)
        return any(np.isclose(divisor, size) for size in self._axis_sizes.values() if size > 1)


def _finding(eqn: JaxprEqn, line: str) -> PassFinding:
    over = ", ".join(repr(str(axis)) for axis in eqn.params["axes"])
    what = f"the gradient by a replicated value is summed over {over}"
    return PassFinding(_codes.GRADIENT_OF_REPLICATED, "noted", what, _WHY_SUMMED, line)


def _join(values: Mapping[Any, _Value], atoms: Sequence[Any]) -> _Value:
    operands = [values.get(atom, _Value()) for atom in atoms if isinstance(atom, Var)]
    sums = frozenset().union(*[value.sums for value in operands])
    return _Value(sums, any(value.of_global_loss for value in operands))


def _is_cotangent(atom: Any) -> bool:
    """Return whether a broadcast is the transpose of a psum; of a constant, only of the seed."""
    return isinstance(atom, Var) or (np.ndim(atom.val) == 0 and float(atom.val) == 1.0)


def _has_transposed_name(eqn: JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _in_transposed(eqn: JaxprEqn, body: Any) -> _IsTransposed:
    """Return what was transposed in the body of a transposed equation; name stacks start anew."""
    if record_of(eqn).call != "checkpoint":
        return lambda _: True
    # A checkpoint computes forward once more; what it transposes comes from the cotangents, its
    # last operands.
    opened = interpreter.open_jaxpr(body)
    reached = {opened.invars[-1]}
    is_reached = lambda eqn: any(isinstance(atom, Var) and atom in reached for atom in eqn.invars)
    for inner in opened.eqns:
        if is_reached(inner):
            reached.update(inner.outvars)
    return is_reached
