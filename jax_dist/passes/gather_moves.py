"""Rules for what leaves a gathered value gathered: every device goes on with its own block.

Elementwise functions, and what moves, adds or drops other dimensions. An operand that all devices
hold whole and alike gives each of them its block.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist.passes.gather_states import (
    Gathered,
    GatherStep,
    Refuse,
    Shape,
    State,
    Whole,
    demand_no_sharding,
    demand_same,
    inserted,
    no_collective,
    only,
    rule,
    shape_of,
    sites_of,
    spelled,
    with_params,
    without,
)
from jax_dist.passes.interpreter import ELEMENTWISE, Values, replay
from jax_dist.passes.uniformity import axes_of


@rule(*ELEMENTWISE)
def _elementwise(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """On the blocks. Operands of rank 0, or of size 1 where the others are longer, broadcast."""
    demand_no_sharding(eqn)
    gathered = _agreeing(eqn, states)
    cut = _cutting(eqn, states, gathered)
    return GatherStep((gathered,) * len(eqn.outvars), lambda eqn, values: replay(eqn, cut(values)))


@rule("broadcast_in_dim")
def _broadcast(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    demand_no_sharding(eqn)
    to = eqn.params["broadcast_dimensions"]
    moved = gathered.at({int(to[d]): spread for d, spread in gathered.spreads})
    return _with(eqn, moved, shape=moved.block(eqn.params["shape"]), sharding=None)


@rule("transpose")
def _transpose(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    permutation = [int(d) for d in eqn.params["permutation"]]
    return _with(eqn, gathered.at({permutation.index(d): s for d, s in gathered.spreads}))


@rule("squeeze")
def _squeeze(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """The gathered dimension is longer than 1, so it is none of those that go."""
    gathered = only(states)
    gone = [int(d) for d in eqn.params["dimensions"]]
    return _with(eqn, gathered.at(without(gathered, gone)))


@rule("reshape")
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
        place = major_place(old, new, dimension, spread.size)
        if place is None or place in moved:
            raise Refuse("reshape merges the gathered dimension under a more major one")
        moved[place] = spread
    result = gathered.at(moved)
    return _with(eqn, result, new_sizes=result.block(new), sharding=None)


def major_place(old: Shape, new: Shape, dimension: int, size: int) -> int | None:
    """Which dimension of `new` starts where `dimension` of `old` does, in blocks of `size`."""
    before = math.prod(old[:dimension])
    for place, length in enumerate(new):
        if math.prod(new[:place]) == before and length % size == 0:
            return place
    return None


@rule("slice")
def _slice(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    shape, params = shape_of(eqn.invars[0]), eqn.params
    strides = params["strides"] or (1,) * len(shape)
    for d in gathered.dimensions:
        if (params["start_indices"][d], params["limit_indices"][d], strides[d]) != (0, shape[d], 1):
            raise Refuse("slice of the gathered dimension")
    return _with(eqn, gathered, limit_indices=gathered.block(tuple(params["limit_indices"])))


@rule("dynamic_slice")
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
    return _with(eqn, gathered, slice_sizes=gathered.block(sizes))


@rule("pad")
def _pad(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered, value = states
    if not isinstance(gathered, Gathered) or not isinstance(value, Whole):
        raise Refuse("pad with a gathered value")
    demand_same(eqn, gathered, value)
    if any(tuple(eqn.params["padding_config"][d]) != (0, 0, 0) for d in gathered.dimensions):
        raise Refuse("pad of the gathered dimension")
    return _with(eqn, gathered)


@rule("stack")
def _stack(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = _agreeing(eqn, states)
    cut = _cutting(eqn, states, gathered)
    moved = gathered.at(inserted(gathered, int(eqn.params["axis"])))
    return GatherStep((moved,), lambda eqn, values: replay(eqn, cut(values)))


@rule("split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _along_axis(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    _demand_other(eqn, gathered, eqn.params["axis"])
    return _with(eqn, gathered)


@rule("rev")
def _reverse(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    gathered = only(states)
    for dimension in eqn.params["dimensions"]:
        _demand_other(eqn, gathered, dimension)
    return _with(eqn, gathered)


@rule("concatenate", "sort")
def _along_dimension(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Of several operands of a sort, all are sorted by the first ones, row by row."""
    gathered = _agreeing(eqn, states)
    _demand_other(eqn, gathered, eqn.params["dimension"])
    cut = _cutting(eqn, states, gathered)
    return GatherStep((gathered,) * len(eqn.outvars), lambda eqn, values: replay(eqn, cut(values)))


