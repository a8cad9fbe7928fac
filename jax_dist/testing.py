"""Test helpers: simulated devices, comparisons with `jax.pmap` and between device counts."""

import contextlib
import faulthandler
import inspect
import itertools
import math
import os
import pathlib
import pickle
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_dist
from jax_dist import _files, _usage, launch, multihost
from jax_dist._pmap.placement import is_key, with_data
from jax_dist.errors import ArgumentError

__all__ = (
    "DeviceCountReport",
    "Outcome",
    "ResultComparison",
    "assert_same_as_pmap",
    "compare_device_counts",
    "run_processes",
    "simulated_devices",
)


def simulated_devices(count: int = 8) -> None:
    """Make this process see `count` simulated CPU devices, and no others.

    Call it at the top of conftest.py, before anything computes with JAX. If JAX is already running,
    it only checks the devices.

    Raises:
      RuntimeError: JAX is already running with other devices.

    >>> simulated_devices(8)
    >>> jax.device_count()
    8
    """
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        # Once JAX has started, it rejects a change of this number, but not of the platforms.
        jax.config.update("jax_num_cpu_devices", number + 1)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)  # overrides XLA_FLAGS
        return
    except RuntimeError:
        if (jax.default_backend(), jax.local_device_count()) == ("cpu", count):
            return
    raise RuntimeError(
        f"simulated_devices({count}) was called after JAX had started with "
        f"{jax.local_device_count()} {jax.default_backend()} devices. Call it at the top of "
        f"conftest.py, or set JAX_NUM_CPU_DEVICES={count} and JAX_PLATFORMS=cpu."
    )


def assert_same_as_pmap(
    fun: Callable,
    *args: Any,
    axis_name: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    pmap: Callable | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    **pmap_options: Any,
) -> Any:
    """Call a function mapped by `jax.pmap` and by `jax_dist.pmap`, and compare the results.

    It compares the structure, and for each array the shape, dtype, weak type, values, and which
    device holds which slice. If `jax.pmap` raises, the other must raise the same class or a
    subclass, or any ValueError for a ValueError.

    Args:
      fun: the function to map.
      *args: its arguments. Donated ones are copied, and stay usable.
      axis_name: the name of the mapped axis, as in `pmap`.
      kwargs: its keyword arguments.
      pmap: what to compare with `jax.pmap`; `jax_dist.pmap` by default.
      rtol: the relative tolerance of values. With both 0, values must be equal; NaN equals NaN.
      atol: the absolute tolerance.
      **pmap_options: further options for both, such as `in_axes` and `donate_argnums`.

    Returns:
      The result of the other pmap; None if both raised.

    Raises:
      AssertionError: they differ. The message lists all differences.

    >>> assert_same_as_pmap(lambda x: x / jax.lax.psum(x, "i"), np.ones(8), axis_name="i").tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """
    donated = pmap_options.get("donate_argnums", ())
    donated = {donated} if isinstance(donated, int) else set(donated)
    copy = lambda leaf: leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf

    def call_mapped(pmap: Callable) -> tuple[Any, Exception | None]:
        """Return the result of `fun` under a pmap, or None and the error that it raised."""
        copies = [jax.tree.map(copy, arg) if n in donated else arg for n, arg in enumerate(args)]
        try:
            mapped = pmap(fun, axis_name, **pmap_options)
            return jax.block_until_ready(mapped(*copies, **(kwargs or {}))), None
        except Exception as error:  # noqa: BLE001  # whatever it raises is compared
            return None, error

    expected, expected_error = call_mapped(jax.pmap)
    result, error = call_mapped(jax_dist.pmap if pmap is None else pmap)
    error_class = ValueError if isinstance(expected_error, ValueError) else type(expected_error)
    if error is None and expected_error is None:
        differences = list(_result_differences(result, expected, rtol, atol))
    elif expected_error is not None and isinstance(error, error_class):
        differences = []
    else:
        differences = [f"it {_format_end(error)}, jax.pmap {_format_end(expected_error)}"]
    if differences:
        name = getattr(fun, "__name__", fun)
        lines = "".join(f"\n  {line}" for line in differences)
        raise AssertionError(f"pmap of '{name}' differs from jax.pmap:{lines}") from error
    return result


