"""From a result that differs back to the equation where it went wrong, and what is wrong there.

`_Search` walks back over the graph; `_explain` puts the fault that it finds in words.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from jax_dist import _codes
from jax_dist.consistency.evaluation import Graph, Node, Origins, Path, Records
from jax_dist.consistency.relations import Expected, Relation, Verdict, are_alike, times
from jax_dist.consistency.runs import CheckedProgram, Reference, Several, on_one

_How: TypeAlias = Literal["unreduced", "lost", "unknown"]

_MOST = 20_000_000  # numbers that are kept at once


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

    `drifting` are the results that only the draws make differ between the devices; `axis` names the
    mapped axis, or several.
    """
    axis = ", ".join(map(repr, axis)) if isinstance(axis, tuple) else repr(axis)
    graph = Graph.of(program.jaxpr)
    if max(graph.size, Graph.of(one.jaxpr).size) > _MOST:
        what = "the values of the equations are too many to be compared; give smaller arguments"
        return (Explanation("", what, "", "", "", ""),)
    reference = on_one(one, leaves, everything=True)
    run = Several(program, leaves, reference, everything=True)
    search = _Search(run, run.values()[1], reference, axis, program.devices)
    origins = [
        (each.name, origin)
        for each, ways in zip(verdicts, graph.results, strict=True)
        if not each.same and (origin := search.origin(ways)) is not None
    ]
    found: list[tuple[str, Explanation]] = []
    causes: list[_Fault] = []
    for name, origin in sorted(origins, key=lambda each: each[1].node.path):  # in program order
        ways = frozenset().union(*origin.node.sources)
        before = {node.path for node in graph.reached(ways)}
        # What only follows from another one is put down to that.
        causes.append(next((each for each in causes if each.node.path in before), origin))
        found.append((name, _explain(causes[-1])))
    if drifting:
        search = _Search(run, run.values(given=False)[1], reference, axis, program.devices)
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
class _Fault:
    """Where a result goes wrong, with all that its explanation is made from."""

    how: _How
    node: Node  # the equation to look at
    relation: Relation | None  # of its result; None: there is none like it on one device
    operands: tuple[Relation | None, ...]  # of each operand; None for a constant
    makers: tuple[Node, ...]  # that made the parts that it takes for the whole
    other: Node | None  # the same equation on one device
    axis: str  # "'i'"
    devices: int

    @property
    def factor(self) -> float:
        return 1.0 if self.relation is None else self.relation.factor

    @property
    def part(self) -> Relation | None:
        """The first operand that is made of parts."""
        return next((each for each in self.operands if each and each.kind == "parts"), None)

    @property
    def born(self) -> str:
        lines = dict.fromkeys(node.line for node in self.makers if node.line)
        return ", ".join(lines) or "a line that is unknown"


