"""What becomes of an equation of gathered values, by primitive: each device keeps to its block.

Elementwise functions, and what moves, adds or drops other dimensions, leave a gathered value
gathered. What takes the gathered dimension away is done on the block, and then over devices. An
operand that all devices hold whole and alike gives each of them its block.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._rewrite.gather_reductions import extreme, has_extremes, psum_over
from jax_dist._rewrite.gather_states import (
    Cut,
    EmittedCollective,
    Gathered,
    GatherStep,
    Refuse,
    Spread,
    State,
    Whole,
    agreeing,
    aval_of,
    block_cutter,
    blocks_of,
    demand_no_sharding,
    demand_other,
    demand_other_axes,
    demand_same,
    no_collective,
    only,
    replayed,
    replayed_together,
    shape_of,
    sites_of,
    with_params,
)
from jax_dist._rewrite.interpreter import Handler, Values, as_typed, holds, replay
from jax_dist._rewrite.primitive_facts import record_of

_Rule: TypeAlias = Callable[[JaxprEqn, Sequence[State]], GatherStep]
_RULES: dict[str, _Rule] = {}  # by primitive


def step_of(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """What becomes of an equation, some operands of which are gathered.

    Raises:
      Refuse: it needs the whole value.
    """
    if record_of(eqn).elementwise:
        return _elementwise(eqn, states)
    name = _compat.name_of(eqn)
    if name not in _RULES:
        raise Refuse(f"{name} needs the whole gathered value")
    return _RULES[name](eqn, states)


def _rule(*primitives: str) -> Callable[[_Rule], _Rule]:
    def register(law: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(primitives, law))
        return law

    return register


# --- rules for what leaves the value gathered


def _elementwise(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """On the blocks. Operands of rank 0, or of size 1 where the others are longer, broadcast."""
    demand_no_sharding(eqn)
    gathered = agreeing(eqn, states)
    return replayed_together(eqn, states, gathered, gathered)


@_rule("broadcast_in_dim")
def _broadcast(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    demand_no_sharding(eqn)
    to = eqn.params["broadcast_dimensions"]
    moved = gathered.at({int(to[d]): spread for d, spread in gathered.spreads})
    return replayed(eqn, moved, shape=moved.block(eqn.params["shape"]), sharding=None)


@_rule("transpose")
def _transpose(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    permutation = [int(d) for d in eqn.params["permutation"]]
    return replayed(eqn, gathered.at({permutation.index(d): s for d, s in gathered.spreads}))


@_rule("squeeze")
def _squeeze(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """The gathered dimension is longer than 1, so it is none of those that go."""
    gathered = only(states)
    gone = [int(d) for d in eqn.params["dimensions"]]
    return replayed(eqn, gathered.without(gone))


@_rule("reshape")
def _reshape(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Blocks stay contiguous where what is more major keeps its size.

    The new dimension may be shorter or longer: it must be a whole number of blocks.
    """
    gathered = only(states)
    demand_no_sharding(eqn)
    if eqn.params["dimensions"] is not None:
        raise Refuse("reshape moves the gathered dimension")
    old, new = shape_of(eqn.invars[0]), tuple(eqn.params["new_sizes"])
    moved: dict[int, Any] = {}
    for dimension, spread in gathered.spreads:
        place = _major_place(old, new, dimension, spread.size)
        if place is None or place in moved:
            raise Refuse("reshape merges the gathered dimension under a more major one")
        moved[place] = spread
    result = gathered.at(moved)
    return replayed(eqn, result, new_sizes=result.block(new), sharding=None)


def _major_place(old: Sequence[int], new: Sequence[int], dimension: int, size: int) -> int | None:
    """Which dimension of `new` starts where `dimension` of `old` does, in blocks of `size`."""
    before = math.prod(old[:dimension])
    for place, length in enumerate(new):
        if math.prod(new[:place]) == before and length % size == 0:
            return place
    return None


