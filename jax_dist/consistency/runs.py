"""The values of a program on one device and on several, and how far rounding may move them.

Equations of the two programs are compared in pairs: one in the program for one device, and the same
one in that for several.
"""

import dataclasses
import difflib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.consistency import evaluation
from jax_dist.consistency.evaluation import Draws, evaluate
from jax_dist.consistency.graph import Graph, Node, Path, graph_of
from jax_dist.consistency.programs import CheckedProgram
from jax_dist.consistency.relations import Expected, distance, rows_along

_SEEDS = (1, 2, 3)  # runs with every result moved by rounding
_SAFETY = 8.0  # how much farther than in these runs a value may lie
_ULPS = 4.0  # and besides, of its largest element
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MOST = 20_000_000  # numbers that are kept at once


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """What came of a run: `[devices, *shape]`, and of equations `[devices, *rounds, *shape]`."""

    results: list[np.ndarray]
    records: dict[Path, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What one device computes, with the tolerance of each value."""

    program: CheckedProgram
    graph: Graph
    results: list[Expected]
    records: dict[Path, list[Expected]]


def on_one(program: CheckedProgram, args: Sequence[Any], *, everything: bool = False) -> Reference:
    """Runs a program of one device, and again with all rounding moved.

    Args:
      program: the one for one device.
      args: the leaves of the arguments.
      everything: whether to keep the values of all equations, not only what is drawn.
    """
    graph = graph_of(program.jaxpr)
    wanted = _wanted(graph, everything=everything)

    def trial(leaves: Sequence[Any], noise: evaluation.Noise) -> Any:
        moved = [evaluation.moved_input(leaf, noise) for leaf in leaves]
        return evaluate(program.jaxpr, moved, wanted=wanted, noise=noise)

    run = _jit(trial)
    leaves = [jnp.asarray(leaf) for leaf in args]
    exact = run(leaves, evaluation.Noise(jnp.float32(0), jnp.uint32(0)))
    moved = [run(leaves, evaluation.Noise(jnp.float32(1), jnp.uint32(seed))) for seed in _SEEDS]
    expected = jax.tree.map(_expected, exact, *moved)
    results, records = expected
    if not program.mapped:
        results = [dataclasses.replace(each, value=each.value[None]) for each in results]
    return Reference(program, graph, results, records)


class Several:
    """A program of several devices, to be run."""

    def __init__(
        self,
        program: CheckedProgram,
        args: Sequence[Any],
        graph: Graph,
        draws: Draws,
        *,
        everything: bool = False,
    ) -> None:
        """Prepares it; see `on_one`."""
        self._program, self._draws = program, dict(draws)
        self._leaves = [jnp.asarray(leaf) for leaf in args]
        wanted = _wanted(graph, everything=everything)

        def run(leaves: Sequence[Any], draws: Draws, given: Any) -> Any:
            return evaluate(program.jaxpr, leaves, wanted=wanted, draws=draws, given=given)

        self._run = _jit(run)

    def values(self, *, given: bool = True) -> Values:
        """What the devices compute.

        Args:
          given: whether devices with a key of their own get what one device draws.
        """
        results, records = self._run(self._leaves, self._draws, jnp.bool_(given))
        if not self._program.mapped:
            results = [each[None] for each in results]
        return Values(jax.tree.map(_host, results), jax.tree.map(_host, records))


def _jit(run: Callable) -> Callable:
    """To run a few times only, it need not be fast."""
    return jax.jit(run, compiler_options=_QUICK if jax.default_backend() == "cpu" else None)


def draws_for(
    reference: Reference, graph: Graph, devices: int, pairs: Mapping[Path, Path]
) -> dict[Path, list[Any]]:
    """What each device draws if its key is its own: its rows of what one device draws.

    Args:
      reference: with what one device draws.
      graph: of the program of several devices.
      devices: how many.
      pairs: for its equations, those of one device.
    """
    draws: dict[Path, list[Any]] = {}
    for path, node in graph.nodes.items():
        if not (node.is_draw and node.around.on_devices and path in pairs):
            continue
        drawn = [each.value for each in reference.records[pairs[path]]]
        shapes = [tuple(each.shape) for each in _types(node)]
        shares = [
            _share(value, shape, devices, node.rounds)
            for value, shape in zip(drawn, shapes, strict=True)
        ]
        if all(share is not None for share in shares):
            draws[path] = [
                share.astype(_plain(each.dtype))
                for share, each in zip(shares, _types(node), strict=True)
                if share is not None
            ]
    return draws


def amount(graph: Graph) -> int:
    """How many numbers the equations of a program have as results."""
    types = [each for node in graph.nodes.values() for each in _types(node)]
    return sum(int(np.prod(each.shape)) for each in types if hasattr(each, "shape"))


def _types(node: Node) -> list[Any]:
    return [var.aval for var in node.eqn.outvars]


def _wanted(graph: Graph, *, everything: bool) -> Callable[[Path], bool]:
    """Whose values are kept: those of draws always, for other numbers of devices to use."""
    kept = {
        path
        for path, node in graph.nodes.items()
        if (everything or node.is_draw) and all(hasattr(each, "shape") for each in _types(node))
    }
    return kept.__contains__


def _share(
    drawn: np.ndarray, shape: tuple[int, ...], devices: int, rounds: int
) -> np.ndarray | None:
    """`[1, *rounds, *whole]` -> `[devices, *rounds, *shape]`."""
    whole = drawn.shape[1 + rounds :]
    if drawn.ndim != 1 + rounds + len(shape):  # the data of a key
        return np.broadcast_to(drawn, (devices, *drawn.shape[1:]))
    if shape == whole:
        return np.broadcast_to(drawn, (devices, *drawn.shape[1:]))
    along = rows_along(shape, whole, devices)
    if along is None:
        return None
    return np.stack(np.split(drawn[0], devices, axis=rounds + along))


def _expected(exact: Any, *moved: Any) -> Expected:
    value = _host(exact)
    unit = evaluation.epsilon(exact.dtype)
    apart = [distance(_host(each), value) for each in moved]
    sizes = np.abs(np.nan_to_num(value, posinf=0.0, neginf=0.0)) if unit else np.zeros(())
    farthest, average = (
        _SAFETY * max(float(measure(each)) for each in apart) + _ULPS * unit * float(measure(sizes))
        for measure in (
            lambda each: each.max(initial=0.0),
            lambda each: each.mean() if each.size else 0.0,
        )
    )
    return Expected(value, farthest, average, unit)


def _host(array: Any) -> np.ndarray:
    """In NumPy, which does not know keys, nor the small floats."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    small = jnp.issubdtype(array.dtype, jnp.floating) and host.dtype.kind != "f"
    return host.astype(np.float32) if small or host.dtype == np.float16 else host


def _plain(dtype: Any) -> Any:
    return np.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype


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