class _Search:
    """The relations of all equations, on one number of devices."""

    def __init__(
        self, run: Several, records: Records, reference: Reference, axis: str, devices: int
    ) -> None:
        self.graph: Graph = run.graph
        self._reference, self._pairs = reference, run.pairs
        self._axis, self._devices = axis, devices
        self._known: dict[Path, list[Relation | None]] = {}
        for path, node in self.graph.nodes.items():
            self._known[path] = self._relations(node, records.get(path))

    def origin(self, results: Origins) -> _Fault | None:
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
        extremes = (
            node.record.extreme
            or node.record.over == "index"
            or any(each is not None and each.part in ("max", "min") for each in sources)
        )
        return [
            _relation(value, each, node, extremes=extremes)
            for value, each in zip(values, expected, strict=True)
        ]

    def _lost(self, results: Origins) -> _Fault | None:
        """Of the equations with good operands and a bad result, the first one."""
        is_bad = lambda node: not all(each and each.is_good for each in self._known[node.path])
        nodes = self.graph.reached(results, is_bad)
        bad = {node.path for node in nodes}
        first = [
            node
            for node in nodes
            if not any(
                each.path in bad and self._round(each) <= self._round(node)
                for each in self.graph.before(node)
            )
        ]
        if not first:
            return None
        # As equations are computed: in a loop, round by round.
        when = lambda node: (node.around.loop or node.path, self._round(node), node.path)
        node = min(first, key=when)
        relation = next(
            (each for each in self._known[node.path] if each is None or not each.is_good), None
        )
        parts = [each for origins in node.sources if (each := self._parts(origins))]
        born = [maker for origins in parts for maker in self._born(origins)]
        for update in (each for origins in parts for each in self._parts_before(origins)):
            if update.record.adds and self._meets_whole(update, state=True):
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

    def _unreduced(self, results: Origins) -> _Fault | None:
        """Parts that come out as they are: where they first met what is whole, or were made."""
        relation = self.relation(results)
        if relation is None or relation.kind not in ("parts", "rows"):
            return None
        parts = self._parts_before(results)
        meetings = [node for node in parts if node.record.adds and self._meets_whole(node)]
        born = self._born(results)
        node = (meetings or born or [None])[-1]
        return None if node is None else self._origin("unreduced", node, relation, born)

    def _origin(
        self, how: _How, node: Node, relation: Relation | None, born: Sequence[Node]
    ) -> _Fault:
        operands: list[Relation | None] = []
        for number, origins in enumerate(node.sources):
            parts = self.relation(self._parts(origins))
            own = self.relation(origins) if parts is None else parts.early
            operands.append(own if node.constant(number) is None else None)
        other = self._pairs.get(node.path)
        paired = None if other is None else self._reference.graph.nodes[other]
        found = how, node, relation, tuple(operands), tuple(born), paired
        return _Fault(*found, self._axis, self._devices)

    def _round(self, node: Node) -> int:
        """The first round in which an equation goes wrong."""
        bad = [np.argmin(each.good) for each in self._known[node.path] if each and not each.is_good]
        return int(min(bad, default=0)) if node.rounds else 0

    def _parts_before(self, origins: Origins) -> list[Node]:
        """The equations whose results are parts, up to where these are made; in program order."""
        is_part = lambda each: each is not None and each.early.kind == "parts"
        return self.graph.reached(origins, lambda node: any(map(is_part, self._known[node.path])))

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
    return Relation.of(flat, dataclasses.replace(expected, value=one), extremes=extremes)


_Words: TypeAlias = tuple[str, str, str]  # what, why, what to do


def _explain(fault: _Fault) -> Explanation:
    repeated = _repeated(fault)
    kinds = (_unreduced, _sum_of_equals, _wrong_scale, _takes_part_for_whole, _of_primitive)
    words = repeated or next(filter(None, (kind(fault) for kind in kinds)), None) or _other(fault)
    code = _codes.REPEATED_NOISE if repeated else ""
    return Explanation(code, *words, fault.node.line, fault.node.name)


def _drifting(draw: Node, axis: str) -> Explanation:
    """Noise of each device's own in what all devices should share."""
    return Explanation(
        _codes.DRIFTING_COPIES,
        "noise of each device's own makes results differ that all devices should share",
        f"the key differs along {axis}, and the draw has no dimension that is split",
        "draw with a key that all devices share, or reduce over the devices afterwards, as in "
        f"lax.pmean(noise, {axis})",
        draw.line,
        draw.name,
    )


def _repeated(fault: _Fault) -> _Words | None:
    if not fault.node.is_draw:
        return None
    if fault.relation is not None and not fault.relation.alike:
        return None
    return (
        "all devices draw the same numbers, each for rows of its own",
        f"the key is the same on all devices of {fault.axis}, so the numbers repeat after each "
        f"share of the rows: {fault.devices} devices, one device's worth of noise",
        f"give each device a key: random.fold_in(key, lax.axis_index({fault.axis}))",
    )


