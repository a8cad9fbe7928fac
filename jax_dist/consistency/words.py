"""What is wrong at an equation, why, and what to do, in words."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_dist import _codes
from jax_dist.consistency.graph import Node
from jax_dist.consistency.origins import FaultOrigin
from jax_dist.consistency.relations import Relation


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Why a result depends on the number of devices."""

    code: str  # "JXD501" for what has a rule; "" else
    what: str
    why: str
    do: str
    where: str  # "train.py:12", or "" if unknown
    equation: str  # the primitive: "psum"
    results: tuple[str, ...] = ()  # that are wrong through it


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """What an explanation is made from."""

    origin: FaultOrigin
    axis: str  # "'i'"
    devices: int

    @property
    def node(self) -> Node:
        return self.origin.node

    @property
    def factor(self) -> float:
        return 1.0 if self.origin.relation is None else self.origin.relation.factor

    def part(self, *kinds: str) -> Relation | None:
        """The first operand that is made of parts, of these kinds if any are given."""
        for each in self.origin.operands:
            if each is not None and each.kind == "parts" and (not kinds or each.part in kinds):
                return each
        return None

    @property
    def born(self) -> str:
        lines = dict.fromkeys(node.line for node in self.origin.born if node.line)
        return ", ".join(lines) or "a line that is unknown"


_Words = tuple[str, str, str, str]  # the code of a rule, what, why, what to do

_SUMS = ("psum", "psum_invariant")
_GATHERS = ("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter")
_WINDOWS = (
    # What looks at several rows at once, or at one of them by its number.
    "argmax", "argmin", "argsort", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax",
    "cummin", "cumprod", "cumsum", "dynamic_slice", "dynamic_update_slice", "fft", "gather", "pad",
    "reduce_prod", "reduce_window", "reduce_window_max", "reduce_window_sum", "rev", "scatter",
    "scatter-add", "scatter_add", "slice", "sort", "split", "top_k",
)  # fmt: skip


def explain(origin: FaultOrigin, axis: Any, devices: int) -> Explanation:
    """The words for one origin.

    Args:
      origin: the equation, with the relations around it.
      axis: the name of the mapped axis, or several.
      devices: on how many devices it was found.
    """
    case = _Case(origin, _named(axis), devices)
    for describe in _KINDS:
        words = describe(case)
        if words is not None:
            code, what, why, do = words
            return Explanation(code, what, why, do, case.node.line, case.node.name)
    raise AssertionError("the last kind takes all")


def drifting(draw: Node, axis: Any) -> Explanation:
    """Noise of each device's own in what all devices should share."""
    return Explanation(
        _codes.DRIFTING_COPIES,
        "noise of each device's own makes results differ that all devices should share",
        f"the key differs along {_named(axis)}, and the draw has no dimension that is split",
        "draw with a key that all devices share, or reduce over the devices afterwards, as in "
        f"lax.pmean(noise, {_named(axis)})",
        draw.line,
        draw.name,
    )


def _repeated(case: _Case) -> _Words | None:
    if not case.node.is_draw:
        return None
    if case.origin.relation is not None and not case.origin.relation.alike:
        return None
    return (
        _codes.REPEATED_NOISE,
        "all devices draw the same numbers, each for rows of its own",
        f"the key is the same on all devices of {case.axis}, so the numbers repeat after each "
        f"share of the rows: {case.devices} devices, one device's worth of noise",
        f"give each device a key: random.fold_in(key, lax.axis_index({case.axis}))",
    )


def _unreduced(case: _Case) -> _Words | None:
    relation = case.origin.relation
    if case.origin.how != "unreduced" or relation is None:
        return None
    if relation.kind == "rows":
        return (
            "",
            f"a sum over the devices is missing: rows are {_times(relation.factor)}",
            "they are the gradient of a mean over the rows of one device only",
            f"divide by lax.axis_size({case.axis}), or take the mean over all rows",
        )
    collective = f"p{relation.part}"
    return (
        "",
        f"each device goes on with its own {_part(relation)}; the {relation.part} over "
        f"{case.axis} is missing",
        f"it is made of the rows of one device at {case.born}, and no collective follows",
        f"put lax.{collective}(..., {case.axis}) between",
    )


def _sum_of_equals(case: _Case) -> _Words | None:
    if case.node.name not in _SUMS or case.factor != case.devices:
        return None
    if case.part("mean") is not None:
        return (
            "",
            f"a sum over {case.axis} of means: {_times(case.factor)}",
            f"each device has the mean over its rows, made at {case.born}, and the means are "
            "added up",
            f"use lax.pmean(..., {case.axis}), or take the sum over the rows instead of the mean",
        )
    return (
        "",
        f"a second sum over {case.axis}: {_times(case.factor)}",
        "all devices have the same value already, so the sum adds up equals",
        "leave this one out",
    )


