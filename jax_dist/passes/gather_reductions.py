"""Reductions of gathered values, and of scattered ones.

First, a maximum and a minimum over devices that keep NaN and have the gradient of reduce_max.
`lax.pmax` drops a NaN on CPU and cannot be differentiated. Here floats are compared as integers of
the same order, in which a NaN (made positive for a maximum, negative for a minimum) wins.

Shapes: `x` is this device's block, `[*s]`; `[*r]` is what is left of `s` without the reduced
dimensions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn, Var

from jax_dist.passes.gather_moves import cutter
from jax_dist.passes.gather_states import (
    EmittedCollective,
    Gathered,
    GatherStep,
    Refuse,
    Spread,
    State,
    Whole,
    aval_of,
    demand_no_sharding,
    demand_same,
    no_collective,
    only,
    rule,
    shape_of,
    sites_of,
    with_params,
    without,
)
from jax_dist.passes.interpreter import (
    CALLS,
    ELEMENTWISE,
    Atom,
    Values,
    as_typed,
    bodies,
    open_jaxpr,
    replay,
)

_Kind: TypeAlias = Literal["max", "min"]
_Names: TypeAlias = tuple[Any, ...]
_Groups: TypeAlias = tuple[tuple[int, ...], ...] | None

_ORDERED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by the bytes of a float


def has_extremes(dtype: Any) -> bool:
    """Whether values of a type can be compared here: no complex numbers, no floats of 8 bits."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return True
    return dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def extreme(
    kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names, groups: _Groups = None
) -> jax.Array:
    """The largest or the smallest over dimensions and devices, `[*s] -> [*r]`.

    Args:
      kind: "max" or "min".
      x: this device's block, of a type that `has_extremes`.
      axes: the dimensions of the block to reduce.
      names: the mesh axes to reduce over.
      groups: as axis_index_groups.
    """
    if x.dtype == jnp.bool_:
        found = _over_devices(kind, x.astype(jnp.int8), axes, names, groups)
        return found.astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _over_devices(kind, x, axes, names, groups)
    return _of_floats(kind, axes, names, groups, x)


def _over_devices(
    kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names, groups: _Groups
) -> jax.Array:
    local, over = (lax.reduce_max, lax.pmax) if kind == "max" else (lax.reduce_min, lax.pmin)
    return over(local(x, axes), names, axis_index_groups=_lists(groups))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _of_floats(
    kind: _Kind, axes: tuple[int, ...], names: _Names, groups: _Groups, x: jax.Array
) -> jax.Array:
    local = lax.reduce_max(x, axes) if kind == "max" else lax.reduce_min(x, axes)
    return _from_ordered(_over_devices(kind, _to_ordered(kind, local), (), names, groups), x.dtype)


