"""Gradients that are summed over devices twice (JXD303).

In a shard_map with vma types, the gradient by a value that is the same on all devices comes out
summed: JAX put a psum there, in transposing. A psum of the user's own then sums equal values, and a
pmean leaves the sum as it is: N times what the same body gives under pmap.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist.passes import interpreter
from jax_dist.passes.findings import Finding

CODE = "JXD303"
_SUMS = ("psum", "psum_invariant")
# What may stand between the two sums and leaves the value a gradient.
_PASSES_ON = {
    "pvary", "pcast", "pbroadcast", "mul", "div", "neg", "add", "sub", "add_any", "reshape",
    "convert_element_type", "squeeze", "broadcast_in_dim", "transpose", "select_n", "copy",
}  # fmt: skip


def find_doubled_sums(jaxpr: Any) -> tuple[Finding, ...]:
    """The sums over devices of what JAX has summed over the same devices already."""
    found = [
        finding
        for eqn in interpreter.equations(jaxpr)
        if eqn.primitive.name == "shard_map" and eqn.params["check_vma"]
        for finding in _in_body(eqn.params["jaxpr"], {}, interpreter.source_line(eqn))
    ]
    return tuple(dict.fromkeys(found))


def _in_body(body: Any, summed: dict[Any, frozenset], around: str) -> Iterator[Finding]:
    """Follows the axes over which a gradient is summed already; `summed` is by variable."""
    for eqn in interpreter.open_jaxpr(body).eqns:
        name = eqn.primitive.name
        axes = frozenset().union(*[_of(atom, summed) for atom in eqn.invars])
        where = interpreter.source_line(eqn) or around
        if name in _SUMS and (twice := axes & set(eqn.params["axes"])):
            yield _finding(eqn, sorted(map(str, twice)), where)
        if name in _SUMS and _is_transposed(eqn):
            _mark(eqn, summed, frozenset(eqn.params["axes"]))
        elif name in _PASSES_ON or name in _SUMS:
            _mark(eqn, summed, axes)
        for inner in interpreter.bodies(eqn):
            yield from _through(eqn, inner, summed, where)


def _through(
    eqn: JaxprEqn, inner: Any, summed: dict[Any, frozenset], around: str
) -> Iterator[Finding]:
    """The same in a body; what goes in and comes out of a jit or remat is followed."""
    opened = interpreter.open_jaxpr(inner)
    known: dict[Any, frozenset] = {}
    followed = len(opened.invars) == len(eqn.invars)
    if followed:
        known = {
            var: _of(atom, summed) for var, atom in zip(opened.invars, eqn.invars, strict=True)
        }
    yield from _in_body(inner, known, around)
    if followed and len(opened.outvars) == len(eqn.outvars):
        for outer, atom in zip(eqn.outvars, opened.outvars, strict=True):
            if _of(atom, known):
                summed[outer] = _of(atom, known)


def _of(atom: Var | Literal, summed: dict[Any, frozenset]) -> frozenset:
    return frozenset() if isinstance(atom, Literal) else summed.get(atom, frozenset())


def _mark(eqn: JaxprEqn, summed: dict[Any, frozenset], axes: frozenset) -> None:
    if axes:
        summed.update(dict.fromkeys(eqn.outvars, axes))


def _is_transposed(eqn: JaxprEqn) -> bool:
    """Whether JAX made this equation in transposing; the name stack says so."""
    return "transpose(" in str(eqn.source_info.name_stack)


def _finding(eqn: JaxprEqn, axes: list[str], where: str) -> Finding:
    over = ", ".join(f"'{axis}'" for axis in axes)
    return Finding(
        CODE,
        "noted",
        f"a gradient is summed over {over} a second time, and comes out too large",
        "under check_vma=True, JAX sums the gradient by a value that all devices share; say "
        "check_vma=False, or pcast the value to varying before the gradient",
        where,
    )
