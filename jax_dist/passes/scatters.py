"""The dual of a deferred gather: scattering a sum whose parts are all the same.

Differentiation makes a reduce_scatter of every gather. Where the scattered value is constant along
that dimension, as the gradient of a mean is, all devices get the same part: the psum of one part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist.passes.gather_reductions import Over, psum
from jax_dist.passes.gather_states import (
    as_typed,
    aval_of,
    shape_of,
)
from jax_dist.passes.interpreter import (
    CALLS,
    ELEMENTWISE,
    Atom,
    Values,
    bodies,
    open_jaxpr,
)

Dimensions: TypeAlias = frozenset[int]  # along which a value is constant
Constancy: TypeAlias = Mapping[Var, Dimensions]


def constancy(jaxpr: Any, ins: Sequence[Dimensions]) -> Constancy:
    """Along which dimensions the variables of a body are constant."""
    body = open_jaxpr(jaxpr)
    known: dict[Var, Dimensions] = dict(zip(body.invars, ins, strict=True))
    for eqn in body.eqns:
        law = _LAWS.get(eqn.primitive.name)
        results = law(eqn, known) if law else [frozenset()] * len(eqn.outvars)
        for var, dimensions in zip(eqn.outvars, results, strict=True):
            known[var] = dimensions
    return known


def constant_along(atom: Atom, known: Constancy) -> Dimensions:
    ones = frozenset(d for d, size in enumerate(shape_of(atom)) if size == 1)
    return ones if isinstance(atom, Literal) else ones | known.get(atom, frozenset())


def scatters_equal_parts(eqn: JaxprEqn, known: Constancy) -> bool:
    if aval_of(eqn.outvars[0]).weak_type:  # a psum would not keep that
        return False
    return int(eqn.params["scatter_dimension"]) in constant_along(eqn.invars[0], known)


def emit_sum(eqn: JaxprEqn, values: Values) -> Values:
    """One slice of the scattered dimension, summed; for a tiled scatter, repeated."""
    (value,) = values
    params = eqn.params
    dimension, groups = int(params["scatter_dimension"]), params["axis_index_groups"]
    part = lax.slice_in_dim(value, 0, 1, axis=dimension)
    total = psum(part, Over(params["axis_name"], groups, params["axis_size"]))
    (out,) = eqn.outvars
    if params["tiled"]:
        shape = shape_of(out)
        total = lax.broadcast_in_dim(total, shape, range(len(shape)))
    else:
        total = lax.squeeze(total, [dimension])
    return [as_typed(total, out)]


# ---- laws: from the operands of an equation to its results


def _elementwise(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
    """Constant where all operands are; one of rank 0 is constant throughout."""
    rank = len(shape_of(eqn.outvars[0]))
    operands = [constant_along(atom, known) for atom in eqn.invars if shape_of(atom)]
    return [frozenset(range(rank)).intersection(*operands)] * len(eqn.outvars)


def _each(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
    """One result for each operand."""
    return [constant_along(atom, known) for atom in eqn.invars]


def _broadcast(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
    to = [int(d) for d in eqn.params["broadcast_dimensions"]]
    new = frozenset(range(len(eqn.params["shape"]))) - frozenset(to)
    return [new | {to[d] for d in constant_along(eqn.invars[0], known)}]


def _transpose(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
    permutation = [int(d) for d in eqn.params["permutation"]]
    return [frozenset(permutation.index(d) for d in constant_along(eqn.invars[0], known))]


def _dropping(name: str) -> Callable[[JaxprEqn, Constancy], list[Dimensions]]:
    def law(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
        gone = [int(d) for d in eqn.params[name]]
        kept = [d for d in constant_along(eqn.invars[0], known) if d not in gone]
        return [frozenset(d - sum(other < d for other in gone) for d in kept)]

    return law


def _call(eqn: JaxprEqn, known: Constancy) -> list[Dimensions]:
    body = bodies(eqn)[0]
    inside = constancy(body, [constant_along(atom, known) for atom in eqn.invars])
    return [constant_along(atom, inside) for atom in open_jaxpr(body).outvars]


_LAWS: dict[str, Callable[[JaxprEqn, Constancy], list[Dimensions]]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("pvary", "psum", "psum_invariant", "pmax", "pmin"), _each),
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _dropping("axes")),
    "broadcast_in_dim": _broadcast,
    "squeeze": _dropping("dimensions"),
    "transpose": _transpose,
}
