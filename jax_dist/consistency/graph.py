"""The equations of a program in one list, each with those that its operands come from.

Calls are looked into, and so are shard_maps and scans that are short enough; a while loop and a
cond count as one equation. What a scan carries from one round to the next has an origin of its own,
which leads nowhere: rounds are compared one after the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import CALLS

Path: TypeAlias = tuple[int, ...]  # the place of an equation, and of those around it
# An equation and which of its results; ((), n): an input. Below 0: what a scan carries over.
Origin: TypeAlias = tuple[Path, int]
Origins: TypeAlias = frozenset[Origin]

_LONGEST_SCAN = 64  # rounds; the values of a longer one are not followed
_DRAWS = (*interpreter.DRAWS, "rng_uniform")  # which has no key


@dataclasses.dataclass(frozen=True, slots=True)
class Around:
    """What stands around an equation."""

    line: str = ""  # of the innermost call with one
    rounds: int = 0  # scans
    loop: Path = ()  # the outermost of them
    on_devices: bool = False  # whether each device has its own values: inside of a shard_map

    def inside(self, eqn: JaxprEqn, path: Path) -> "Around":
        is_scan = eqn.primitive.name == "scan"
        return Around(
            interpreter.source_line(eqn) or self.line,
            self.rounds + is_scan,
            path if is_scan and not self.loop else self.loop,
            self.on_devices or eqn.primitive.name == "shard_map",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One equation of the flattened program."""

    path: Path
    eqn: JaxprEqn
    sources: tuple[Origins, ...]  # of each operand; empty for a literal
    around: "Around"
    is_draw: bool

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def rounds(self) -> int:
        """How many scans are around it."""
        return self.around.rounds

    @property
    def line(self) -> str:
        """Of the user: what JAX's own functions do is done by those who call them."""
        return interpreter.source_line(self.eqn) or self.around.line

    def constant(self, operand: int) -> Any:
        """The value of a literal operand; None for any other."""
        atom = self.eqn.invars[operand]
        return atom.val if isinstance(atom, Literal) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    nodes: dict[Path, Node]  # in program order
    results: tuple[Origins, ...]
    carried: dict[Origin, Origins]  # where the rounds before get what a scan carries over

    def rounds_before(self, origins: Origins) -> Origins:
        """Where a value comes from in the rounds before; empty for what no scan carries."""
        found = [self.carried[origin] for origin in origins if origin in self.carried]
        return frozenset().union(*found)

    def before(self, node: Node) -> list[Node]:
        """The equations that a node takes its operands from."""
        found = {path: None for origins in node.sources for path, _ in origins}
        return [self.nodes[path] for path in found if path in self.nodes]

    def reached(self, origins: Origins) -> list[Node]:
        """All equations that a value depends on, in program order."""
        waiting = [path for path, _ in origins if path in self.nodes]
        seen = set(waiting)
        while waiting:
            for node in self.before(self.nodes[waiting.pop()]):
                if node.path not in seen:
                    seen.add(node.path)
                    waiting.append(node.path)
        return [node for path, node in self.nodes.items() if path in seen]


def graph_of(jaxpr: Any) -> Graph:
    """The graph of a program, by the walk that `evaluation` makes too."""
    graph = Graph({}, (), {})
    body = interpreter.open_jaxpr(jaxpr)
    inputs = [frozenset({((), number)}) for number in range(len(body.invars))]
    results = _walk(body, inputs, (), Around(), graph)
    return Graph(dict(sorted(graph.nodes.items())), tuple(results), graph.carried)


def is_entered(eqn: JaxprEqn) -> bool:
    """Whether the equations inside are followed, rather than the equation itself."""
    name = eqn.primitive.name
    if name == "scan":
        return eqn.params["length"] <= _LONGEST_SCAN
    return name == "shard_map" or (name in CALLS and bool(interpreter.bodies(eqn)))


def is_draw(eqn: JaxprEqn) -> bool:
    """Whether random numbers come out, also of a loop that draws."""
    if eqn.primitive.name in _DRAWS:
        return True
    return any(
        interpreter.contains(body, lambda inner: inner.primitive.name in _DRAWS)
        for body in interpreter.bodies(eqn)
    )


def _walk(
    body: Any, inputs: Sequence[Origins], prefix: Path, around: Around, graph: Graph
) -> list[Origins]:
    known: dict[Var, Origins] = dict.fromkeys(body.constvars, frozenset())
    known.update(zip(body.invars, inputs, strict=True))
    for place, eqn in enumerate(body.eqns):
        path = (*prefix, place)
        sources = tuple(_origins(atom, known) for atom in eqn.invars)
        if is_entered(eqn):
            outs = _enter(eqn, sources, path, around.inside(eqn, path), graph)
        else:
            graph.nodes[path] = Node(path, eqn, sources, around, is_draw(eqn))
            outs = [frozenset({(path, number)}) for number in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, outs, strict=True))
    return [_origins(atom, known) for atom in body.outvars]


def _enter(
    eqn: JaxprEqn, sources: tuple[Origins, ...], path: Path, inside: Around, graph: Graph
) -> list[Origins]:
    inner = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    if eqn.primitive.name != "scan":
        return _walk(inner, sources, path, inside, graph)
    layout = _compat.scan_layout(eqn.params, len(sources), len(eqn.outvars))
    inputs = list(sources)
    for into in layout.carries_in:
        inputs[into] |= {(path, -1 - into)}
    outs = _walk(inner, inputs, path, inside, graph)
    for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
        graph.carried[path, -1 - into] = outs[out]
        outs[out] |= sources[into]  # of no rounds, a carry is what came in
    return outs


def _origins(atom: Any, known: dict[Var, Origins]) -> Origins:
    return frozenset() if isinstance(atom, Literal) else known[atom]
