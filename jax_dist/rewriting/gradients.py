"""Gradients that are summed over devices twice (JXD303).

In a shard_map with vma types, the gradient by a value that is the same on all devices comes out
summed: JAX put a psum there, in transposing. A psum of the user's own then sums equal values, and a
pmean leaves the sum as it is: N times what the same body gives under pmap.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist.passes import interpreter
from jax_dist.passes.findings import Finding

CODE = "JXD303"
_SUMS = ("psum", "psum_invariant")
_REMATS = ("checkpoint", "remat2")
_IsTransposed = Callable[[JaxprEqn], bool]  # whether JAX made the equation in transposing
# What may stand between the two sums and leaves the value a gradient.
_PASSES_ON = {
    "pvary", "pcast", "pbroadcast", "mul", "div", "neg", "add", "sub", "add_any", "reshape",
    "convert_element_type", "squeeze", "broadcast_in_dim", "transpose", "select_n", "copy",
    "max", "min", "clamp",
}  # fmt: skip


def find_doubled_sums(jaxpr: Any) -> tuple[Finding, ...]:
    """The sums over devices of what JAX has summed over the same devices already."""
    found = [
        finding
        for eqn in interpreter.equations(jaxpr)
        if eqn.primitive.name == "shard_map" and eqn.params["check_vma"]
        for finding in _in_body(eqn.params["jaxpr"], {}, interpreter.source_line(eqn), _by_name)
    ]
    return tuple(dict.fromkeys(found))


def _in_body(
    body: Any, summed: dict[Any, frozenset], around: str, is_transposed: _IsTransposed
) -> Iterator[Finding]:
    """Follows the axes over which a gradient is summed already; `summed` is by variable."""
    for eqn in interpreter.open_jaxpr(body).eqns:
        name = eqn.primitive.name
        axes = frozenset().union(*[_of(atom, summed) for atom in eqn.invars])
        where = interpreter.source_line(eqn) or around
        if name in _SUMS and is_transposed(eqn):
            _mark(eqn, summed, frozenset(eqn.params["axes"]))
        elif name in _PASSES_ON or name in _SUMS:
            _mark(eqn, summed, axes)
        if name in _SUMS and not is_transposed(eqn) and (twice := axes & set(eqn.params["axes"])):
            yield _finding(sorted(map(str, twice)), where)
        for inner in interpreter.bodies(eqn):
            inside = _in_transposed(eqn, inner) if is_transposed(eqn) else _by_name
            yield from _through(eqn, inner, summed, where, inside)


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
    eqn: JaxprEqn,
    inner: Any,
    summed: dict[Any, frozenset],
    around: str,
    is_transposed: _IsTransposed,
) -> Iterator[Finding]:
    """The same in a body; what goes in and comes out of a jit, remat or scan is followed."""
    opened = interpreter.open_jaxpr(inner)
    outer = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
    known: dict[Any, frozenset] = {}
    followed = len(opened.invars) == len(outer)
    if followed:
        known = {var: _of(atom, summed) for var, atom in zip(opened.invars, outer, strict=True)}
    yield from _in_body(inner, known, around, is_transposed)
    if followed and len(opened.outvars) == len(eqn.outvars):
        for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
            if _of(atom, known):
                summed[result] = summed.get(result, frozenset()) | _of(atom, known)


def _of(atom: Var | Literal, summed: dict[Any, frozenset]) -> frozenset:
    return frozenset() if isinstance(atom, Literal) else summed.get(atom, frozenset())


def _mark(eqn: JaxprEqn, summed: dict[Any, frozenset], axes: frozenset) -> None:
    if axes:
        summed.update(dict.fromkeys(eqn.outvars, axes))


def _finding(axes: list[str], where: str) -> Finding:
    over = ", ".join(f"'{axis}'" for axis in axes)
    return Finding(
        CODE,
        "noted",
        f"a gradient is summed over {over} a second time, and comes out too large",
        "under check_vma=True, JAX sums the gradient by a value that all devices share; say "
        "check_vma=False, or pcast the value to varying before the gradient",
        where,
    )