@_of_floats.defjvp
def _of_floats_jvp(
    kind: _Kind, axes: tuple[int, ...], names: _Names, groups: _Groups, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """All that reach the extreme share its gradient, on whichever device they are."""
    (x,), (dx,) = primals, tangents
    found = _of_floats(kind, axes, names, groups, x)
    reached = lax.eq(x, jnp.broadcast_to(lax.expand_dims(found, axes), x.shape)).astype(x.dtype)

    def total(terms: jax.Array) -> jax.Array:
        return lax.psum(lax.reduce_sum(terms, axes), names, axis_index_groups=_lists(groups))

    return found, total(dx * reached) / total(reached)


def _to_ordered(kind: _Kind, x: jax.Array) -> jax.Array:
    nan = jnp.array(np.nan if kind == "max" else np.copysign(np.nan, -1), x.dtype)
    x = jnp.where(jnp.isnan(x), nan, x)
    return _flip(lax.bitcast_convert_type(x, _ORDERED[x.dtype.itemsize]))


def _from_ordered(ordered: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(_flip(ordered), dtype)


def _flip(bits: jax.Array) -> jax.Array:
    """Its own inverse: negative floats count downwards in their lower bits."""
    lower = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
    return jnp.where(bits < 0, bits ^ lower, bits)


def _lists(groups: _Groups) -> list[list[int]] | None:
    return None if groups is None else [list(group) for group in groups]


# --- rules for what takes the gathered dimension away: a local reduction, then one over devices


_NOT_REDUCED = (jnp.dtype("int2"), jnp.dtype("uint2"))


@rule("reduce_sum")
def _sum(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    result, over = _reduced(eqn, states)
    if over is None:
        return GatherStep((result,), replay)
    dtype = aval_of(eqn.outvars[0]).dtype
    if _is_low_precision(dtype):
        raise Refuse(
            f"a sum in {dtype.name} depends on the order of its terms: convert to float32 first, "
            "as jnp.sum and jnp.mean do"
        )

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        (local,) = replay(eqn, values)
        return [as_typed(_psum(local, over), eqn.outvars[0])]

    return GatherStep((result,), emit, (_collective("psum", eqn, result, over),))


@rule("reduce_max", "reduce_min")
def _extreme(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Local and over devices in one go, so that ties share the gradient as in reduce_max."""
    result, over = _reduced(eqn, states)
    if over is None:
        return GatherStep((result,), replay)
    dtype = aval_of(eqn.outvars[0]).dtype
    if not has_extremes(dtype):
        raise Refuse(f"{eqn.primitive.name} over devices has no order for {dtype.name}")
    axes = tuple(int(axis) for axis in eqn.params["axes"])
    kind: _Kind = "max" if eqn.primitive.name == "reduce_max" else "min"

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        (block,) = values
        return [as_typed(extreme(kind, block, axes, over.names, over.groups), eqn.outvars[0])]

    return GatherStep((result,), emit, (_collective(f"p{kind}", eqn, result, over),))


@rule("reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")
def _without_collective(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Over other dimensions they stay local."""
    result, over = _reduced(eqn, states)
    if over is None:
        return GatherStep((result,), replay)
    raise Refuse(no_collective(eqn))


def _reduced(eqn: JaxprEqn, states: Sequence[State]) -> tuple[Gathered | None, Spread | None]:
    """What is left gathered, and the devices to reduce over; None for none."""
    gathered = only(states)
    demand_no_sharding(eqn)
    axes = sorted(int(axis) for axis in eqn.params["axes"])
    gone = [spread for d, spread in gathered.spreads if d in axes]
    kept = gathered.at({d: spread for d, spread in gathered.spreads if d not in axes})
    return kept.at(without(kept, axes)) if kept.spreads else None, _over(eqn, gone)


def _over(eqn: JaxprEqn, gone: Sequence[Spread]) -> Spread | None:
    if not gone:
        return None
    if aval_of(eqn.outvars[0]).weak_type:
        raise Refuse("the result has a weak type, and a reduction over devices gives none")
    if (dtype := aval_of(eqn.outvars[0]).dtype) in _NOT_REDUCED:
        raise Refuse(f"XLA has no reduction over devices for {dtype.name}")
    if len(gone) > 1 and any(spread.groups is not None for spread in gone):
        raise Refuse(f"{eqn.primitive.name} over two gathered dimensions, one of them in groups")
    names = tuple(name for spread in gone for name in spread.names)
    return Spread(names, gone[0].groups, math.prod(spread.size for spread in gone))


def _psum(value: Any, over: Spread) -> Any:
    return lax.psum(value, over.names, axis_index_groups=_lists(over.groups))


def _is_low_precision(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _collective(
    name: str, eqn: JaxprEqn, result: Gathered | None, over: Spread
) -> EmittedCollective:
    aval = aval_of(eqn.outvars[0])
    shape = result.block(aval.shape) if result else aval.shape
    # Products of low precision are summed in float32.
    widened = name == "psum" and _is_low_precision(aval.dtype)
    itemsize = 4 if widened else aval.dtype.itemsize
    return EmittedCollective(name, "all-reduce", math.prod(shape) * itemsize, over.size)


# ---- products


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """One operand of a dot_general, with its dimensions by their part in the product."""

    state: State
    contracting: tuple[int, ...]
    batch: tuple[int, ...]
    rank: int

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.rank) if d not in self.contracting + self.batch)

    @property
    def spreads(self) -> dict[int, Spread]:
        return dict(self.state.spreads) if isinstance(self.state, Gathered) else {}


@rule("dot_general")
def _dot(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Over a gathered contracted dimension a local product, then one psum.

    A gathered batch dimension, or one that only one operand has, stays gathered.
    """
    demand_no_sharding(eqn)
    left, right = _sides(eqn, states)
    for one, other in ((left, right), (right, left)):
        _demand_paired(eqn, one, other)
    gone = _pairs(left.contracting, right.contracting, left, right)
    batch = _pairs(left.batch, right.batch, left, right)
    cuts = [
        _cutter(eqn, place, side, other)
        for place, (side, other) in enumerate(((left, right), (right, left)))
    ]
    kept = {place: spread for place, spread in enumerate(batch) if spread}
    frees = [left.spreads.get(d) for d in left.free] + [right.spreads.get(d) for d in right.free]
    kept |= {len(batch) + place: spread for place, spread in enumerate(frees) if spread}
    result = Gathered((), sites_of(states)).at(kept) if kept else None
    over = _over(eqn, [spread for spread in gone if spread])
    emit = _dot_emitter(eqn, cuts, over)
    moved = () if over is None else (_collective("psum", eqn, result, over),)
    return GatherStep((result,), emit, moved)


def _sides(eqn: JaxprEqn, states: Sequence[State]) -> tuple[_Side, _Side]:
    contracting, batch = eqn.params["dimension_numbers"]
    left, right = (
        _Side(
            states[side],
            tuple(int(d) for d in contracting[side]),
            tuple(int(d) for d in batch[side]),
            len(shape_of(eqn.invars[side])),
        )
        for side in (0, 1)
    )
    return left, right


def _demand_paired(eqn: JaxprEqn, one: _Side, other: _Side) -> None:
    """Two gathered operands have to be spread along the same pairs of dimensions."""
    if isinstance(one.state, Gathered) and isinstance(other.state, Whole):
        demand_same(eqn, one.state, other.state)
    if isinstance(one.state, Gathered) and isinstance(other.state, Gathered):
        for pairs in (
            zip(one.contracting, other.contracting, strict=True),
            zip(one.batch, other.batch, strict=True),
        ):
            if any(one.spreads.get(d) != other.spreads.get(e) for d, e in pairs):
                raise Refuse("dot_general pairs a gathered dimension with one that is not")
        if any(d in one.spreads for d in one.free):
            raise Refuse("dot_general is an outer product of two gathered operands")


def _pairs(
    lefts: tuple[int, ...], rights: tuple[int, ...], left: _Side, right: _Side
) -> list[Spread | None]:
    """How each pair of dimensions is spread, on one side or on both."""
    return [left.spreads.get(d) or right.spreads.get(e) for d, e in zip(lefts, rights, strict=True)]


def _cutter(eqn: JaxprEqn, place: int, side: _Side, other: _Side) -> Any:
    """A whole operand gives its block of each dimension that is paired with a gathered one."""
    if isinstance(side.state, Gathered):
        return None
    pairs = [
        *zip(side.contracting, other.contracting, strict=True),
        *zip(side.batch, other.batch, strict=True),
    ]
    spreads = {mine: other.spreads[theirs] for mine, theirs in pairs if theirs in other.spreads}
    return cutter(eqn, shape_of(eqn.invars[place]), spreads)


def _dot_emitter(eqn: JaxprEqn, cuts: Sequence[Any], over: Spread | None) -> Any:
    dtype = aval_of(eqn.outvars[0]).dtype
    wider = over is not None and _is_low_precision(dtype)
    if wider and isinstance(eqn.params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        raise Refuse(f"dot_general in {dtype.name} by an algorithm of its own")

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        parts = [cut(value) if cut else value for cut, value in zip(cuts, values, strict=True)]
        if over is None:
            return replay(eqn, parts)
        # Rounded once, after the sum over devices, as the whole product would be.
        accumulating = with_params(eqn, preferred_element_type=jnp.float32) if wider else eqn
        (local,) = replay(accumulating, parts)
        total = lax.convert_element_type(_psum(local, over), dtype)
        return [as_typed(total, eqn.outvars[0])]

    return emit


# --- the dual of a deferred gather: scattering a sum whose parts are all the same
#
# Differentiation makes a reduce_scatter of every gather. Where the scattered value is constant
# along that dimension, as the gradient of a mean is, all devices get the same part: the psum of
# one part.


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
    return ones if isinstance(atom, core.Literal) else ones | known.get(atom, frozenset())


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
    total = _psum(part, Spread(params["axis_name"], groups, params["axis_size"]))
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
