"""Test helpers: simulated devices, comparisons with `jax.pmap` and between device counts."""

import faulthandler
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

import jax
import numpy as np

import jax_dist
from jax_dist import _compat, _files, launch, multihost
from jax_dist._device_counts import (
    DeviceCountReport,
    ResultComparison,
    compare_device_counts,
    to_numpy,
    widen,
)

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
    if not _compat.backend_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)  # overrides XLA_FLAGS
    elif (jax.default_backend(), jax.local_device_count()) != ("cpu", count):
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
    donated = np.atleast_1d(pmap_options.get("donate_argnums", ()))
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
    differences = []
    if error is None and expected_error is None:
        differences += _result_differences(result, expected, rtol, atol)
    elif not isinstance(error, error_class):
        differences = [f"it {_format_end(error)}, jax.pmap {_format_end(expected_error)}"]
    if differences:
        headline = f"pmap of '{getattr(fun, '__name__', fun)}' differs from jax.pmap:"
        raise AssertionError("\n  ".join([headline, *differences])) from error
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
    properties: dict[str, Callable] = {"class": lambda x: type(x).__name__}
    properties |= {"dtype": lambda x: x.dtype, "shape": lambda x: x.shape}
    if isinstance(leaf, jax.Array) and isinstance(expected, jax.Array):
        properties["weak type"] = lambda x: jax.typeof(x).weak_type
        if leaf.shape == expected.shape:
            properties["slices by device"] = _placement
    for name, read in properties.items():
        if read(leaf) != read(expected):
            yield f"{name} {read(leaf)}, with jax.pmap {read(expected)}"
    if leaf.dtype != expected.dtype or leaf.shape != expected.shape:
        return
    values, expected_values = to_numpy(leaf), to_numpy(expected)
    both_nan = (values != values) & (expected_values != expected_values)
    is_same = (values == expected_values) | both_nan
    if rtol or atol:
        is_same |= np.isclose(widen(values), widen(expected_values), rtol=rtol, atol=atol)
    if not is_same.all():
        index = tuple(np.argwhere(~is_same)[0].tolist())
        count = f"{(~is_same).sum()} of {is_same.size} values differ, first at {list(index)}"
        yield f"{count}: {values[index]}, with jax.pmap {expected_values[index]}"


def _placement(array: jax.Array) -> str:
    """Return the slice on each device, in mesh order: `0 [0:1, 0:3], 1 [1:2, 0:3]`."""
    slices = []
    for shard in array.addressable_shards:
        # Not strict: the index of an array of keys also has the dimensions of one key.
        sides = zip(shard.index, array.shape, strict=False)
        bounds = ["{}:{}".format(*side.indices(size)) for side, size in sides]
        slices.append(f"{shard.device.id} [{', '.join(bounds)}]")
    return ", ".join(slices)


_is_importing_main = False
_TAIL_LINES = 30
_SPARE_SECONDS = 2.0  # for a rank to print its stacks at the time limit, before it is ended


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
    When one fails, the others, which may wait for it in a collective, are ended. Environment
    variables are inherited, except those that choose devices; what `jax.config.update` changed here
    is not.

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
    preparation: dict[str, Any] = {}
    if getattr(fun, "__module__", None) == "__main__":  # else it need not be imported
        preparation = spawn.get_preparation_data("rank")
        del preparation["authkey"]  # does not pickle
    lines: list[list[str]] = [[] for _ in range(processes)]
    with tempfile.TemporaryDirectory(prefix="jax_dist_") as name:
        task, deadline = pathlib.Path(name, "task"), time.time() + timeout
        task.write_bytes(pickle.dumps((preparation, call, timeout, deadline)))
        program = f"import sys; sys.path[:] = {sys.path}; from jax_dist.testing import _run_rank"
        job = launch.run(
            [sys.executable, "-P", "-c", f"{program}; _run_rank({str(task)!r})"],
            processes,
            lambda rank, _, line: lines[rank].append(line),
            cpu_devices=cpu_devices,
            timeout=timeout + _SPARE_SECONDS,
        )
        late = timeout if time.time() > deadline else None
        return [_read_outcome(rank, job, task, lines[rank], late) for rank in range(processes)]


def _read_outcome(
    rank: int, job: launch.JobOutcome, task: pathlib.Path, lines: list[str], late: float | None
) -> Outcome:
    """Return what a rank has reported, or why it has not; `late` is a time limit that is over."""
    report, value, error = task.with_name(f"{rank}.report"), None, None
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
    report = pathlib.Path(path).with_name(f"{rank}.report")
    preparation, call, timeout, deadline = pickle.loads(pathlib.Path(path).read_bytes())
    # Without the parent, too, it ends at its time limit.
    faulthandler.dump_traceback_later(max(0.1, deadline - time.time()), exit=True)
    failure: BaseException | None = None
    try:
        multihost.initialize(initialization_timeout=timeout, shutdown_timeout=timeout)
        # Only now: a module that computes while it is imported starts JAX without the others.
        _is_importing_main = True
        spawn.prepare(preparation)
        _is_importing_main = False
        fun, args = pickle.loads(call)
        outcome = pickle.dumps((fun(*args), None, ""))
    except BaseException as error:  # noqa: BLE001  # sys.exit too: it would leave without a report
        failure, trace = error, traceback.format_exc()
        try:
            if not isinstance(pickle.loads(pickle.dumps(error)), Exception):
                raise TypeError  # the caller could not catch a SystemExit
        except Exception:  # noqa: BLE001  # pickle raises what the error's class raises
            failure = RuntimeError(f"rank {rank} raised {type(error).__name__}: {error}")
        outcome = pickle.dumps((None, failure, trace))
    _files.write_atomically(report, outcome)
    if failure is not None:
        raise failure  # `initialize` ends the process after an uncaught exception