def _wrong_scale(case: _Case) -> _Words | None:
    node, other = case.node, case.origin.other
    if node.name not in ("div", "mul") or case.part() is not None:
        return None
    for number in range(len(node.sources)):
        value, one = node.constant(number), None if other is None else other.constant(number)
        if value is None or one is None or not _is_number(value) or not _is_number(one):
            continue
        verb = "divides" if node.name == "div" else "multiplies"
        here, there = _shown(value), _shown(one)
        if here == there:
            continue
        if float(value) == case.devices * float(one):
            return (
                "",
                f"it {verb} by {here}, the number of devices, what needs no such factor",
                "the value is that of all devices already: a sum of sums, not of means",
                f"leave the factor out; if it is in lax.pmean, use lax.psum(..., {case.axis})",
            )
        return (
            "",
            f"it {verb} by {here}, and on one device by {there}",
            "that is a size of what one device has, not of the whole",
            f"use the size of the whole, as in x.shape[0] * lax.axis_size({case.axis})",
        )
    if case.factor == 1:
        return None
    return (
        "",
        f"the factor at this {node.name} makes the value {_times(case.factor)}",
        "it changes with the number of devices, and the value does not",
        "leave out a division or multiplication by the number of devices that is not needed",
    )


def _takes_part_for_whole(case: _Case) -> _Words | None:
    part = case.part()
    if part is None:
        return None
    return (
        "",
        f"the {_part(part)} of one device is used as if it were that of all rows",
        f"it is made of the rows of one device at {case.born}; each device has another",
        f"put lax.p{part.part}(..., {case.axis}) between",
    )


def _misplaced(case: _Case) -> _Words | None:
    if case.node.name not in _GATHERS:
        return None
    return (
        "",
        f"{case.node.name} over {case.axis} puts the parts together in another order than that of "
        "the rows",
        "what one device has as rows, one after the other, comes out along another dimension, or "
        "in another order",
        "check its axis, tiled=, split and concat dimensions, and its permutation, against the "
        "dimension that in_axes splits",
    )


def _at_edges(case: _Case) -> _Words | None:
    if case.node.name not in _WINDOWS:
        return None
    return (
        "",
        f"{case.node.name} looks along a dimension of which each device has only its share",
        "the rows before and after lie on other devices, and the first and last row of a device "
        "are not those of the whole",
        f"fetch the neighbours' rows with lax.ppermute(..., {case.axis}), or gather first",
    )


def _counts_rows(case: _Case) -> _Words | None:
    if case.node.name != "iota":
        return None
    return (
        "",
        "the rows of each device are counted from 0",
        "as numbers of rows they are right on the first device only",
        f"add lax.axis_index({case.axis}) times the number of rows of a device",
    )


def _whole_of_share(case: _Case) -> _Words | None:
    if not case.node.name.startswith(("reduce_", "dot_general", "arg")):
        return None
    return (
        "",
        f"{case.node.name} reduces over what one device has, and no collective makes it whole",
        "rows of other devices count as well",
        f"follow it with the collective over {case.axis} that fits, or gather first",
    )


def _any(case: _Case) -> _Words:
    if case.origin.how == "unknown":
        return (
            "",
            f"the program for {case.devices} devices has a {case.node.name} here that the one for "
            "one device has not",
            "the code does something else by the size of what a device has",
            "make the shapes that decide the same on any number of devices",
        )
    return (
        "",
        f"from this {case.node.name} on, values differ from those of one device"
        + (f": {_times(case.factor)}" if case.factor != 1 else ""),
        "its operands are as they should be, or shares of it",
        f"check whether it needs a collective over {case.axis}",
    )


_KINDS: tuple[Callable[[_Case], _Words | None], ...] = (
    _repeated,
    _unreduced,
    _sum_of_equals,
    _wrong_scale,
    _takes_part_for_whole,
    _misplaced,
    _at_edges,
    _counts_rows,
    _whole_of_share,
    _any,
)


def _part(relation: Relation) -> str:
    return {"sum": "sum", "mean": "mean", "max": "maximum", "min": "minimum"}[relation.part or ""]


def _times(factor: float) -> str:
    if factor < 1:
        return f"1/{round(1 / factor)} of what it should be"
    return f"{round(factor)} times too large"


def _named(axis: Any) -> str:
    return repr(axis) if not isinstance(axis, tuple) else ", ".join(map(repr, axis))


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and isinstance(np.asarray(value).item(), int | float)


def _shown(value: Any) -> str:
    return f"{float(value):g}"
