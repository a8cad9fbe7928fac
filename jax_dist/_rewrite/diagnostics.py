"""Diagnostics of `explain`: gradients that JAX sums over devices, loops that run in lockstep.

Under `check_vma=True` (the default of `jax.shard_map`), the gradient by a value that is replicated
is summed over devices: JAX transposes its broadcast (`pvary`) to a psum. The loss of one device
then has a gradient that is N times too large, and a pmean afterwards changes nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jax_dist import _codes, _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.pipeline import PassFinding
from jax_dist._rewrite.primitive_facts import record_of

_IsTransposed: TypeAlias = Callable[[JaxprEqn], bool]  # whether JAX made it in transposing


def find_gradient_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """Return a finding for each gradient that JAX sums over devices, and nobody divides again."""
    findings = []
    for eqn in interpreter.equations(jaxpr):
        if record_of(eqn).kind == "region" and eqn.params["check_vma"]:
            search = _GradientSums(eqn.params["mesh"].shape)
            search.walk(eqn.params["jaxpr"], {}, interpreter.source_line(eqn), _has_transposed_name)
            findings += map(_finding, search.sums.values())
    return tuple(dict.fromkeys(findings))


@dataclasses.dataclass(slots=True)
class _Sum:
    """A psum that JAX inserted into a gradient."""

    axes: tuple[Any, ...]
    where: str
    is_repeated: bool = False  # the user's own psum or pmean follows


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """Facts about one variable."""

    sums: frozenset[int] = frozenset()  # it is a gradient that these sums made, perhaps scaled
    # It comes from the cotangent of the user's own psum: the gradient of a global loss, which is
    # right as it is.
    of_global_loss: bool = False


class _GradientSums:
    """The search through the body of one shard_map."""

    def __init__(self, axis_sizes: Mapping[Any, int]):
        self.sums: dict[int, _Sum] = {}  # by the identity of the equation
        self._axis_sizes = axis_sizes

    def walk(
        self, body: Any, values: dict[Any, _Value], around: str, is_transposed: _IsTransposed
    ) -> None:
        """Add what is known of each variable in `body` to `values`."""
        literals: dict[Any, Any] = {}
        for eqn in interpreter.open_jaxpr(body).eqns:
            record, by_jax = record_of(eqn), is_transposed(eqn)
            name, where = _compat.name_of(eqn), interpreter.source_line(eqn) or around
            operand = _join(values, eqn.invars)
            if record.identity and isinstance(eqn.invars[0], Literal):
                literals[eqn.outvars[0]] = eqn.invars[0].val
            if record.over == "sum" and by_jax:
                result = _Value(of_global_loss=operand.of_global_loss)
                if not operand.of_global_loss:
                    self.sums.setdefault(id(eqn), _Sum(tuple(eqn.params["axes"]), where))
                    result = _Value(frozenset({id(eqn)}))
            elif record.over == "sum":
                for number in operand.sums:
                    self.sums[number].is_repeated = True
                result = _Value()
            else:
                is_global = by_jax and name == "pvary" and _is_cotangent(eqn.invars[0])
                if record.scales and self._divides(name, eqn.invars[1], literals):
                    self._forget(operand.sums)
                kept = operand.sums if record.linear else frozenset()
                result = _Value(kept, operand.of_global_loss or is_global)
            values.update(dict.fromkeys(eqn.outvars, result))
            for inner in interpreter.bodies(eqn):
                inside = _in_transposed(eqn, inner) if by_jax else _has_transposed_name
                self._enter(eqn, inner, values, where, inside)

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
            pairs = zip(opened.invars, outer, strict=True)
            inside = {var: _join(values, [atom]) for var, atom in pairs}
        self.walk(inner, inside, around, is_transposed)
        if len(opened.outvars) == len(eqn.outvars):
            for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
                before, made = _join(values, [result]), _join(inside, [atom])
                values[result] = _Value(
                    before.sums | made.sums, before.of_global_loss or made.of_global_loss
                )

    def _divides(self, name: str, atom: Any, literals: Mapping[Any, Any]) -> bool:
        """Return whether an equation takes the mean over devices of what was summed."""
        factor = atom.val if isinstance(atom, Literal) else literals.get(atom)
        if factor is None or np.ndim(factor):
            return False
        divisor = float(factor) if name == "div" else 1 / float(factor) if factor else 0.0
        return any(np.isclose(divisor, size) for size in self._axis_sizes.values() if size > 1)

    def _forget(self, numbers: frozenset[int]) -> None:
        for number in numbers:
            if not self.sums[number].is_repeated:
                del self.sums[number]


def _finding(total: _Sum) -> PassFinding:
    over = ", ".join(repr(str(axis)) for axis in total.axes)
    what = f"the gradient by a replicated value is summed over {over}"
    if total.is_repeated:
        what += ", and then reduced over it a second time"
    why = (
        "under check_vma=True, JAX sums it over all devices, so for the loss of one device it is N "
        "times too large; give shard_map check_vma=False, take lax.pmean of the loss before the "
        "gradient, or divide by lax.axis_size"
    )
    return PassFinding(_codes.GRADIENT_OF_REPLICATED, "noted", what, why, total.where)


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

    def is_reached(eqn: JaxprEqn) -> bool:
        return any(isinstance(atom, Var) and atom in reached for atom in eqn.invars)

    for inner in opened.eqns:
        if is_reached(inner):
            reached.update(inner.outvars)
    return is_reached


# --- loops over rows that are sharded


def find_lockstep(jaxpr: Any, args: Sequence[Any]) -> tuple[PassFinding, ...]:
    """Return a finding for each while loop that all devices leave together.

    Under vmap its condition is one bool for each row. If the rows are sharded, each turn needs a
    collective to see whether any device has to go on, and all wait for the slowest row.
    """
    shardings = [getattr(arg, "sharding", None) for arg in args]
    if not any(isinstance(s, NamedSharding) and any(s.spec) for s in shardings):
        return ()
    what = "a while loop over sharded rows runs in lockstep"
    why = (
        "in each turn all devices wait for the row that takes longest, with one collective; inside "
        "jax.shard_map or jax_dist.pmap, each device turns on its own"
    )
    return tuple(
        PassFinding("", "noted", what, why, line)
        for line in dict.fromkeys(_batched_loops(jaxpr, ""))
    )


def _batched_loops(jaxpr: Any, around: str) -> Iterator[str]:
    """Yield the lines of while loops with a condition for each row, outside of shard_maps."""
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        line = interpreter.source_line(eqn) or around
        if record_of(eqn).kind == "region":
            continue
        if _compat.name_of(eqn) == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
            yield line
            continue  # the loops inside of it wait for it anyway
        for body in interpreter.bodies(eqn):
            yield from _batched_loops(body, line)