def _unreduced(fault: _Fault) -> _Words | None:
    relation = fault.relation
    if fault.how != "unreduced" or relation is None:
        return None
    if relation.kind == "rows":
        return (
            f"a sum over the devices is missing: rows are {times(relation.factor)}",
            "they are the gradient of a mean over the rows of one device only",
            f"divide by lax.axis_size({fault.axis}), or take the mean over all rows",
        )
    collective = f"p{relation.part}"
    return (
        f"each device goes on with its own {_part(relation)}; the {relation.part} over "
        f"{fault.axis} is missing",
        f"it is made of the rows of one device at {fault.born}, and no collective follows",
        f"put lax.{collective}(..., {fault.axis}) between",
    )


def _sum_of_equals(fault: _Fault) -> _Words | None:
    if fault.node.record.over != "sum" or fault.factor != fault.devices:
        return None
    if any(each and each.kind == "parts" and each.part == "mean" for each in fault.operands):
        return (
            f"a sum over {fault.axis} of means: {times(fault.factor)}",
            f"each device has the mean over its rows, made at {fault.born}, and the means are "
            "added up",
            f"use lax.pmean(..., {fault.axis}), or take the sum over the rows instead of the mean",
        )
    return (
        f"a second sum over {fault.axis}: {times(fault.factor)}",
        "all devices have the same value already, so the sum adds up equals",
        "leave this one out",
    )


def _wrong_scale(fault: _Fault) -> _Words | None:
    node, other = fault.node, fault.other
    if not node.record.scales or fault.part is not None:
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
        if value == fault.devices * one:
            return (
                f"it {verb} by {here}, the number of devices, what needs no such factor",
                "the value is that of all devices already: a sum of sums, not of means",
                f"leave the factor out; if it is in lax.pmean, use lax.psum(..., {fault.axis})",
            )
        return (
            f"it {verb} by {here}, and on one device by {there}",
            "that is a size of what one device has, not of the whole",
            f"use the size of the whole, as in x.shape[0] * lax.axis_size({fault.axis})",
        )
    return None


def _takes_part_for_whole(fault: _Fault) -> _Words | None:
    part = fault.part
    if part is None:
        return None
    return (
        f"the {_part(part)} of one device is used as if it were that of all rows",
        f"it is made of the rows of one device at {fault.born}; each device has another",
        f"put lax.p{part.part}(..., {fault.axis}) between",
    )


def _of_primitive(fault: _Fault) -> _Words | None:
    """What the name of the equation tells."""
    name, record = fault.node.name, fault.node.record
    if record.over in ("gather", "exchange", "permute", "scatter"):
        return (
            f"{name} over {fault.axis} puts the parts together in another order than that of the "
            "rows",
            "what one device has as rows, one after the other, comes out along another dimension, "
            "or in another order",
            "check its axis, tiled=, split and concat dimensions, and its permutation, against the "
            "dimension that in_axes splits",
        )
    if record.ordered:
        return (
            f"{name} looks along a dimension of which each device has only its share",
            "the rows before and after lie on other devices, and the first and last row of a "
            "device are not those of the whole",
            f"fetch the neighbours' rows with lax.ppermute(..., {fault.axis}), or gather first",
        )
    if name == "iota":
        return (
            "the rows of each device are counted from 0",
            "as numbers of rows they are right on the first device only",
            f"add lax.axis_index({fault.axis}) times the number of rows of a device",
        )
    return None


def _other(fault: _Fault) -> _Words:
    if fault.how == "unknown":
        return (
            f"the program for {fault.devices} devices has a {fault.node.name} here that the one "
            "for one device has not",
            "the code does something else by the size of what a device has",
            "make the shapes that decide the same on any number of devices",
        )
    return (
        f"from this {fault.node.name} on, values differ from those of one device"
        + (f": {times(fault.factor)}" if fault.factor != 1 else ""),
        "its operands are as they should be, or shares of it",
        f"check whether it needs a collective over {fault.axis}",
    )


def _part(relation: Relation) -> str:
    return {"max": "maximum", "min": "minimum"}.get(relation.part or "", relation.part or "")
