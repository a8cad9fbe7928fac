"""Gradients that are summed over devices twice (JXD303).

In a shard_map with vma types, the gradient by a value that is the same on all devices comes out
summed: JAX put a psum there, in transposing. A psum of the user's own then sums equal values, and a
pmean leaves the sum as it is: N times what the same body gives under pmap.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jax_dist import _codes
from jax_dist.passes import interpreter
from jax_dist.passes.pipeline import PassFinding

CODE = _codes.GRAD_PSUM_WITH_VMA
_SUMS = ("psum", "psum_invariant")
_REMATS = ("checkpoint", "remat2")
_TRANSPOSED_SUMS = ("pvary", "pcast")  # what a psum of the user's becomes in transposing
_IsTransposed = Callable[[JaxprEqn], bool]  # whether JAX made the equation in transposing
# What may stand between the two sums and leaves the value a gradient.
_PASSES_ON = {
    "pvary", "pcast", "pbroadcast", "mul", "div", "neg", "add", "sub", "add_any", "reshape",
    "convert_element_type", "squeeze", "broadcast_in_dim", "transpose", "select_n", "copy",
    "max", "min", "clamp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the values of one body."""

    summed: dict[Any, frozenset] = dataclasses.field(default_factory=dict)  # by JAX, over axes
    # What comes from the cotangent of a sum of the user's own. Such a loss is that of all devices,
    # and so is its gradient, which a pmean leaves right.
    of_sums: set[Any] = dataclasses.field(default_factory=set)

    def axes_of(self, atoms: Sequence[Any]) -> frozenset:
        each = [self.summed.get(atom, frozenset()) for atom in atoms if isinstance(atom, Var)]
        return frozenset().union(*each)

    def is_of_sum(self, atoms: Sequence[Any]) -> bool:
        return any(isinstance(atom, Var) and atom in self.of_sums for atom in atoms)

    def add(self, variables: Sequence[Any], axes: frozenset, *, of_sum: bool) -> None:
        if axes:
            self.summed.update(dict.fromkeys(variables, axes))
        if of_sum:
            self.of_sums.update(variables)


def find_doubled_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """The sums over devices of what JAX has summed over the same devices already."""
    found = [
        finding
        for eqn in interpreter.equations(jaxpr)
        if eqn.primitive.name == "shard_map" and eqn.params["check_vma"]
        for finding in _in_body(
            eqn.params["jaxpr"], _Known(), interpreter.source_line(eqn), _by_name
        )
    ]
    return tuple(dict.fromkeys(found))


def _in_body(
    body: Any, known: _Known, around: str, is_transposed: _IsTransposed
) -> Iterator[PassFinding]:
    for eqn in interpreter.open_jaxpr(body).eqns:
        name, by_jax = eqn.primitive.name, is_transposed(eqn)
        axes, of_sum = known.axes_of(eqn.invars), known.is_of_sum(eqn.invars)
        where = interpreter.source_line(eqn) or around
        if name in _SUMS and by_jax:
            summed = frozenset() if of_sum else frozenset(eqn.params["axes"])
            known.add(eqn.outvars, summed, of_sum=of_sum)
        elif name in _SUMS and (twice := axes & set(eqn.params["axes"])):
            yield _finding(sorted(map(str, twice)), where)
        else:
            of_sum |= by_jax and name in _TRANSPOSED_SUMS and isinstance(eqn.invars[0], Var)
            known.add(eqn.outvars, axes if name in _PASSES_ON else frozenset(), of_sum=of_sum)
        for inner in interpreter.bodies(eqn):
            inside = _in_transposed(eqn, inner) if by_jax else _by_name
            yield from _through(eqn, inner, known, where, inside)


def _by_name(eqn: JaxprEqn) -> bool:
    """The name stack says so, outside of what was transposed as a whole."""
    return "transpose(" in str(eqn.source_info.name_stack)


def _in_transposed(eqn: JaxprEqn, body: Any) -> _IsTransposed:
    """What is in the body of a call or loop was transposed with it; the name stacks are new."""
    if eqn.primitive.name not in _REMATS:
        return lambda _: True
    # A remat computes forward once more; what it transposes comes from the cotangents, its last
    # operands.
    opened = interpreter.open_jaxpr(body)
    reached = {opened.invars[-1]}

    def is_reached(eqn: JaxprEqn) -> bool:
        return any(isinstance(atom, Var) and atom in reached for atom in eqn.invars)

    for inner in opened.eqns:
        if is_reached(inner):
            reached.update(inner.outvars)
    return is_reached


def _through(
    eqn: JaxprEqn, inner: Any, known: _Known, around: str, is_transposed: _IsTransposed
) -> Iterator[PassFinding]:
    """The same in a body; what goes in and comes out of a jit, remat or scan is followed."""
    opened = interpreter.open_jaxpr(inner)
    outer = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
    inside = _Known()
    followed = len(opened.invars) == len(outer)
    if followed:
        for var, atom in zip(opened.invars, outer, strict=True):
            inside.add([var], known.axes_of([atom]), of_sum=known.is_of_sum([atom]))
    yield from _in_body(inner, inside, around, is_transposed)
    if followed and len(opened.outvars) == len(eqn.outvars):
        for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
            axes = known.axes_of([result]) | inside.axes_of([atom])
            known.add([result], axes, of_sum=inside.is_of_sum([atom]))


def _finding(axes: list[str], where: str) -> PassFinding:
    over = ", ".join(f"'{axis}'" for axis in axes)
    return PassFinding(
        CODE,
        "noted",
        f"a gradient is summed over {over} a second time, and comes out too large",
        "under check_vma=True, JAX sums the gradient by a value that all devices share; say "
        "check_vma=False, or pcast the value to varying before the gradient",
        where,
    )
