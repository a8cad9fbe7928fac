"""Comparison of a function's results on several device counts with those on one device."""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_dist import _usage
from jax_dist._passes.constants import is_key
from jax_dist._pmap.axes import spread_in_axes
from jax_dist._steps import MappedStep
from jax_dist.errors import ArgumentError

_PERTURBED_RUNS = 6
_MAX_ULPS = 4.0  # by which an input is perturbed, at most (units in the last place)
_SAFETY = 8.0  # the tolerance of a float is this many times the largest effect of a perturbation
_ROUNDING = 16.0  # and this many units in its last place, and one in that of the largest element


class ResultComparison(NamedTuple):
    """One result on several devices, compared with the same result on one device."""

    name: str  # "result['loss']"
    devices: int
    same: bool | None  # None: undecided, since a factor of 2 would be within the tolerance
    difference: str  # "4 times the value"; "" if it is the same
    distance: float  # the largest difference of an element
    tolerance: float


@dataclass(frozen=True, slots=True)
class DeviceCountReport:
    """The results of a function on several device counts, compared with those on one device."""

    name: str
    devices: tuple[int, ...]  # the counts that were compared with one device
    results: tuple[ResultComparison, ...]
    is_random: bool  # whether the function uses random numbers

    @property
    def ok(self) -> bool:
        """Return whether all results are the same on all device counts, within rounding."""
        return all(result.same for result in self.results)

    def __str__(self) -> str:
        rows = [
            (name, str(devices), difference, f"{distance:.2g}", f"{tolerance:.2g}")
            for name, devices, same, difference, distance, tolerance in self.results
            if not same
        ]
        total = _usage.counted(len({result.name for result in self.results}), "result")
        counts = ", ".join(map(str, (1, *self.devices)))
        if not rows:
            return f"{self.name}: {total} the same on {counts} devices"
        number = len({name for name, *_ in rows})
        headline = f"{self.name}: {number} of {total} not the same on {counts} devices"
        note = f"{self.name} uses random numbers, which may depend on the device count."
        columns = ("result", "devices", "compared with 1 device", "distance", "tolerance")
        table = _usage.make_table(columns, rows, numbers=2)
        return _usage.render(headline, table, *[note] * self.is_random)


def compare_device_counts(
    fun: Callable,
    *args: Any,
    axis_name: Hashable | None = None,
    in_axes: Any = 0,
    devices: Sequence[int] = (1, 2, 4, 8),
    mesh: Mesh | None = None,
) -> DeviceCountReport:
    """Compare the results of a function on several device counts with those on one device.

    `fun` has one of three forms; the same numbers go to every device count:

    *   With `axis_name`, it is what one device computes, and each mapped argument is an array of
        all rows, of which a device gets its share.
    *   Without, it is mapped by `jax.pmap` or `jax_dist.pmap`, and the arguments are those of a
        call, `[N, *s]`. Equal slices are copies, and stay copies; random keys stay as they are;
        other slices are joined along their first dimension, and divided again.
    *   With `mesh`, it takes whole arrays, and maps them itself. The mesh is made smaller, set by
        `jax.set_mesh`, and passed to `fun` if it has a parameter `mesh`.

    The first two run under `jax.vmap`, on one device. Of a result, each device must have the value
    of one device, or its share of one dimension. The tolerance is measured on one device, with
    inputs perturbed by some units in the last place of the coarsest type in the program. Random
    keys in the result are not compared.

    Args:
      fun: the function.
      *args: its arguments; a few rows for each device are enough.
      axis_name: the name of the mapped axis, if `fun` is what one device computes.
      in_axes: the mapped dimension of each argument, None if all devices share it.
      devices: the counts to compare with one device.
      mesh: the mesh of a function of whole arrays.

    Returns:
      The report: `ok`, `results`, text when printed.

    Raises:
      ArgumentError: the arguments cannot be divided.
      NotImplementedError: `fun` maps nothing.

    >>> def mean(x):
    ...     return jax.lax.psum(jnp.mean(x), "i")
    >>> report = compare_device_counts(mean, jnp.arange(8.0), axis_name="i", devices=(2, 4))
    >>> [(result.devices, result.difference) for result in report.results]
    [(2, '2 times the value'), (4, '4 times the value')]
    """
    counts = sorted(set(devices) - {1})
    if not counts or any(not isinstance(count, int) or count < 1 for count in counts):
        raise ArgumentError(f"devices={devices!r} must be device counts, with one above 1.")
    program = _Program.build(fun, args, axis_name, in_axes, mesh)
    run_on_one = program.make_runner(1)
    runs = {count: program.make_runner(count) for count in counts}  # checks them all
    values = [argument.value for argument in program.arguments]
    text = run_on_one(values, method="lower").as_text()
    expected = _run_perturbed(run_on_one, values, _coarsest_epsilon(text))
    results: list[ResultComparison] = []
    for count, run in runs.items():
        results += _compare_results(program, count, run(values), expected)
    is_random = "threefry" in text or "rng_bit_generator" in text
    return DeviceCountReport(program.name, tuple(counts), tuple(results), is_random)


