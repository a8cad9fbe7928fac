"""From a result that differs back to the equation where it went wrong."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from jax_dist.consistency.graph import Graph, Node, Origins, Path
from jax_dist.consistency.relations import Expected, Relation, are_alike, relation_of
from jax_dist.consistency.runs import Reference, Values

How: TypeAlias = Literal["unreduced", "lost", "shape", "unknown"]

_EXTREMES = (
    "axis_index",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_and",
    "cummax",
    "cummin",
)
_ADDITIONS = ("add", "sub", "add_any")


@dataclasses.dataclass(frozen=True, slots=True)
class FaultOrigin:
    """Where a result goes wrong."""

    how: How
    node: Node  # the equation to look at
    relation: Relation | None  # of its result; None: there is none like it on one device
    operands: tuple[Relation | None, ...]  # of each operand; None for a constant
    born: tuple[Node, ...] = ()  # where the parts were made that it takes for the whole
    other: Node | None = None  # the same equation on one device


class Search:
    """The relations of all equations, on one number of devices."""

    def __init__(
        self, graph: Graph, values: Values, reference: Reference, pairs: Mapping[Path, Path]
    ) -> None:
        self.graph: Graph = graph
        self._reference, self._pairs = reference, pairs
        self._known: dict[Path, list[Relation | None]] = {}
        for path, node in graph.nodes.items():
            self._known[path] = self._relations(node, values.records.get(path))

    def origin(self, results: Origins) -> FaultOrigin | None:
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

    def _lost(self, results: Origins) -> FaultOrigin | None:
        """Of the equations with good operands and a bad result, the first one."""
        waiting, seen, found = self._paths(results), set(), []
        while waiting:
            path = waiting.pop()
            if path in seen or self._is_good(path):
                continue
            seen.add(path)
            found.append(path)
            waiting += [node.path for node in self.graph.before(self.graph.nodes[path])]
        bad = set(found)
        first = [
            path
            for path in sorted(bad)
            if not any(
                node.path in bad and self._round(node.path) <= self._round(path)
                for node in self.graph.before(self.graph.nodes[path])
            )
        ]
        if not first:
            return None
        node = self.graph.nodes[min(first, key=self._when)]
        relation = next(
            (each for each in self._known[node.path] if each is None or not each.is_good), None
        )
        how: How = "unknown" if relation is None else "lost"
        parts = [each for origins in node.sources if (each := self._parts(origins))]
        born = [maker for origins in parts for maker in self._born(origins)]
        updates = [
            each
            for origins in parts
            for each in self._parts_before(origins)
            if each.name in _ADDITIONS and self._meets_whole(each, state=True)
        ]
        if updates:  # a state that went wrong before it is used
            made = self._relation_of_node(updates[0])
            return self._origin("unreduced", updates[0], made, born)
        return self._origin(how, node, relation, born)

    def _parts(self, origins: Origins) -> Origins:
        """Where parts come from that are taken for the whole; also from the round before."""
        for each in (origins, self.graph.rounds_before(origins)):
            relation = self.relation(each)
            if relation is not None and relation.early.kind == "parts":
                return each
        return frozenset()

    def _unreduced(self, results: Origins) -> FaultOrigin | None:
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
        self, how: How, node: Node, relation: Relation | None, born: Sequence[Node]
    ) -> FaultOrigin:
        operands = tuple(
            None if node.constant(number) is not None else self._operand(origins)
            for number, origins in enumerate(node.sources)
        )
        other = self._pairs.get(node.path)
        paired = None if other is None else self._reference.graph.nodes[other]
        return FaultOrigin(how, node, relation, operands, tuple(born), paired)

    def _operand(self, origins: Origins) -> Relation | None:
        parts = self.relation(self._parts(origins))
        return self.relation(origins) if parts is None else parts.early

    def _relation_of_node(self, node: Node) -> Relation | None:
        found = next(iter(self._known[node.path]), None)
        return None if found is None else found.early

    def _paths(self, origins: Origins) -> list[Path]:
        return [path for path, _ in origins if path in self.graph.nodes]

    def _is_good(self, path: Path) -> bool:
        return all(each is not None and each.is_good for each in self._known[path])

    def _when(self, path: Path) -> tuple[Path, int, Path]:
        """The order in which equations are computed: in a loop, round by round."""
        return self.graph.nodes[path].around.loop or path, self._round(path), path

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
        return [
            node
            for node in parts
            if not any(before.path in paths for before in self.graph.before(node))
        ]

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
    devices, rounds = len(values), node.rounds
    count = int(np.prod(values.shape[1 : 1 + rounds]))
    whole = expected.value[0]
    flat = values.reshape(devices, count, *values.shape[1 + rounds :])
    one = whole.reshape(count, *whole.shape[rounds:])
    if len(flat) == 1 and not node.around.on_devices:  # one array for all devices
        flat = np.broadcast_to(flat, flat.shape)
    if node.is_draw or _is_key(node):
        alike = bool(are_alike(flat, 0.0).all())
        if _is_key(node):
            return Relation("own", np.ones(count, bool), alike=alike)
    return relation_of(flat, dataclasses.replace(expected, value=one), extremes=extremes)


def _is_key(node: Node) -> bool:
    return node.name.startswith("random_") and not node.is_draw
