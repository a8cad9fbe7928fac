"""Which equation of the program for one device is which in that for several."""

import difflib
from collections.abc import Hashable

from jax_dist.consistency.graph import Graph, Node, Path


def pairs_of(several: Graph, one: Graph) -> dict[Path, Path]:
    """By equation of the first, that of the second; what only one of them has is left out.

    Both come from the same code, so they are nearly always the same list. Where a loop of Python
    goes over the rows of a device they are not, and the longest common part counts.
    """
    left, right = list(several.nodes.values()), list(one.nodes.values())
    marks, others = [_mark(node) for node in left], [_mark(node) for node in right]
    if marks == others:
        return {node.path: other.path for node, other in zip(left, right, strict=True)}
    matcher = difflib.SequenceMatcher(None, marks, others, autojunk=False)
    return {
        left[start + offset].path: right[other + offset].path
        for start, other, size in matcher.get_matching_blocks()
        for offset in range(size)
        if _ranks(left[start + offset]) == _ranks(right[other + offset])
    }


def _mark(node: Node) -> Hashable:
    return node.name, node.line, node.rounds


def _ranks(node: Node) -> list[int]:
    return [len(getattr(var.aval, "shape", ())) for var in node.eqn.outvars]