class _Argument(NamedTuple):
    """A leaf of the arguments, and how it is divided over devices."""

    path: str  # "args[0]['w']"
    value: Any  # for all devices together
    axis: int | None  # of the rows that are divided over devices; None: each device gets all
    is_one_row: bool = False  # True: a device gets one row, without rows of its own, as a key

    def divide(self, value: Any, count: int) -> Any:
        """Return a value as `[count, *s]`, or `[*s]` if each device gets all."""
        if self.axis is None:
            return value
        return value[:count] if self.is_one_row else jnp.stack(jnp.split(value, count, self.axis))


def _join_slices(path: str, value: Any, axis: int | None) -> _Argument:
    """Return an argument of a function that pmap maps, in which `axis` numbers the devices.

    `[8, 2, 3]` becomes 16 rows `[16, 3]`; eight equal slices become the one value `[2, 3]`.
    """
    if axis is None:
        return _Argument(path, value, axis=None)
    slices = jnp.moveaxis(value, axis, 0)
    host = to_numpy(slices)
    if len(host) > 1 and (host == host[:1]).all():  # copies, as of parameters
        return _Argument(path, jax.device_get(slices[0]), axis=None)
    is_raw_key = value.dtype == np.uint32 and slices.ndim == 2 and slices.shape[1] in (2, 4)
    if is_key(value) or is_raw_key or slices.ndim == 1:  # a key or a number is one row
        return _Argument(path, slices, axis=0, is_one_row=True)
    return _Argument(path, slices.reshape(-1, *slices.shape[2:]), axis=0)


class _Program(NamedTuple):
    """A function of the leaves of its arguments, to be run on any number of devices."""

    fun: Callable[[Sequence[Any], Mesh | None], Any]
    name: str
    arguments: list[_Argument]
    axis_name: Any
    mesh: Mesh | None  # of a function of whole arrays

    @classmethod
    def build(
        cls, fun: Callable, args: tuple, axis_name: Any, in_axes: Any, mesh: Mesh | None
    ) -> "_Program":
        """Return the program of a function in one of the three forms of `compare_device_counts`."""
        name = getattr(fun, "__name__", type(fun).__name__)
        leaves, tree = jax.tree.flatten_with_path(args)
        takes_mesh = mesh is not None and "mesh" in inspect.signature(fun).parameters

        def call_fun(values: Sequence[Any], mesh: Mesh | None) -> Any:
            options = {"mesh": mesh} if takes_mesh else {}
            return fun(*jax.tree.unflatten(tree, values), **options)

        run, make_argument = call_fun, _Argument
        if mesh is not None:  # `fun` takes whole arrays, and divides them itself
            axes: Sequence[int | None] = [None] * len(leaves)
        elif axis_name is not None:  # `fun` is what one device computes
            axes = spread_in_axes(in_axes, args, {}, name)
        else:  # `fun` is mapped by pmap, and takes `[N, *s]`
            step = MappedStep.find(fun, args, {})
            run = lambda values, _: step.call.run(values)
            axes, axis_name, static = step.axes, step.options.mesh_axis, step.options.static
            make_argument = _join_slices
            leaves = [(path, leaf) for path, leaf in leaves if path[0].idx not in static]
            if len(leaves) > len(axes):  # jax.pmap does not say which arguments are static
                leaves = [(path, leaf) for path, leaf in leaves if hasattr(leaf, "shape")]
        arguments = [
            make_argument(
                f"args{jax.tree_util.keystr(path)}",
                jax.device_get(leaf),  # on no device, so that any mesh can take it
                axis if hasattr(leaf, "shape") else None,  # each device gets a Python number
            )
            for (path, leaf), axis in zip(leaves, axes, strict=True)
        ]
        if mesh is None and all(argument.axis is None for argument in arguments):
            raise ArgumentError(f"{name}: in_axes={in_axes!r} divides no argument.")
        return cls(run, name, arguments, axis_name, mesh)

    def make_runner(self, count: int) -> Callable[..., Any]:
        """Return a function that runs the program on `count` devices, without keys in its results.

        `run(values)` takes the values of the arguments and returns `[count, *s]` of the devices, or
        `[1, *s]` of whole arrays; `run(values, "lower")` calls that method of the jit object.
        """
        for path, value, axis, is_one_row in self.arguments:
            if axis is None:
                continue
            rows = value.shape[axis] if -value.ndim <= axis < value.ndim else 0
            if rows < count or (rows % count and not is_one_row):
                raise ArgumentError(
                    f"{self.name} cannot run on {count} devices: {path} has shape {value.shape}, "
                    f"and {rows} rows along axis {axis}."
                )
        mesh = None if self.mesh is None else _shrink(self.mesh, count)

        def call(leaves: Sequence[Any]) -> Any:
            drop_key = lambda leaf: None if is_key(leaf) else jnp.asarray(leaf)
            return jax.tree.map(drop_key, self.fun(leaves, mesh))

        vmap_axes = [None if argument.axis is None else 0 for argument in self.arguments]
        size = count if mesh is None else 1
        jitted = jax.jit(jax.vmap(call, (vmap_axes,), axis_name=self.axis_name, axis_size=size))

        def run(values: Sequence[Any], method: str = "__call__") -> Any:
            pairs = zip(self.arguments, values, strict=True)
            leaves = [argument.divide(value, count) for argument, value in pairs]
            try:
                with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
                    return getattr(jitted, method)(leaves)
            except Exception as error:
                error.add_note(
                    f"compare_device_counts ran {self.name} on {count} devices. A mesh in it must "
                    "come from a parameter named mesh, or from jax.set_mesh."
                )
                raise

        return run


