"""For tests: simulated devices, comparisons with `jax.pmap`, processes."""

import faulthandler
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_dist
from jax_dist import launch
from jax_dist._exceptions import text_of
from jax_dist.errors import refusal

__all__ = (
    "Outcome",
    "assert_same_as_pmap",
    "run_processes",
    "simulated_devices",
)


def simulated_devices(count: int = 8) -> None:
    """Makes this process see simulated CPU devices, and no others.

    Call it at the top of conftest.py, before anything computes with JAX. If JAX is already running,
    it only checks the devices.

    Args:
      count: how many devices to simulate.

    Raises:
      RuntimeError: JAX is already running with other devices.

    >>> simulated_devices(8)
    >>> jax.device_count()
    8
    """
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:  # JAX refuses another number once it has chosen its devices
        if (jax.default_backend(), jax.local_device_count()) == ("cpu", count):
            return
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)  # this goes before XLA_FLAGS
        return
    raise refusal(
        RuntimeError,
        what=f"simulated_devices({count}) comes too late",
        which=[f"JAX runs with {jax.local_device_count()} {jax.default_backend()} devices"],
        why="JAX chooses its devices once, when it is first used",
        do="Call it at the top of conftest.py, before anything computes, or set "
        f"JAX_NUM_CPU_DEVICES={count} and JAX_PLATFORMS=cpu in the environment.",
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
    """Calls a function mapped by `jax.pmap` and by `jax_dist.pmap`, and compares the results.

    It compares the structure, and for each array the shape, dtype, weak type, values, and which
    device holds which slice. If `jax.pmap` raises, the other must raise too: an error of the same
    class or of a subclass, or any ValueError for a ValueError.

    Args:
      fun: the function to map.
      *args: its arguments. Donated ones are copied, and stay usable.
      axis_name: names the mapped axis, as in `pmap`.
      kwargs: its keyword arguments.
      pmap: what to compare with `jax.pmap`; `jax_dist.pmap` if not given.
      rtol: how far values may differ, relative to what `jax.pmap` computes.
      atol: how far they may differ besides. With both 0, they must be equal; NaN equals NaN.
      **pmap_options: further options for both, such as `in_axes` and `donate_argnums`.

    Returns:
      The result of the other pmap; None if both raised.

    Raises:
      AssertionError: they differ. The message lists all differences.

    >>> assert_same_as_pmap(lambda x: x / jax.lax.psum(x, "i"), np.ones(8), axis_name="i").tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """
    other = jax_dist.pmap if pmap is None else pmap
    donated = pmap_options.get("donate_argnums", ())
    donated = {donated} if isinstance(donated, int) else set(donated)
    copy = lambda leaf: leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf

    def attempt(pmap: Callable) -> tuple[Any, Exception | None]:
        given = [jax.tree.map(copy, arg) if i in donated else arg for i, arg in enumerate(args)]
        try:
            mapped = pmap(fun, axis_name, **pmap_options)
            return jax.block_until_ready(mapped(*given, **(kwargs or {}))), None
        except Exception as error:  # noqa: BLE001  # whatever it raises is compared
            return None, error

    expected, expected_error = attempt(jax.pmap)
    result, error = attempt(other)
    kind = ValueError if isinstance(expected_error, ValueError) else type(expected_error)
    differences: Sequence[str] = ()
    if error is None and expected_error is None:
        differences = list(_differences(result, expected, rtol, atol))
    elif expected_error is None:
        differences = [f"it raises {_summary(error)}, jax.pmap does not"]
    elif error is None:
        differences = [f"jax.pmap raises {_summary(expected_error)}, it does not"]
    elif not isinstance(error, kind):
        differences = [f"it raises {_summary(error)}, jax.pmap {_summary(expected_error)}"]
    if differences:
        raise refusal(
            AssertionError,
            what=f"pmap of '{getattr(fun, '__name__', fun)}' is not the same as jax.pmap of it",
            which=differences,
            why="it stands in for jax.pmap, with the same values in the same places",
            do="Give rtol or atol if values may differ by rounding; the rest must be the same.",
        ) from error
    return result


def _summary(error: Exception | None) -> str:
    text = "" if error is None else text_of(error).partition("\n")[0]
    return f"{type(error).__name__}({text!r})"


def _differences(result: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    structure, expected_structure = jax.tree.structure(result), jax.tree.structure(expected)
    if structure != expected_structure:
        yield f"result: structure {structure}, with jax.pmap {expected_structure}"
        return
    paths = jax.tree_util.tree_leaves_with_path(result)
    for (path, leaf), expected_leaf in zip(paths, jax.tree.leaves(expected), strict=True):
        for difference in _leaf_differences(leaf, expected_leaf, rtol, atol):
            yield f"result{jax.tree_util.keystr(path)}: {difference}"


def _leaf_differences(leaf: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    if isinstance(leaf, jax.Array) != isinstance(expected, jax.Array):
        yield f"class {type(leaf).__name__}, with jax.pmap {type(expected).__name__}"
        return
    if leaf.dtype != expected.dtype:
        yield f"dtype {leaf.dtype}, with jax.pmap {expected.dtype}"
    if leaf.shape != expected.shape:
        yield f"shape {leaf.shape}, with jax.pmap {expected.shape}"
    elif leaf.dtype == expected.dtype:
        yield from _value_differences(leaf, expected, rtol, atol)
    if isinstance(leaf, jax.Array):
        weak, expected_weak = jax.typeof(leaf).weak_type, jax.typeof(expected).weak_type
        if weak != expected_weak:
            yield f"weak type {weak}, with jax.pmap {expected_weak}"
        if leaf.shape == expected.shape:
            held, expected_held = _placement(leaf), _placement(expected)
            wrong = [device for device in held if held[device] != expected_held.get(device)]
            if list(held) != list(expected_held):
                yield f"slices on devices {list(held)}, with jax.pmap {list(expected_held)}"
            elif wrong:
                first, there = held[wrong[0]], expected_held[wrong[0]]
                yield f"device {wrong[0]} holds {first}, with jax.pmap {there}"


def _value_differences(leaf: Any, other: Any, rtol: float, atol: float) -> Iterator[str]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
    values, expected = np.asarray(leaf), np.asarray(other)
    same = (values == expected) | ((values != values) & (expected != expected))  # NaN is not itself
    if rtol or atol:
        wide = [each.astype(np.complex128) for each in (values, expected)]  # any number fits
        same |= np.isclose(*wide, rtol=rtol, atol=atol)
    wrong = np.argwhere(~same)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        yield (
            f"{len(wrong)} of {same.size} values differ, first at {list(at)}: "
            f"{values[at]}, with jax.pmap {expected[at]}"
        )


def _placement(array: jax.Array) -> dict[int, str]:
    """Device to slice, in the order of the mesh, as in `{0: "[0:1, 0:3]", 1: "[1:2, 0:3]"}`."""
    placement = {}
    for shard in array.addressable_shards:
        # Not strict: the index of an array of keys also has the dimensions of one key.
        sides = zip(shard.index, array.shape, strict=False)
        bounds = []
        for side, size in sides:
            # One form for what is written in several: `0`, `0:1` and `:` of a dimension of size 1.
            whole = slice(side, side + 1) if isinstance(side, int) else side
            bounds.append("{}:{}".format(*whole.indices(size)))
        placement[shard.device.id] = f"[{', '.join(bounds)}]"
    return placement


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
    """How one process of `run_processes` ended."""

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
    lines: list[list[str]] = [[] for _ in range(processes)]
    with tempfile.TemporaryDirectory(prefix="jax_dist_") as name:
        task = pathlib.Path(name, "task")
        deadline = time.time() + timeout
        with task.open("wb") as file:
            pickle.dump({"sys_path": sys.path, **_find_main(fun)}, file)
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


def _find_main(fun: Callable) -> dict[str, str]:
    """Return how `multiprocessing.spawn.prepare` imports the main program, if it defines `fun`."""
    main = sys.modules["__main__"]
    if getattr(fun, "__module__", None) != "__main__":
        return {}
    if main.__spec__ is not None:  # python -m package.module
        return {"init_main_from_name": main.__spec__.name}
    return {"init_main_from_path": os.path.abspath(str(main.__file__))}


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
        seconds = max(1, round(task["timeout"]))
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=rank,
            initialization_timeout=seconds,
            shutdown_timeout_seconds=seconds,
            cluster_detection_method="deactivate",
        )
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
    report.with_suffix(".part").write_bytes(pickle.dumps((value, error, trace)))
    report.with_suffix(".part").replace(report)
    sys.stdout.flush()
    sys.stderr.flush()
    if error is None:
        jax.distributed.shutdown()  # waits for the others
    os._exit(0 if error is None else 1)