@_rule("slice")
def _slice(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    shape, params = shape_of(eqn.invars[0]), eqn.params
    strides = params["strides"] or (1,) * len(shape)
    for d in gathered.dimensions:
        if (params["start_indices"][d], params["limit_indices"][d], strides[d]) != (0, shape[d], 1):
            raise Refuse("slice of the gathered dimension")
    return replayed(eqn, gathered, limit_indices=gathered.block(tuple(params["limit_indices"])))


@_rule("dynamic_slice")
def _dynamic_slice(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """A start in a dimension that is taken whole is clamped to 0."""
    gathered, *indices = states
    if not isinstance(gathered, Gathered) or not all(isinstance(i, Whole) for i in indices):
        raise Refuse("dynamic_slice at a gathered index")
    sizes = tuple(eqn.params["slice_sizes"])
    if any(sizes[d] != shape_of(eqn.invars[0])[d] for d in gathered.dimensions):
        raise Refuse("dynamic_slice of the gathered dimension")
    for index in indices:
        if isinstance(index, Whole):
            demand_same(eqn, gathered, index)
    return replayed(eqn, gathered, slice_sizes=gathered.block(sizes))


@_rule("pad")
def _pad(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    match states:
        case [Gathered() as gathered, Whole() as value]:
            demand_same(eqn, gathered, value)
        case _:
            raise Refuse("pad with a gathered value")
    if any(tuple(eqn.params["padding_config"][d]) != (0, 0, 0) for d in gathered.dimensions):
        raise Refuse("pad of the gathered dimension")
    return replayed(eqn, gathered)


@_rule("stack")
def _stack(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = agreeing(eqn, states)
    return replayed_together(eqn, states, gathered, gathered.inserted(int(eqn.params["axis"])))


@_rule("unstack")
def _unstack(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered, axis = only(states), int(eqn.params["axis"])
    demand_other(eqn, gathered, axis)
    return replayed(eqn, gathered.without([axis]))


@_rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _window(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Over a dimension in which each window is one element, every device keeps to its block."""
    match states:
        case [Gathered() as gathered]:
            pass
        case [Gathered() as gathered, Whole() as start]:
            demand_same(eqn, gathered, start)
        case _:  # or windows of several arrays
            raise no_collective(eqn)
    if holds(eqn, lambda inner: record_of(inner).kind not in ("plain", "call")):
        raise Refuse(f"{_compat.name_of(eqn)} has a function of which nothing is known")
    params = eqn.params
    sizes = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    for dimension in gathered.dimensions:
        whole = tuple(params["padding"][dimension]) == (0, 0)
        if not whole or any(params[name][dimension] != 1 for name in sizes):
            raise no_collective(eqn)
    return replayed(eqn, gathered)


@_rule("rev", "split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _along_axis(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered, params = only(states), eqn.params
    for dimension in params["dimensions"] if _compat.name_of(eqn) == "rev" else (params["axis"],):
        demand_other(eqn, gathered, dimension)
    return replayed(eqn, gathered)


@_rule("concatenate", "sort")
def _along_dimension(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Of several operands of a sort, all are sorted by the first ones, row by row."""
    gathered = agreeing(eqn, states)
    demand_other(eqn, gathered, eqn.params["dimension"])
    return replayed_together(eqn, states, gathered, gathered)


@_rule("pvary")
def _each(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """One result for each operand, gathered or not."""
    del eqn
    return GatherStep(tuple(s if isinstance(s, Gathered) else None for s in states), replay)


@_rule("psum", "psum_invariant", "pmax", "pmin", "ppermute")
def _over_other_axes(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Block by block, where it does not touch the axes of the gather."""
    if any(isinstance(axis, int) for axis in eqn.params.get("axes", ())):
        raise Refuse(f"{_compat.name_of(eqn)} over a dimension of a vmap, too")
    for gathered in states:
        if isinstance(gathered, Gathered):
            demand_other_axes(eqn, gathered)
    return _each(eqn, states)


@_rule("all_gather")
def _gather(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Of one that is kept, over other axes."""
    gathered = only(states)
    demand_other_axes(eqn, gathered)
    dimension = int(eqn.params["all_gather_dimension"])
    if not eqn.params["tiled"]:
        return replayed(eqn, gathered.inserted(dimension))
    demand_other(eqn, gathered, dimension)
    return replayed(eqn, gathered)


# --- rules for what takes the gathered dimension away: a local reduction, then one over devices


_NOT_REDUCED = (jnp.dtype("int2"), jnp.dtype("uint2"))


@_rule("reduce_sum")
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
        return [as_typed(psum_over(local, over), eqn.outvars[0])]

    return GatherStep((result,), emit, (_collective("psum", eqn, result, over),))


@_rule("reduce_max", "reduce_min")
def _extreme(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Local and over devices in one go, so that ties share the gradient as in reduce_max."""
    result, over = _reduced(eqn, states)
    if over is None:
        return GatherStep((result,), replay)
    dtype = aval_of(eqn.outvars[0]).dtype
    if not has_extremes(dtype):
        raise Refuse(f"{_compat.name_of(eqn)} over devices has no order for {dtype.name}")
    axes = tuple(int(axis) for axis in eqn.params["axes"])
    kind: Literal["max", "min"] = "max" if _compat.name_of(eqn) == "reduce_max" else "min"

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        (block,) = values
        return [as_typed(extreme(kind, block, axes, over.names, over.groups), eqn.outvars[0])]

    return GatherStep((result,), emit, (_collective(f"p{kind}", eqn, result, over),))


@_rule("reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")
def _without_collective(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Over other dimensions they stay local."""
    result, over = _reduced(eqn, states)
    if over is None:
        return GatherStep((result,), replay)
    raise no_collective(eqn)


def _reduced(eqn: JaxprEqn, states: Sequence[State]) -> tuple[Gathered | None, Spread | None]:
    """What is left gathered, and the devices to reduce over; None for none."""
    gathered = only(states)
    demand_no_sharding(eqn)
    axes = sorted(int(axis) for axis in eqn.params["axes"])
    gone = [spread for d, spread in gathered.spreads if d in axes]
    kept = gathered.at({d: spread for d, spread in gathered.spreads if d not in axes})
    return kept.without(axes) if kept.spreads else None, _over(eqn, gone)


def _over(eqn: JaxprEqn, gone: Sequence[Spread]) -> Spread | None:
    if not gone:
        return None
    if aval_of(eqn.outvars[0]).weak_type:
        raise Refuse("the result has a weak type, and a reduction over devices gives none")
    if (dtype := aval_of(eqn.outvars[0]).dtype) in _NOT_REDUCED:
        raise Refuse(f"XLA has no reduction over devices for {dtype.name}")
    if len(gone) > 1 and any(spread.groups is not None for spread in gone):
        raise Refuse(f"{_compat.name_of(eqn)} over two gathered dimensions, one of them in groups")
    names = tuple(name for spread in gone for name in spread.names)
    return Spread(names, gone[0].groups, math.prod(spread.size for spread in gone))


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
    size = math.prod(shape) * itemsize
    return EmittedCollective(_compat.name_of(eqn), name, "all-reduce", size, over.size)


# ---- products


@_rule("dot_general")
def _dot(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Over a gathered contracted dimension a local product, then one psum.

    A gathered batch dimension, or one that only one operand has, stays gathered.
    """
    demand_no_sharding(eqn)
    contracting, batch = (
        [(int(left), int(right)) for left, right in zip(*dimensions, strict=True)]
        for dimensions in eqn.params["dimension_numbers"]
    )
    paired = [*contracting, *batch]
    spreads = [dict(state.spreads) if isinstance(state, Gathered) else {} for state in states]
    _demand_paired(eqn, states, paired)

    def cut_of(own: int, other: int) -> Cut:
        """A whole operand gives its block of each dimension that is paired with a gathered one."""
        if isinstance(states[own], Gathered):
            return None
        pairs = [pair for pair in paired if pair[other] in spreads[other]]
        cut = {pair[own]: spreads[other][pair[other]] for pair in pairs}
        return block_cutter(eqn, shape_of(eqn.invars[own]), cut)

    cuts = [cut_of(0, 1), cut_of(1, 0)]
    gone = [spreads[0].get(d) or spreads[1].get(e) for d, e in contracting]
    kept = [spreads[0].get(d) or spreads[1].get(e) for d, e in batch]
    for side in (0, 1):
        free = set(range(len(shape_of(eqn.invars[side])))) - {pair[side] for pair in paired}
        kept += [spreads[side].get(d) for d in sorted(free)]
    left = {place: spread for place, spread in enumerate(kept) if spread}
    result = Gathered((), sites_of(states)).at(left) if left else None
    over = _over(eqn, [spread for spread in gone if spread])
    moved = () if over is None else (_collective("psum", eqn, result, over),)
    return GatherStep((result,), _dot_emitter(eqn, cuts, over), moved)


def _demand_paired(
    eqn: JaxprEqn, states: Sequence[State], paired: Sequence[tuple[int, int]]
) -> None:
    """Two gathered operands have to be spread along the same pairs of dimensions."""
    match states:
        case (Gathered() as gathered, Whole() as whole) | (
            Whole() as whole,
            Gathered() as gathered,
        ):
            demand_same(eqn, gathered, whole)
        case (Gathered() as left, Gathered() as right):
            lefts, rights = dict(left.spreads), dict(right.spreads)
            if any(lefts.get(d) != rights.get(e) for d, e in paired):
                raise Refuse("dot_general pairs a gathered dimension with one that is not")
            if lefts.keys() - {d for d, _ in paired} or rights.keys() - {e for _, e in paired}:
                raise Refuse("dot_general is an outer product of two gathered operands")


def _dot_emitter(eqn: JaxprEqn, cuts: Sequence[Cut], over: Spread | None) -> Handler:
    dtype = aval_of(eqn.outvars[0]).dtype
    wider = over is not None and _is_low_precision(dtype)
    if wider and isinstance(eqn.params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        raise Refuse(f"dot_general in {dtype.name} by an algorithm of its own")

    def emit(eqn: JaxprEqn, values: Values) -> Values:
        parts = blocks_of(cuts, values)
        if over is None:
            return replay(eqn, parts)
        # Rounded once, after the sum over devices, as the whole product would be.
        widened = with_params(eqn, {"preferred_element_type": jnp.float32}) if wider else eqn
        (local,) = replay(widened, parts)
        total = lax.convert_element_type(psum_over(local, over), dtype)
        return [as_typed(total, eqn.outvars[0])]

    return emit
