"""From a result that differs back to the equation where it went wrong, and what is wrong there.

`_Search` walks back over the graph; `_explain` puts what it finds, why, and what to do, in words.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from jax_dist import _codes
from jax_dist.consistency.evaluation import Graph, Node, Origins, Path, Records, graph_of
from jax_dist.consistency.relations import Expected, Relation, Verdict, are_alike, relation_of
from jax_dist.consistency.runs import CheckedProgram, Reference, Several, on_one

_How: TypeAlias = Literal["unreduced", "lost", "unknown"]

_EXTREMES = (
    "axis_index",
    "cummax",
    "cummin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
)
_MOST = 20_000_000  # numbers that are kept at once
_ADDITIONS = ("add", "sub", "add_any")


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


def explanations(
    program: CheckedProgram,
    one: CheckedProgram,
    leaves: Sequence[Any],
    verdicts: Sequence[Verdict],
    drifting: Sequence[str],
    axis: Any,
) -> tuple[Explanation, ...]:
    """What is wrong in a program of several devices: one for each line, with all its results.

    Args:
      program: the one of several devices.
      one: that of one device.
      leaves: of the arguments.
      verdicts: of each result.
      drifting: the results that only the draws make differ between the devices.
      axis: the name of the mapped axis, or several.
    """
    graph = graph_of(program.jaxpr)
    if max(graph.size, graph_of(one.jaxpr).size) > _MOST:
        what = "the values of the equations are too many to be compared; give smaller arguments"
        return (Explanation("", what, "", "", "", ""),)
    reference = on_one(one, leaves, everything=True)
    run = Several(program, leaves, reference, everything=True)
    search = _Search(run, run.values()[1], reference)
    origins = [
        (each.name, origin)
        for each, ways in zip(verdicts, graph.results, strict=True)
        if not each.same and (origin := search.origin(ways)) is not None
    ]
    found: list[tuple[str, Explanation]] = []
    causes: list[_FaultOrigin] = []
    for name, origin in sorted(origins, key=lambda each: each[1].node.path):  # in program order
        ways = frozenset().union(*origin.node.sources)
        before = {node.path for node in graph.reached(ways)}
        # What only follows from another one is put down to that.
        causes.append(next((each for each in causes if each.node.path in before), origin))
        found.append((name, _explain(causes[-1], axis, program.devices)))
    if drifting:
        search = _Search(run, run.values(given=False)[1], reference)
        for each, ways in zip(verdicts, graph.results, strict=True):
            draw = search.first_own_draw(ways) if each.name in drifting else None
            if draw is not None:
                found.append((each.name, _drifting(draw, axis)))
    by_line: dict[tuple[str, str], Explanation] = {}
    for name, each in found:
        known = by_line.setdefault((each.where, each.code), each)
        results = tuple(dict.fromkeys((*known.results, name)))
        by_line[each.where, each.code] = dataclasses.replace(known, results=results)
    return tuple(by_line.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _FaultOrigin:
    """Where a result goes wrong."""

    how: _How
    node: Node  # the equation to look at
    relation: Relation | None  # of its result; None: there is none like it on one device
    operands: tuple[Relation | None, ...]  # of each operand; None for a constant
    born: tuple[Node, ...] = ()  # where the parts were made that it takes for the whole
    other: Node | None = None  # the same equation on one device


class _Search:
    """The relations of all equations, on one number of devices."""

    def __init__(self, run: Several, records: Records, reference: Reference) -> None:
        self.graph: Graph = run.graph
        self._reference, self._pairs = reference, run.pairs
        self._known: dict[Path, list[Relation | None]] = {}
        for path, node in self.graph.nodes.items():
            self._known[path] = self._relations(node, records.get(path))

    def origin(self, results: Origins) -> _FaultOrigin | None:
        """The first equation on the way to a result that loses it; None if all seems right."""
        return self._lost(results) or self._unreduced(results)

    def relation(self, origins: Origins) -> Relation | None:
        """The worst of what a value may come from; None for an input or a constant."""
        found = [self._known[path][number] for path, number in origins if path in self._known]
        lost = [each for each in found if each is not None and not each.is_good]
        return next(iter(lost), next(iter(found), None))

    def first_own_draw(self, origins: Origins) -> Node | None:
        """The first draw, before a value, that is not the same on all devices."""
        for node in self.graph.reached(origins):
            relations = self._known[node.path]
            if node.is_draw and any(each is not None and not each.alike for each in relations):
                return node
        return None

    def _relations(self, node: Node, values: Sequence[np.ndarray] | None) -> list[Relation | None]:
        other = self._pairs.get(node.path)
        expected = self._reference.records.get(other) if other is not None else None
        if values is None or expected is None:
            return [None] * len(node.eqn.outvars)
        sources = [self.relation(origins) for origins in node.sources]
        extremes = node.name in _EXTREMES or any(
            each is not None and each.part in ("max", "min") for each in sources
        )
        return [
            _relation(value, each, node, extremes=extremes)
            for value, each in zip(values, expected, strict=True)
        ]

    def _lost(self, results: Origins) -> _FaultOrigin | None:
        """Of the equations with good operands and a bad result, the first one."""
        nodes = self.graph.nodes
        waiting, bad = self._paths(results), set()
        while waiting:
            path = waiting.pop()
            if path in bad or all(each and each.is_good for each in self._known[path]):
                continue
            bad.add(path)
            waiting += [node.path for node in self.graph.before(nodes[path])]
        first = [
            path
            for path in bad
            if not any(
                node.path in bad and self._round(node.path) <= self._round(path)
                for node in self.graph.before(nodes[path])
            )
        ]
        if not first:
            return None
        # As equations are computed: in a loop, round by round.
        when = lambda path: (nodes[path].around.loop or path, self._round(path), path)
        node = nodes[min(first, key=when)]
        relation = next(
            (each for each in self._known[node.path] if each is None or not each.is_good), None
        )
        parts = [each for origins in node.sources if (each := self._parts(origins))]
        born = [maker for origins in parts for maker in self._born(origins)]
        for update in (each for origins in parts for each in self._parts_before(origins)):
            if update.name in _ADDITIONS and self._meets_whole(update, state=True):
                # A state that went wrong before it is used.
                made = next(iter(self._known[update.path]), None)
                return self._origin("unreduced", update, made and made.early, born)
        return self._origin("unknown" if relation is None else "lost", node, relation, born)

    def _parts(self, origins: Origins) -> Origins:
        """Where parts come from that are taken for the whole; also from the round before."""
        for each in (origins, self.graph.rounds_before(origins)):
            relation = self.relation(each)
            if relation is not None and relation.early.kind == "parts":
                return each
        return frozenset()

    def _unreduced(self, results: Origins) -> _FaultOrigin | None:
        """Parts that come out as they are: where they first met what is whole, or were made."""
        relation = self.relation(results)
        if relation is None or relation.kind not in ("parts", "rows"):
            return None
        parts = self._parts_before(results)
        meetings = [node for node in parts if node.name in _ADDITIONS and self._meets_whole(node)]
        born = self._born(results)
        node = (meetings or born or [None])[-1]
        return None if node is None else self._origin("unreduced", node, relation, born)

    def _origin(
        self, how: _How, node: Node, relation: Relation | None, born: Sequence[Node]
    ) -> _FaultOrigin:
        operands: list[Relation | None] = []
        for number, origins in enumerate(node.sources):
            parts = self.relation(self._parts(origins))
            own = self.relation(origins) if parts is None else parts.early
            operands.append(own if node.constant(number) is None else None)
        other = self._pairs.get(node.path)
        paired = None if other is None else self._reference.graph.nodes[other]
        return _FaultOrigin(how, node, relation, tuple(operands), tuple(born), paired)

    def _paths(self, origins: Origins) -> list[Path]:
        return [path for path, _ in origins if path in self.graph.nodes]

    def _round(self, path: Path) -> int:
        """The first round in which an equation goes wrong."""
        bad = [np.argmin(each.good) for each in self._known[path] if each and not each.is_good]
        return int(min(bad, default=0)) if self.graph.nodes[path].rounds else 0

    def _parts_before(self, origins: Origins) -> list[Node]:
        """The equations whose results are parts, up to where these are made; in program order."""
        waiting, seen = self._paths(origins), set()
        while waiting:
            path = waiting.pop()
            if path in seen or not any(
                each is not None and each.early.kind == "parts" for each in self._known[path]
            ):
                continue
            seen.add(path)
            waiting += [node.path for node in self.graph.before(self.graph.nodes[path])]
        return [node for path, node in self.graph.nodes.items() if path in seen]

    def _born(self, origins: Origins) -> list[Node]:
        """Those of them that take nothing that is a part."""
        parts = self._parts_before(origins)
        paths = {node.path for node in parts}
        return [n for n in parts if paths.isdisjoint(each.path for each in self.graph.before(n))]

    def _meets_whole(self, node: Node, *, state: bool = False) -> bool:
        """Whether parts are added to what all devices share; to a `state`, as it came in."""
        if any(node.constant(number) is not None for number in range(len(node.sources))):
            return False
        relations = [self.relation(origins) for origins in node.sources]
        kinds = ["same" if each is None else each.early.kind for each in relations]
        if sorted(kinds) != ["parts", "same"]:
            return False
        whole = node.sources[kinds.index("same")]
        return not state or any(path not in self.graph.nodes for path, _ in whole)


def _relation(values: np.ndarray, expected: Expected, node: Node, *, extremes: bool) -> Relation:
    """Of one result, the rounds of all loops around it in one dimension."""
    rounds, whole = node.rounds, expected.value[0]
    count = int(np.prod(values.shape[1 : 1 + rounds]))
    flat = values.reshape(len(values), count, *values.shape[1 + rounds :])
    if node.name.startswith("random_") and not node.is_draw:  # a key
        alike = bool(are_alike(flat, 0.0).all())
        return Relation("own", np.ones(count, bool), alike=alike)
    one = whole.reshape(count, *whole.shape[rounds:])
    return relation_of(flat, dataclasses.replace(expected, value=one), extremes=extremes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """What an explanation is made from."""

    origin: _FaultOrigin
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


_Words: TypeAlias = tuple[str, str, str]  # what, why, what to do

_SUMS = ("psum", "psum_invariant")
_GATHERS = ("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter")
_WINDOWS = (
    # What looks at several rows at once, or at one of them by its number.
    "argmax", "argmin", "argsort", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax",
    "cummin", "cumprod", "cumsum", "dynamic_slice", "dynamic_update_slice", "fft", "gather", "pad",
    "reduce_prod", "reduce_window", "reduce_window_max", "reduce_window_sum", "rev", "scatter",
    "scatter-add", "scatter_add", "slice", "sort", "split", "top_k",
)  # fmt: skip


def _explain(origin: _FaultOrigin, axis: Any, devices: int) -> Explanation:
    """The words for one origin.

    Args:
      origin: the equation, with the relations around it.
      axis: the name of the mapped axis, or several.
      devices: on how many devices it was found.
    """
    case = _Case(origin, _named(axis), devices)
    repeated = _repeated(case)
    kinds = (_unreduced, _sum_of_equals, _wrong_scale, _takes_part_for_whole, _of_primitive)
    words = repeated or next(filter(None, (kind(case) for kind in kinds)), None) or _other(case)
    code = _codes.REPEATED_NOISE if repeated else ""
    return Explanation(code, *words, case.node.line, case.node.name)


def _drifting(draw: Node, axis: Any) -> Explanation:
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
            f"a sum over the devices is missing: rows are {_times(relation.factor)}",
            "they are the gradient of a mean over the rows of one device only",
            f"divide by lax.axis_size({case.axis}), or take the mean over all rows",
        )
    collective = f"p{relation.part}"
    return (
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
            f"a sum over {case.axis} of means: {_times(case.factor)}",
            f"each device has the mean over its rows, made at {case.born}, and the means are "
            "added up",
            f"use lax.pmean(..., {case.axis}), or take the sum over the rows instead of the mean",
        )
    return (
        f"a second sum over {case.axis}: {_times(case.factor)}",
        "all devices have the same value already, so the sum adds up equals",
        "leave this one out",
    )


def _wrong_scale(case: _Case) -> _Words | None:
    node, other = case.node, case.origin.other
    if node.name not in ("div", "mul") or case.part() is not None:
        return None
    for number in range(len(node.sources)):
        pair: list[Any] = [each and each.constant(number) for each in (node, other)]
        if not all(np.ndim(n) == 0 and isinstance(np.asarray(n).item(), int | float) for n in pair):
            continue
        value, one = map(float, pair)
        verb = "divides" if node.name == "div" else "multiplies"
        here, there = f"{value:g}", f"{one:g}"
        if here == there:
            continue
        if value == case.devices * one:
            return (
                f"it {verb} by {here}, the number of devices, what needs no such factor",
                "the value is that of all devices already: a sum of sums, not of means",
                f"leave the factor out; if it is in lax.pmean, use lax.psum(..., {case.axis})",
            )
        return (
            f"it {verb} by {here}, and on one device by {there}",
            "that is a size of what one device has, not of the whole",
            f"use the size of the whole, as in x.shape[0] * lax.axis_size({case.axis})",
        )
    if case.factor == 1:
        return None
    return (
        f"the factor at this {node.name} makes the value {_times(case.factor)}",
        "it changes with the number of devices, and the value does not",
        "leave out a division or multiplication by the number of devices that is not needed",
    )


def _takes_part_for_whole(case: _Case) -> _Words | None:
    part = case.part()
    if part is None:
        return None
    return (
        f"the {_part(part)} of one device is used as if it were that of all rows",
        f"it is made of the rows of one device at {case.born}; each device has another",
        f"put lax.p{part.part}(..., {case.axis}) between",
    )


def _of_primitive(case: _Case) -> _Words | None:
    """What the name of the equation tells."""
    name = case.node.name
    if name in _GATHERS:
        return (
            f"{name} over {case.axis} puts the parts together in another order than that of the "
            "rows",
            "what one device has as rows, one after the other, comes out along another dimension, "
            "or in another order",
            "check its axis, tiled=, split and concat dimensions, and its permutation, against the "
            "dimension that in_axes splits",
        )
    if name in _WINDOWS:
        return (
            f"{name} looks along a dimension of which each device has only its share",
            "the rows before and after lie on other devices, and the first and last row of a "
            "device are not those of the whole",
            f"fetch the neighbours' rows with lax.ppermute(..., {case.axis}), or gather first",
        )
    if name == "iota":
        return (
            "the rows of each device are counted from 0",
            "as numbers of rows they are right on the first device only",
            f"add lax.axis_index({case.axis}) times the number of rows of a device",
        )
    if name.startswith(("reduce_", "dot_general", "arg")):
        return (
            f"{name} reduces over what one device has, and no collective makes it whole",
            "rows of other devices count as well",
            f"follow it with the collective over {case.axis} that fits, or gather first",
        )
    return None


def _other(case: _Case) -> _Words:
    if case.origin.how == "unknown":
        return (
            f"the program for {case.devices} devices has a {case.node.name} here that the one for "
            "one device has not",
            "the code does something else by the size of what a device has",
            "make the shapes that decide the same on any number of devices",
        )
    return (
        f"from this {case.node.name} on, values differ from those of one device"
        + (f": {_times(case.factor)}" if case.factor != 1 else ""),
        "its operands are as they should be, or shares of it",
        f"check whether it needs a collective over {case.axis}",
    )


def _part(relation: Relation) -> str:
    return {"sum": "sum", "mean": "mean", "max": "maximum", "min": "minimum"}[relation.part or ""]


def _times(factor: float) -> str:
    if factor < 1:
        return f"1/{round(1 / factor)} of what it should be"
    return f"{round(factor)} times too large"


def _named(axis: Any) -> str:
    return repr(axis) if not isinstance(axis, tuple) else ", ".join(map(repr, axis))