def _format_end(error: Exception | None) -> str:
    """Return "returns", or such as "raises ValueError('...')" with the first line of the error."""
    first_line = str(error).partition("\n")[0]
    return "returns" if error is None else f"raises {type(error).__name__}({first_line!r})"


def _result_differences(result: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    """Yield how a result differs from that of `jax.pmap`: in its structure, or leaf by leaf."""
    structure, expected_structure = jax.tree.structure(result), jax.tree.structure(expected)
    if structure != expected_structure:
        yield f"result: structure {structure}, with jax.pmap {expected_structure}"
        return
    paths = jax.tree.leaves_with_path(result)
    for (path, leaf), expected_leaf in zip(paths, jax.tree.leaves(expected), strict=True):
        for difference in _leaf_differences(leaf, expected_leaf, rtol, atol):
            yield f"result{jax.tree_util.keystr(path)}: {difference}"


def _leaf_differences(leaf: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    """Yield how an array of JAX or NumPy differs from that of `jax.pmap`."""
    if isinstance(leaf, jax.Array) != isinstance(expected, jax.Array):
        yield f"class {type(leaf).__name__}, with jax.pmap {type(expected).__name__}"
        return
    if leaf.dtype != expected.dtype:
        yield f"dtype {leaf.dtype}, with jax.pmap {expected.dtype}"
    if leaf.shape != expected.shape:
        yield f"shape {leaf.shape}, with jax.pmap {expected.shape}"
    elif leaf.dtype == expected.dtype:
        values, expected_values = _to_numpy(leaf), _to_numpy(expected)
        are_nan = (values != values) & (expected_values != expected_values)
        is_same = (values == expected_values) | are_nan
        if rtol or atol:
            is_same |= np.isclose(_widen(values), _widen(expected_values), rtol=rtol, atol=atol)
        if not is_same.all():
            index = tuple(np.argwhere(~is_same)[0].tolist())
            count = f"{(~is_same).sum()} of {is_same.size} values differ, first at {list(index)}"
            yield f"{count}: {values[index]}, with jax.pmap {expected_values[index]}"
    if not isinstance(leaf, jax.Array):
        return
    weak, expected_weak = jax.typeof(leaf).weak_type, jax.typeof(expected).weak_type
    if weak != expected_weak:
        yield f"weak type {weak}, with jax.pmap {expected_weak}"
    slices, expected_slices = _slices_by_device(leaf), _slices_by_device(expected)
    if list(slices) != list(expected_slices):
        yield f"slices on devices {list(slices)}, with jax.pmap {list(expected_slices)}"
    elif leaf.shape == expected.shape:
        misplaced = [device for device in slices if slices[device] != expected_slices[device]]
        for device in misplaced[:1]:  # it displaces others
            yield f"device {device} holds {slices[device]}, with jax.pmap {expected_slices[device]}"


def _slices_by_device(array: jax.Array) -> dict[int, str]:
    """Return the slice on each device, in mesh order: `{0: "[0:1, 0:3]", 1: "[1:2, 0:3]"}`."""
    slices = {}
    for shard in array.addressable_shards:
        # Not strict: the index of an array of keys also has the dimensions of one key.
        sides = zip(shard.index, array.shape, strict=False)
        bounds = ["{}:{}".format(*side.indices(size)) for side, size in sides]
        slices[shard.device.id] = f"[{', '.join(bounds)}]"
    return slices


# Comparison between device counts.

_SEEDS = 6  # runs with perturbed inputs
_ULPS = 4.0  # by which an input is perturbed, at most
_SAFETY = 8.0  # the tolerance is this many times the largest effect of the perturbation ...
_ROUNDING = 16.0  # ... and this many units in the last place of the largest element


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
        from rich.table import Table  # slow to import

        table = Table("result", "devices", "compared with 1 device", "distance", "tolerance")
        table.box = None
        different = [result for result in self.results if not result.same]
        for result in different:
            numbers = (f"{result.distance:.2g}", f"{result.tolerance:.2g}")
            table.add_row(result.name, str(result.devices), result.difference, *numbers)
        total = _usage.counted(len({result.name for result in self.results}), "result")
        counts = ", ".join(map(str, (1, *self.devices)))
        if not different:
            return f"{self.name}: {total} the same on {counts} devices"
        number = len({result.name for result in different})
        parts = [f"{self.name}: {number} of {total} not the same on {counts} devices", table]
        if self.is_random:
            parts.append(f"{self.name} uses random numbers, which may depend on the device count.")
        return _usage.render(*parts)


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
    program = _Program.of(fun, args, axis_name, in_axes, mesh)
    run_on_one = program.on_devices(1)
    runs = [program.on_devices(count) for count in counts]  # all are checked before one runs
    values = [argument.value for argument in program.arguments]
    text = run_on_one(values, method="lower").as_text()
    expected = _run_perturbed(run_on_one, values, _coarsest_epsilon(text))
    results: list[ResultComparison] = []
    for count, run in zip(counts, runs, strict=True):
        results += _compare_results(program, count, run(values), expected)
    is_random = "threefry" in text or "rng_bit_generator" in text
    return DeviceCountReport(program.name, tuple(counts), tuple(results), is_random)


class _Argument(NamedTuple):
    """A leaf of the arguments, and how it is divided over devices."""

    path: str
    value: Any  # for all devices together
    # "shared": each device gets all. "split": each gets its part of the rows along `axis`.
    # "slices": each gets one row, which has no rows of its own to divide, as a random key.
    kind: Literal["shared", "split", "slices"] = "shared"
    axis: int = 0

    @classmethod
    def of_slices(cls, path: str, value: Any, axis: int) -> "_Argument":
        """Return an argument of a function that pmap maps, whose `axis` is over devices."""
        slices = jnp.moveaxis(value, axis, 0)
        host = _to_numpy(slices)
        if len(host) > 1 and (host == host[:1]).all():  # copies, as of parameters
            return cls(path, slices[0])
        is_raw_key = value.dtype == np.uint32 and slices.ndim == 2 and slices.shape[1] in (2, 4)
        if is_key(value) or is_raw_key or slices.ndim == 1:
            return cls(path, slices, "slices")
        return cls(path, slices.reshape(-1, *slices.shape[2:]), "split")

    def divide(self, value: Any, count: int) -> Any:
        """Return a value as `[count, *s]`, or `[*s]` if it is shared."""
        if self.kind == "split":
            return jnp.stack(jnp.split(value, count, self.axis))
        return value[:count] if self.kind == "slices" else value


@dataclass(frozen=True, slots=True)
class _Program:
    """A function of the leaves of its arguments, to be run on any number of devices."""

    fun: Callable  # of a list of leaves, and of a mesh or None
    name: str
    arguments: Sequence[_Argument]
    axis_name: Any
    mesh: Mesh | None  # of a function of whole arrays

    @classmethod
    def of(
        cls, fun: Callable, args: tuple, axis_name: Any, in_axes: Any, mesh: Mesh | None
    ) -> "_Program":
        """Return the program of a function of one of the forms of `compare_device_counts`."""
        from jax_dist._steps import MappedStep  # few tests need it

        leaves, tree = jax.tree.flatten(args)
        leaves: list[Any] = [_to_host(leaf) for leaf in leaves]
        paths = ["args" + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(args)]
        axes: Sequence[int | None] = [None] * len(leaves)
        takes_mesh = mesh is not None and "mesh" in inspect.signature(fun).parameters

        def run(leaves: Sequence[Any], mesh: Mesh | None) -> Any:
            options = {"mesh": mesh} if takes_mesh else {}
            return fun(*jax.tree.unflatten(tree, leaves), **options)

        is_mapped = mesh is None and axis_name is None  # by pmap
        if is_mapped:
            step = MappedStep.of(fun, args, {})
            run = lambda leaves, mesh: step.call.run(leaves)
            axes, axis_name = step.axes, step.options.mesh_axis
            is_array = [hasattr(leaf, "shape") for leaf in leaves]  # others are static
            leaves, paths = (list(itertools.compress(row, is_array)) for row in (leaves, paths))
        elif mesh is None:
            is_none = lambda leaf: leaf is None
            in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
            axes = jax.tree.broadcast(in_axes, args, is_leaf=is_none)
            axes = jax.tree.leaves(axes, is_leaf=is_none)
        arguments = []
        for path, leaf, axis in zip(paths, leaves, axes, strict=True):
            if axis is None or not hasattr(leaf, "shape"):
                arguments.append(_Argument(path, leaf))
            elif not -leaf.ndim <= axis < leaf.ndim:
                raise ArgumentError(f"{path} has shape {leaf.shape}, and no axis {axis}.")
            elif is_mapped:
                arguments.append(_Argument.of_slices(path, leaf, axis))
            else:
                arguments.append(_Argument(path, leaf, "split", axis))
        name = getattr(fun, "__name__", type(fun).__name__)
        if mesh is None and all(argument.kind == "shared" for argument in arguments):
            raise ArgumentError(f"{name}: in_axes={in_axes!r} divides no argument.")
        return cls(run, name, arguments, axis_name, mesh)

    def on_devices(self, count: int) -> Callable[..., Any]:
        """Return a function that runs the program on `count` devices.

        It takes the values of the arguments, and a method of jit's to use instead of `__call__`.
        It returns the results of devices, `[count, *s]`, or whole arrays, `[1, *s]`, but no keys.
        """
        for path, value, kind, axis in self.arguments:
            rows = 0 if kind == "shared" else value.shape[axis]
            is_divisible = rows >= count if kind == "slices" else rows % count == 0
            if not is_divisible:
                reason = f"{path} has {rows} {'rows' if kind == 'split' else 'keys or numbers'}"
                raise ArgumentError(f"{self.name} cannot run on {count} devices: {reason}.")
        mesh = None if self.mesh is None else _shrink(self.mesh, count)

        def run(leaves: Sequence[Any]) -> Any:
            drop_key = lambda leaf: None if is_key(leaf) else jnp.asarray(leaf)
            return jax.tree.map(drop_key, self.fun(leaves, mesh))

        if mesh is None:
            axes = [None if argument.kind == "shared" else 0 for argument in self.arguments]
            options = {"axis_name": self.axis_name, "axis_size": count}
            function = jax.jit(jax.vmap(run, in_axes=(axes,), **options))
        else:
            function = jax.jit(lambda leaves: jax.tree.map(lambda x: x[None], run(leaves)))

        def call(values: Sequence[Any], method: str = "__call__") -> Any:
            pairs = zip(self.arguments, values, strict=True)
            leaves = [argument.divide(value, count) for argument, value in pairs]
            try:
                with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
                    return getattr(function, method)(leaves)
            except Exception as error:
                note = f"compare_device_counts ran {self.name} on {count} devices."
                if mesh is not None:
                    note += " Its mesh must come from a parameter named mesh, or from jax.set_mesh."
                error.add_note(note)
                raise

        return call


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


class _Expected(NamedTuple):
    """A result on one device, and the difference by rounding that each element may have."""

    value: np.ndarray
    tolerance: np.ndarray  # of the same shape


def _run_perturbed(run: Callable, values: Sequence[Any], epsilon: float) -> Any:
    """Return the results on one device as `_Expected`, with tolerances from perturbed inputs.

    `epsilon` is the relative precision of the program: inputs change at random by some of it.
    """

    def perturb(value: Any, generator: np.random.Generator) -> Any:
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        relative_change = generator.uniform(-_ULPS, _ULPS, value.shape) * epsilon
        return (_widen(value) * (1 + relative_change)).astype(value.dtype)

    def expect(exact: jax.Array, *perturbed: jax.Array) -> _Expected:
        value = _to_numpy(exact)[0]
        effect = np.max([_distance(_to_numpy(leaf)[0], value) for leaf in perturbed], axis=0)
        if not jnp.issubdtype(exact.dtype, jnp.inexact):
            return _Expected(value, effect)
        sizes = np.abs(np.nan_to_num(_widen(value), posinf=0.0, neginf=0.0))
        unit = float(jnp.finfo(exact.dtype).eps)
        rounding = unit * (_ROUNDING * sizes + sizes.max(initial=0.0))
        return _Expected(value, _SAFETY * effect + rounding)

    results = [run(values)]
    for seed in range(_SEEDS):
        generator = np.random.default_rng(seed)
        results.append(run([perturb(value, generator) for value in values]))
    return jax.tree.map(expect, *results)


def _compare_results(
    program: _Program, count: int, result: Any, expected: Any
) -> Iterator[ResultComparison]:
    """Yield the comparison of each leaf of a result on `count` devices with that on one."""
    is_leaf = lambda leaf: isinstance(leaf, _Expected)
    tree, expected_tree = jax.tree.structure(result), jax.tree.structure(expected, is_leaf=is_leaf)
    if tree != expected_tree:
        text = f"is {tree} on {count} devices, and {expected_tree} on one."
        raise ArgumentError(f"The result of {program.name} {text}")
    states = {
        argument.path: _widen(argument.value)
        for argument in program.arguments
        if argument.kind == "shared" and hasattr(argument.value, "dtype")
        if jnp.issubdtype(argument.value.dtype, np.number)
    }
    expected_leaves = jax.tree.leaves(expected, is_leaf=is_leaf)
    for (path, leaf), one in zip(jax.tree.leaves_with_path(result), expected_leaves, strict=True):
        name = "result" + jax.tree_util.keystr(path)
        yield _compare_leaf(name, count, _to_numpy(leaf), one, states)


def _compare_leaf(
    name: str, count: int, values: np.ndarray, expected: _Expected, states: Mapping[str, np.ndarray]
) -> ResultComparison:
    """Compare the values of devices, `[devices, *s]`, with the value on one, or its parts."""
    one, tolerance = expected.value, float(expected.tolerance.max(initial=0.0))
    if values.shape[1:] != one.shape:
        joined = _join_parts(values, one.shape)
        if joined is None:
            text = f"shape {values.shape[1:]} on each device, not {one.shape}"
            return ResultComparison(
                name, count, same=False, difference=text, distance=math.inf, tolerance=tolerance
            )
        values = joined[None]
    distances = _distance(values, one[None])
    mean_size = np.abs(np.nan_to_num(_widen(one))).mean() if one.dtype.kind in "fc" else 0.0
    distance = float(distances.max(initial=0.0))
    same, text = True, ""
    if (distances > expected.tolerance).any():
        same, text = False, _describe_difference(values, count, expected, states)
    elif expected.tolerance.any() and expected.tolerance.mean() > mean_size / 2:
        same, text = None, "undecided: rounding alone changes it"
    return ResultComparison(name, count, same, text, distance, tolerance)


def _join_parts(parts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the array of a shape whose equal parts devices hold, `[devices, *s]`, or None."""
    for axis in range(parts.ndim - 1):
        joined = np.concatenate(list(parts), axis)
        if joined.shape == shape:
            return joined
    return None


def _describe_difference(
    values: np.ndarray, count: int, expected: _Expected, states: Mapping[str, np.ndarray]
) -> str:
    """Return how the values of devices, `[devices, *s]`, differ from the value on one device."""
    one, values = _widen(expected.value), _widen(values)

    def is_close(left: np.ndarray, right: np.ndarray, scale: float = 1.0) -> bool:
        return bool((_distance(left, right) <= expected.tolerance * max(scale, 1.0)).all())

    # The value may be `count` times too large or small, as is a sum in place of a mean. That of a
    # gradient shows in the change of the state that it updates.
    old_values = {"value": np.zeros_like(one)}
    old_values |= {f"change of {path}": state for path, state in states.items()}
    for subject, old in old_values.items():
        if old.shape != one.shape or is_close(one, old):
            continue
        change, changes = one - old, values - old
        factor = float(np.real(np.vdot(change, changes[0]) / np.vdot(change, change)))
        nearest = min((count, 1 / count), key=lambda number: abs(factor - number))
        if is_close(changes, (change * nearest)[None], nearest):
            return f"{count} times the {subject}" if nearest > 1 else f"1/{count} of the {subject}"
    if is_close(values, values[:1]):
        return "other values"
    # A collective is missing if the values of the devices, merged, are the value.
    merges = {"sum": np.sum, "mean": np.mean, "maximum": np.max, "minimum": np.min}
    if expected.value.dtype.kind in "fc":
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
    values, expected = _widen(values), _widen(expected)
    with np.errstate(invalid="ignore"):
        distance = np.abs(values - expected)
    equal = (values == expected) | (np.isnan(values) & np.isnan(expected))
    return np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))


def _widen(array: Any) -> np.ndarray:
    """Return an array as float64, or as complex128."""
    return np.asarray(array).astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _to_numpy(leaf: Any) -> np.ndarray:
    """Return a NumPy array: of random keys the data, of bfloat16 and float8 types float32."""
    host = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    is_extended = jnp.issubdtype(host.dtype, jnp.floating) and host.dtype.kind != "f"
    return host.astype(np.float32) if is_extended else host


def _to_host(leaf: Any) -> Any:
    """Return a leaf in NumPy, or random keys that are not committed to a device."""
    if is_key(leaf):
        return with_data(leaf, lambda data: jnp.asarray(np.asarray(data)))
    return np.asarray(leaf) if hasattr(leaf, "shape") else leaf


# --- several processes

_is_importing_main = False
_TAIL_LINES = 30
_SPARE_SECONDS = 2.0  # for a rank to print its stacks at the time limit, before it is ended
# Modules must be found before anything of this package can be imported.
_RANK = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)["sys_path"]
from jax_dist.testing import _run_rank
_run_rank(sys.argv[1])
"""


@dataclass(frozen=True)
class Outcome:
    """End of one process of `run_processes`."""

    rank: int  # its jax.process_index()
    value: Any  # what the function returned; None if it did not return
    error: Exception | None  # what it raised, or why it did not return
    exit_code: int  # negative: the signal that ended it
    output: str  # its standard output and error


def run_processes(
    fun: Callable, *args: Any, processes: int = 2, cpu_devices: int = 2, timeout: float = 120.0
) -> list[Outcome]:
    """Run a function in several processes at the same time, joined by `jax.distributed`.

    Each process is a fresh Python with simulated CPU devices. As in `multiprocessing` with "spawn",
    it imports the modules of `fun` and of the main program again, after it has joined the others.
    When one fails, the others, which may wait for it in a collective, are ended.

    Args:
      fun: function that each process calls, defined at the top of a module or script.
      *args: its arguments, the same in each process; they must pickle, and so must its result.
        Return plain data, such as lists of numbers.
      processes: number of processes.
      cpu_devices: number of devices of each.
      timeout: seconds after which processes that still run print their stacks and are ended.

    Returns:
      One outcome for each process, in the order of the ranks. Its error is what the function
      raised, with the traceback as a note; a RuntimeError if the process died, or was ended because
      another one failed first; or a TimeoutError.

    Raises:
      TypeError: `fun` or an argument does not pickle.

    >>> import jax
    >>> [outcome.value for outcome in run_processes(jax.process_index, processes=2)]
    [0, 1]

    Environment variables are inherited, except those that choose devices. What `jax.config.update`
    changed here is not; change it in `fun`.
    """
    if _is_importing_main:
        raise RuntimeError('Call run_processes below `if __name__ == "__main__":` in a script.')
    try:
        call = pickle.dumps((fun, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_processes cannot pickle {getattr(fun, '__qualname__', fun)!r} and its arguments "
            f"({error}). Define it at the top of a module, and pass what it needs as arguments."
        ) from error
    main = {}  # how a process imports the main program, if it defines `fun`
    if getattr(fun, "__module__", None) == "__main__":
        module = sys.modules["__main__"]
        main = {"init_main_from_path": os.path.abspath(str(module.__file__))}
        if module.__spec__ is not None:  # python -m package.module
            main = {"init_main_from_name": module.__spec__.name}
    lines: list[list[str]] = [[] for _ in range(processes)]
    with tempfile.TemporaryDirectory(prefix="jax_dist_") as name:
        task = pathlib.Path(name, "task")
        deadline = time.time() + timeout
        with task.open("wb") as file:
            pickle.dump({"sys_path": sys.path, **main}, file)
            pickle.dump({"call": call, "timeout": timeout, "deadline": deadline}, file)
        job = launch.run(
            [sys.executable, "-P", "-c", _RANK, str(task)],
            processes,
            lambda rank, _, line: lines[rank].append(line),
            cpu_devices=cpu_devices,
            timeout=timeout + _SPARE_SECONDS,
        )
        is_late = time.time() > deadline
        return [
            _read_outcome(rank, job, pathlib.Path(name), lines[rank], timeout if is_late else None)
            for rank in range(processes)
        ]


def _read_outcome(
    rank: int, job: launch.JobOutcome, folder: pathlib.Path, lines: list[str], late: float | None
) -> Outcome:
    """Return what a rank has reported, or why it has not; `late` is a time limit that is over."""
    report, value, error = folder / f"{rank}.report", None, None
    tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]) or "    (nothing)"
    if report.exists():
        value, error, trace = pickle.loads(report.read_bytes())
        if error is not None:
            error.add_note(f"Raised in rank {rank}:\n{trace.rstrip()}")
    elif late is not None:
        error = TimeoutError(f"rank {rank} was ended after {late:g} s; its output ends:\n{tail}")
    elif rank == job.first:
        how = launch.format_code(job.codes[rank])
        error = RuntimeError(f"rank {rank} died with {how}; its output ends:\n{tail}")
    else:
        error = RuntimeError(f"rank {rank} was ended because rank {job.first} failed first.")
    return Outcome(rank, value, error, job.codes[rank], "".join(f"{line}\n" for line in lines))


def _run_rank(path: str) -> None:
    """Join the others, call the function, and report: the program of one rank."""
    global _is_importing_main
    rank = int(os.environ["JAX_PROCESS_ID"])
    with open(path, "rb") as file:
        preparation, task = pickle.load(file), pickle.load(file)
    # Without the parent, too, it ends at its time limit.
    faulthandler.dump_traceback_later(max(0.1, task["deadline"] - time.time()), exit=True)
    value = error = None
    trace = ""
    try:
        seconds = task["timeout"]
        multihost.initialize(initialization_timeout=seconds, shutdown_timeout=seconds)
        # Only now: a module that computes while it is imported starts JAX without the others.
        _is_importing_main = True
        spawn.prepare(preparation)
        _is_importing_main = False
        fun, args = pickle.loads(task["call"])
        value = fun(*args)
        pickle.dumps(value)
    except BaseException as raised:  # noqa: BLE001  # sys.exit too: it would leave without a report
        launch.note("failed", rank)
        value, error, trace = None, raised, traceback.format_exc()
        sys.stderr.write(trace)
        try:
            if not isinstance(pickle.loads(pickle.dumps(error)), Exception):
                raise TypeError  # the caller could not catch a SystemExit
        except Exception:  # noqa: BLE001  # pickle raises what the error's class raises
            error = RuntimeError(f"rank {rank} raised {type(raised).__name__}: {raised}")
    report = pathlib.Path(path).with_name(f"{rank}.report")
    _files.write_atomically(report, pickle.dumps((value, error, trace)))
    sys.stdout.flush()
    sys.stderr.flush()
    if error is None:
        jax.distributed.shutdown()  # waits for the others
    os._exit(0 if error is None else 1)