@rule("pvary")
def _each(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """One result for each operand, gathered or not."""
    del eqn
    return GatherStep(tuple(s if isinstance(s, Gathered) else None for s in states), replay)


@rule("psum", "psum_invariant", "pmax", "pmin", "ppermute")
def _over_other_axes(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Block by block, where it does not touch the axes of the gather."""
    for gathered in states:
        if isinstance(gathered, Gathered):
            _demand_other_axes(eqn, gathered)
    return _each(eqn, states)


@rule("all_gather")
def _gather(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """Of one that is kept, over other axes."""
    gathered = only(states)
    _demand_other_axes(eqn, gathered)
    dimension = int(eqn.params["all_gather_dimension"])
    if not eqn.params["tiled"]:
        return _with(eqn, gathered.at(inserted(gathered, dimension)))
    _demand_other(eqn, gathered, dimension)
    return _with(eqn, gathered)


# ---- what the rules share


def _agreeing(eqn: JaxprEqn, states: Sequence[State]) -> Gathered:
    """The one way in which all gathered operands are spread."""
    gathered = [state for state in states if isinstance(state, Gathered)]
    if any(state.spreads != gathered[0].spreads for state in gathered):
        raise Refuse(f"{eqn.primitive.name} mixes values that are gathered in different ways")
    return Gathered(gathered[0].spreads, sites_of(states))


def _cutting(
    eqn: JaxprEqn, states: Sequence[State], gathered: Gathered
) -> Callable[[Sequence[Any]], Values]:
    """Checks the operands that are whole, and gives the function that takes blocks of them."""
    for state in states:
        if isinstance(state, Whole):
            demand_same(eqn, gathered, state)
    cuts = [
        cutter(eqn, shape_of(atom), dict(gathered.spreads)) if isinstance(state, Whole) else None
        for atom, state in zip(eqn.invars, states, strict=True)
    ]

    def cut(values: Sequence[Any]) -> Values:
        parts = zip(cuts, values, strict=True)
        return [take(value) if take else value for take, value in parts]

    return cut


def cutter(eqn: JaxprEqn, shape: Shape, spreads: dict[int, Any]) -> Callable[[Any], Any] | None:
    """Takes this device's block of a whole value; None where it is needed whole."""
    cut = {d: spread for d, spread in spreads.items() if shape and shape[d] != 1}
    if not cut:
        return None
    if any(spread.groups is not None for spread in cut.values()):
        raise Refuse(f"{eqn.primitive.name} mixes what is gathered in groups with a whole value")

    def take(value: Any) -> Any:
        for dimension, spread in cut.items():
            length = shape[dimension] // spread.size
            start = lax.axis_index(spread.names) * length
            value = lax.dynamic_slice_in_dim(value, start, length, dimension)
        return value

    return take


def _with(eqn: JaxprEqn, result: Gathered, **params: Any) -> GatherStep:
    """The same equation on the block, with other parameters where they hold sizes."""
    return GatherStep(
        results=(result,) * len(eqn.outvars),
        emit=lambda eqn, values: replay(with_params(eqn, **params) if params else eqn, values),
    )


def _demand_other_axes(eqn: JaxprEqn, gathered: Gathered) -> None:
    names, name = axes_of(eqn), eqn.primitive.name.removesuffix("_invariant")
    if set(names) & set(gathered.names):
        raise Refuse(f"{name} over {spelled(names)} of what was gathered over it")


def _demand_other(eqn: JaxprEqn, gathered: Gathered, dimension: Any) -> None:
    if int(dimension) in gathered.dimensions:
        raise Refuse(no_collective(eqn))
