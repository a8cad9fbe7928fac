"""The programs of a function for one device and for several, and the values of both.

A program is traced, and not run by the devices themselves. Equations of the two are compared in
pairs: one in the program for one device, and the same one in that for several. How far rounding may
move a value comes from the run on one device.
"""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._exceptions import text_of
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis, AxisPrefix
from jax_dist._rewrite import interpreter
from jax_dist.consistency import evaluation
from jax_dist.consistency.evaluation import Draws, Graph, Path, Records, evaluate, manual_axes
from jax_dist.consistency.relations import Expected, distance, rows_along
from jax_dist.errors import ConsistencyError, refusal


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedProgram:
    """What a function does on so many devices."""

    devices: int
    jaxpr: Any  # closed, of all leaves of the arguments
    tree: Any  # the structure of its result
    mapped: bool  # whether results come with the devices first: `[devices, *shape]`


@dataclasses.dataclass(frozen=True, slots=True)
class PerDevice:
    """A function of what one device has, which names the mapped axis."""

    fun: Callable
    name: str
    axis_name: Hashable
    in_axes: AxisPrefix
    args: tuple[Any, ...]

    def skipped(self, devices: int) -> str | None:
        """Why there is no program for so many devices."""
        for path, shape, axis in self._mapped():
            if shape[axis] % devices:
                return f"{path} has {shape[axis]} rows, which do not divide evenly"
        return None

    def check(self) -> None:
        """Raises what `pmap` would: axes that do not fit, nothing that is mapped."""
        axes.check_axes("in_axes", self.in_axes)
        mapped = self._mapped()
        wrong = [
            f"{path} has shape {shape}, in_axes {axis}"
            for path, shape, axis in mapped
            if not -len(shape) <= axis < len(shape)
        ]
        if wrong:
            raise refusal(
                ConsistencyError,
                what=f"in_axes of '{self.name}' names a dimension that is not there",
                which=wrong,
                why="a mapped argument is split along it, into equal shares of the devices",
                do="Give None for an argument that all devices share, as in in_axes=(None, 0).",
            )
        if not mapped:
            raise refusal(
                ConsistencyError,
                what=f"nothing is mapped in '{self.name}'",
                which=[f"in_axes is {self.in_axes}"],
                why="every device would do the same with the same values",
                do="Give the dimension to split for at least one argument.",
            )

    def program(self, devices: int) -> CheckedProgram:
        trees: list[Any] = []

        def stacked(*blocks: Any) -> list[Any]:
            result = self.fun(*jax.tree.unflatten(structure, blocks))
            leaves, tree = jax.tree.flatten(result)
            trees.append(tree)
            return [jax.numpy.asarray(leaf)[None] for leaf in leaves]

        leaves, structure = jax.tree.flatten(self.args)
        specs = tuple(
            axes.spec_of_axis(axis, np.ndim(leaf), self.axis_name)
            for leaf, axis in zip(leaves, self._axes(), strict=True)
        )
        names: Any = (self.axis_name,)  # any hashable will do
        mesh = AbstractMesh((devices,), names, axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(
            stacked, mesh=mesh, in_specs=specs, out_specs=P(self.axis_name), check_vma=False
        )
        return CheckedProgram(devices, jax.make_jaxpr(mapped)(*leaves), trees[-1], mapped=True)

    def _axes(self) -> tuple[Axis, ...]:
        return axes.spread_in_axes(self.in_axes, self.args, {}, self.name)

    def _mapped(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Of each leaf that is split: its path, its shape, and the dimension."""
        paths = axes.argument_paths(self.fun, self.args, {}, range(len(self.args)))
        leaves = zip(paths, jax.tree.leaves(self.args), self._axes(), strict=True)
        return [(path, np.shape(leaf), axis) for path, leaf, axis in leaves if axis is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A function of global arrays, under jit or with a shard_map in it."""

    fun: Callable
    name: str
    mesh: Mesh  # whose axes it names; made smaller for fewer devices
    args: tuple[Any, ...]

    def skipped(self, devices: int) -> str | None:
        if devices > jax.device_count():
            return f"there are {jax.device_count()} devices"
        if math.prod(self._shape(devices)) != devices:
            return f"a mesh {dict(self.mesh.shape)} cannot be made smaller to {devices}"
        return None

    def program(self, devices: int) -> CheckedProgram:
        shape = self._shape(devices)
        chosen = np.array(self.mesh.devices.flat[:devices]).reshape(shape)
        mesh = Mesh(chosen, self.mesh.axis_names, axis_types=self.mesh.axis_types)
        args = jax.tree.map(lambda leaf: _moved(leaf, mesh), self.args)
        leaves, structure = jax.tree.flatten(args)
        trees: list[Any] = []
        try:
            takes_mesh = "mesh" in inspect.signature(self.fun).parameters
        except (TypeError, ValueError):  # builtins have no signature
            takes_mesh = False
        options = {"mesh": mesh} if takes_mesh else {}

        def flat(*leaves: Any) -> list[Any]:
            result = self.fun(*jax.tree.unflatten(structure, leaves), **options)
            results, tree = jax.tree.flatten(result)
            trees.append(tree)
            return results

        try:
            with jax.set_mesh(mesh):
                jaxpr = jax.make_jaxpr(flat)(*leaves)
        except ValueError as error:
            said = text_of(error)
            if "context mesh" not in said:
                raise
            raise self._own_mesh(said.partition("\n")[0], devices) from error
        # A function that brings a mesh of its own runs on that one, whatever is asked.
        for eqn in interpreter.equations(jaxpr):
            if _compat.name_of(eqn) == "shard_map":
                sizes = dict(eqn.params["mesh"].shape)
                if math.prod(sizes.values()) != devices and manual_axes(eqn):
                    line = interpreter.source_line(eqn) or "a shard_map"
                    raise self._own_mesh(f"{line}: its mesh is {sizes}", devices)
        return CheckedProgram(devices, jaxpr, trees[-1], mapped=False)

    def _shape(self, devices: int) -> tuple[int, ...]:
        """As much of each axis as fits, the first ones first."""
        shape, left = [], devices
        for size in self.mesh.devices.shape:
            shape.append(math.gcd(size, left))
            left //= shape[-1]
        return tuple(shape)

    def _own_mesh(self, which: str, devices: int) -> ConsistencyError:
        return refusal(
            ConsistencyError,
            what=f"'{self.name}' has a mesh of its own, which cannot be made smaller",
            which=[which, f"it is to be checked on {devices}"],
            why="the number of devices is that of the mesh, and it is fixed in the function",
            do="Give a function with a parameter named mesh, as in "
            "compare_device_counts(lambda x, mesh: jax.shard_map(f, mesh=mesh, ...)(x), x, "
            "mesh=mesh), or leave out mesh= in jax.shard_map, which then takes the mesh that is "
            "set.",
        )


def _moved(leaf: Any, mesh: Mesh) -> Any:
    """The same cut, over the devices of another mesh."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))
    if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        return jax.device_put(leaf, NamedSharding(mesh, P()))
    return leaf


_SEEDS = (1, 2, 3)  # runs with every result moved by rounding
_SAFETY = 8.0  # how much farther than in these runs a value may lie
_ULPS = 4.0  # and besides, of its largest element
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What one device computes, with the tolerance of each value."""

    program: CheckedProgram
    graph: Graph
    results: list[Expected]
    records: dict[Path, list[Expected]]


def on_one(program: CheckedProgram, args: Sequence[Any], *, everything: bool = False) -> Reference:
    """Runs a program of one device, and again with all rounding moved.

    `everything`: whether to keep the values of all equations, not only what is drawn.
    """
    graph = Graph.of(program.jaxpr)
    wanted = _wanted(graph, everything=everything)

    def trial(leaves: Sequence[Any], noise: evaluation.Noise) -> Any:
        moved = [noise.moved(leaf, leaf) for leaf in leaves]
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
        reference: Reference,
        *,
        everything: bool = False,
    ) -> None:
        """Prepares it; see `on_one`."""
        self.graph: Graph = Graph.of(program.jaxpr)
        self.pairs: dict[Path, Path] = _pairs_of(self.graph, reference.graph)
        self._program, self._leaves = program, [jnp.asarray(leaf) for leaf in args]
        self.draws: dict[Path, list[Any]] = self._draws_of(reference)
        wanted = _wanted(self.graph, everything=everything)

        def run(leaves: Sequence[Any], draws: Draws, given: Any) -> Any:
            return evaluate(program.jaxpr, leaves, wanted=wanted, draws=draws, given=given)

        self._run = _jit(run)

    def values(self, *, given: bool = True) -> tuple[list[np.ndarray], Records]:
        """What the devices compute: the results, `[devices, *shape]`, and those of equations.

        `given`: whether devices with a key of their own get what one device draws.
        """
        results, records = self._run(self._leaves, self.draws, jnp.bool_(given))
        if not self._program.mapped:
            results = [each[None] for each in results]
        return jax.tree.map(_host, results), jax.tree.map(_host, records)

    def _draws_of(self, reference: Reference) -> dict[Path, list[Any]]:
        """What each device draws if its key is its own: its rows of what one device draws."""
        draws: dict[Path, list[Any]] = {}
        for path, node in self.graph.nodes.items():
            if not (node.is_draw and node.around.on_devices and path in self.pairs):
                continue
            drawn = zip(reference.records[self.pairs[path]], node.types, strict=True)
            shares = [
                _share(each.value, tuple(kind.shape), self._program.devices, node.rounds)
                for each, kind in drawn
            ]
            if all(share is not None for share in shares):
                draws[path] = [
                    share.astype(np.uint32 if is_key(kind) else kind.dtype)
                    for share, kind in zip(shares, node.types, strict=True)
                    if share is not None
                ]
        return draws


def _jit(run: Callable) -> Callable:
    """To run a few times only, it need not be fast."""
    return jax.jit(run, compiler_options=_QUICK if jax.default_backend() == "cpu" else None)


def _wanted(graph: Graph, *, everything: bool) -> Callable[[Path], bool]:
    """Whose values are kept: those of draws always, for other numbers of devices to use."""
    kept = {
        path
        for path, node in graph.nodes.items()
        if (everything or node.is_draw) and all(hasattr(each, "shape") for each in node.types)
    }
    return kept.__contains__


def _share(
    drawn: np.ndarray, shape: tuple[int, ...], devices: int, rounds: int
) -> np.ndarray | None:
    """`[1, *rounds, *whole]` -> `[devices, *rounds, *shape]`."""
    whole = drawn.shape[1 + rounds :]
    # The data of a key has more dimensions.
    if len(whole) != len(shape) or shape == whole:
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

    def tolerance(measure: Callable[[np.ndarray], Any]) -> float:
        farthest = max(float(measure(each)) for each in apart)
        return _SAFETY * farthest + _ULPS * unit * float(measure(sizes))

    average = tolerance(lambda each: each.mean() if each.size else 0.0)
    return Expected(value, tolerance(lambda each: each.max(initial=0.0)), average, unit)


def _host(array: Any) -> np.ndarray:
    """In NumPy, which does not know keys, nor the small floats."""
    if is_key(array):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    small = jnp.issubdtype(array.dtype, jnp.floating) and host.dtype.kind != "f"
    return host.astype(np.float32) if small or host.dtype == np.float16 else host


def is_key(array: Any) -> bool:
    """Whether an array, or its type, is one of random keys."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _pairs_of(several: Graph, one: Graph) -> dict[Path, Path]:
    """By equation of the first, that of the second; what only one of them has is left out.

    Both come from the same code, so they are nearly always the same list. Where a loop of Python
    goes over the rows of a device they are not, and the longest common part counts.
    """
    left, right = list(several.nodes.values()), list(one.nodes.values())
    marks, others = ([(each.name, each.line, each.rounds) for each in ns] for ns in (left, right))
    if marks == others:
        return {node.path: other.path for node, other in zip(left, right, strict=True)}
    ranks = lambda node: [len(getattr(kind, "shape", ())) for kind in node.types]
    matcher = difflib.SequenceMatcher(None, marks, others, autojunk=False)
    return {
        node.path: other.path
        for start, at, size in matcher.get_matching_blocks()
        for node, other in zip(left[start : start + size], right[at : at + size], strict=True)
        if ranks(node) == ranks(other)
    }