def _shrink(mesh: Mesh, count: int) -> Mesh:
    """Return a mesh of `count` devices with the same axes; `(4, 2)` becomes `(2, 1)` for 2."""
    shape, remaining = [], count
    for size in mesh.devices.shape:
        shape.append(math.gcd(size, remaining))
        remaining //= shape[-1]
    if remaining > 1:
        raise ArgumentError(f"The mesh {dict(mesh.shape)} cannot be made smaller to {count}.")
    devices = mesh.devices.flat[:count].reshape(shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A result on one device, and the difference by rounding that each element may have."""

    value: np.ndarray
    tolerance: np.ndarray  # of the same shape


def _run_perturbed(run: Callable, values: Sequence[Any], epsilon: float) -> Any:
    """Return the results on one device as `_Expected`, with tolerances from perturbed inputs.

    `epsilon` is the relative precision of the program: inputs change at random by some of it. The
    tolerance is the largest effect of that; for floats a multiple of it, and some rounding.
    """

    def perturb(value: Any, generator: np.random.Generator) -> Any:
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        relative_change = generator.uniform(-_MAX_ULPS, _MAX_ULPS, value.shape) * epsilon
        return (widen(value) * (1 + relative_change)).astype(value.dtype)

    def add_tolerance(exact: jax.Array, *perturbed: jax.Array) -> _Expected:
        value = np.asarray(exact)[0]  # results are `[1, *s]`, for one device
        effect = np.max([_distance(np.asarray(leaf)[0], value) for leaf in perturbed], axis=0)
        if not jnp.issubdtype(exact.dtype, jnp.inexact):
            return _Expected(value, effect)
        sizes = np.abs(np.nan_to_num(widen(value), posinf=0.0, neginf=0.0))
        rounding = _ROUNDING * sizes + sizes.max(initial=0.0)  # in units of the last place
        return _Expected(value, _SAFETY * effect + float(jnp.finfo(exact.dtype).eps) * rounding)

    results = [run(values)]
    for seed in range(_PERTURBED_RUNS):
        generator = np.random.default_rng(seed)
        results.append(run([perturb(value, generator) for value in values]))
    return jax.tree.map(add_tolerance, *results)


def _compare_results(
    program: _Program, count: int, result: Any, expected: Any
) -> Iterator[ResultComparison]:
    """Yield the comparison of each leaf of a result on `count` devices with that on one."""
    leaves, tree = jax.tree.flatten_with_path(result)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    if tree != expected_tree:
        text = f"is {tree} on {count} devices, and {expected_tree} on one."
        raise ArgumentError(f"The result of {program.name} {text}")
    for (path, leaf), one in zip(leaves, expected_leaves, strict=True):
        end = _compare_values(np.asarray(leaf), count, one, program.arguments)
        tolerance = float(one.tolerance.max(initial=0))
        yield ResultComparison(f"result{jax.tree_util.keystr(path)}", count, *end, tolerance)


def _compare_values(
    values: np.ndarray, count: int, expected: _Expected, arguments: Sequence[_Argument]
) -> tuple[bool | None, str, float]:
    """Return `same`, `difference` and `distance` of a `ResultComparison`.

    `values` are those of the devices, `[devices, *s]`: each the value on one device, or a part.
    """
    one = expected.value
    if values.shape[1:] != one.shape:  # each device may have an equal part along one dimension
        joined = [np.concatenate(values, axis) for axis in range(values.ndim - 1)]
        whole = next((array for array in joined if array.shape == one.shape), None)
        values = values if whole is None else whole[None]
    if values.shape[1:] != one.shape:
        return False, f"shape {values.shape[1:]} on each device, not {one.shape}", math.inf
    distances = _distance(values, one[None])
    distance = float(distances.max(initial=0.0))
    if (distances > expected.tolerance).any():
        return False, _describe_difference(values, count, expected, arguments), distance
    is_inexact = jnp.issubdtype(one.dtype, jnp.inexact)
    mean_size = np.abs(np.nan_to_num(widen(one))).mean() if is_inexact else 0.0
    # With such a tolerance, also a result that is wrong by a factor of 2 would have passed.
    if expected.tolerance.any() and expected.tolerance.mean() > mean_size / 2:
        return None, "undecided: rounding alone changes it", distance
    return True, "", distance


def _describe_difference(
    values: np.ndarray, count: int, expected: _Expected, arguments: Sequence[_Argument]
) -> str:
    """Return how the values of devices, `[devices, *s]`, differ from the value on one device."""
    one, values = widen(expected.value), widen(values)

    def is_close(left: np.ndarray, right: np.ndarray, factor: float = 1.0) -> bool:
        tolerance = expected.tolerance * max(factor, 1.0)  # rounding errors grow with the values
        return bool((_distance(left, right) <= tolerance).all())

    # A sum in place of a mean is `count` times too large. If it is a sum of gradients, the new
    # parameters are not: but their change is, from the old ones, which are an argument.
    old_values = {"value": np.zeros_like(one)}
    for path, value, axis, _ in arguments:
        if axis is None and isinstance(value, np.ndarray) and value.shape == one.shape:
            old_values[f"change of {path}"] = widen(value)
    for subject, old in old_values.items():
        if is_close(one, old):
            continue
        if is_close(values - old, (one - old)[None] * count, count):
            return f"{count} times the {subject}"
        if is_close(values - old, (one - old)[None] / count):
            return f"1/{count} of the {subject}"
    if is_close(values, values[:1]):
        return "other values"
    # A collective is missing if the values of the devices, merged, are the value.
    merges = {"sum": np.sum, "mean": np.mean, "maximum": np.max, "minimum": np.min}
    if jnp.issubdtype(expected.value.dtype, jnp.inexact):
        for name, merge in merges.items():
            if is_close(merge(values, axis=0), one, count if name == "sum" else 1):
                return f"the devices differ; their {name} is the value"
    return "the devices differ"


def _coarsest_epsilon(text: str) -> float:
    """Return the distance of 1 to the next number, in the coarsest type of a program's text."""
    for name, dtype in {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}.items():
        if re.search(rf"[x<]{name}\b", text):
            return float(jnp.finfo(dtype).eps)
    return float(np.finfo(np.float64).eps)


def _distance(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return by how much elements differ; infinity if only one of them is a number."""
    values, expected = widen(values), widen(expected)
    with np.errstate(invalid="ignore"):
        distance = np.abs(values - expected)
    equal = (values == expected) | (np.isnan(values) & np.isnan(expected))
    return np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))


def widen(array: Any) -> np.ndarray:
    """Return an array as float64, or as complex128."""
    return np.asarray(array).astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def to_numpy(leaf: Any) -> np.ndarray:
    """Return the NumPy array of an array, or of the data of random keys."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
