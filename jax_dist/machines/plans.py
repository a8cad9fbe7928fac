"""Compiles a step in several ways for several machines, and says what each takes and what fits."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_dist import _usage
from jax_dist._exceptions import text_of
from jax_dist.errors import ArgumentTypeError, refusal
from jax_dist.machines import ways as ways_of
from jax_dist.machines.cost import ProgramCost
from jax_dist.machines.report import Machine, Plan, PlannedWay
from jax_dist.machines.steps import MappedStep
from jax_dist.machines.topologies import Topology, topology

_AT_ONCE = 4  # programs that are compiled side by side, at most
_LEAST_EFFORT = 9  # of "O0" to "O3", 9 to 39; jax 0.10 takes the number alone, 0.12 both
_SURE = 0.7  # of a device's memory; with the usual effort, a program that takes less will fit, too


def plan(
    fun: Callable,
    *args: Any,
    on: Any,
    keywords: Mapping[str, Any] | None = None,
    state: int | Sequence[int] | None = None,
    ways: Sequence[str] | None = None,
    quick: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Compiles a step in several ways for one or several machines; nothing is run.

    Args:
      fun: a function mapped by `jax.pmap` or `jax_dist.pmap`, or one that calls such a function.
      *args: as in a call, of any number of slices; types will do for arrays. On each machine, every
        device gets as much as here.
      on: a machine or several: a `Topology`, its name, such as "v5e:4x4", or a list of devices.
      keywords: the arguments that are passed by keyword.
      state: the position of the argument that is carried from call to call, or several; by
        default what comes back.
      ways: of "jax.pmap", "jax_dist.pmap", "replicated", "fsdp", "hsdp" and "fsdp-regather"; by
        default all but "hsdp", and "jax_dist.pmap" where it makes the program of `jax.pmap`.
      quick: compiles with the least effort, some five times faster, and with the usual one what so
        takes over 70 % of the memory. The other programs are not those that will run: their peaks
        are estimates, mostly too high.
      progress: is told what has been compiled, a line at a time.

    Returns:
      The table of all ways and machines: what each device holds, whether it fits, and what is sent.

    Raises:
      ArgumentTypeError: there is no such way.
      UnsupportedError: nothing is mapped in `fun`.
      ValueError: there is no such machine.
      ImportError: the compiler of a machine is not installed.

    >>> import jax, jax.numpy as jnp
    >>> def step(w, x):
    ...     gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * jax.lax.pmean(gradient, "i")
    >>> mapped = jax.pmap(step, axis_name="i")
    >>> found = plan(mapped, jnp.ones((2, 64, 64)), jnp.ones((2, 4, 64)), on=jax.devices())
    >>> {each.way: each.program.argument_bytes for each in found.rows}["fsdp"]
    3072
    """
    step = MappedStep.of_mapped(fun, args, dict(keywords or {}))
    machines = machines_of(on)
    return plan_step(step, machines, state=state, ways=ways, quick=quick, progress=progress)


def plan_step(
    step: MappedStep,
    machines: Sequence[Machine],
    *,
    state: int | Sequence[int] | None = None,
    ways: Sequence[str] | None = None,
    quick: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """The same of a step that has been found."""
    carried = (state,) if isinstance(state, int) else state
    told = progress or (lambda line: None)
    check_ways(ways)
    asked = [
        (machine, way)
        for machine in machines
        for way in ways or ways_of.usual(step, machine.devices)
    ]
    workers = min(_AT_ONCE, os.cpu_count() or 1, len(asked))
    told(f"compiles {_usage.counted(len(asked), 'program')}, {workers} at a time")
    with _pool(workers) as pool:
        begun = []
        for machine, way in asked:
            try:  # tracing is Python's, one at a time
                lowered = ways_of.lowered(step, way, machine.devices, carried)
            except Exception as error:  # noqa: BLE001  # whatever fails is a row of the table
                begun.append(PlannedWay(machine.name, way, problem=_first_line(error)))
            else:
                compiled = _compiled_quickly if quick else _compiled
                begun.append(pool.submit(compiled, machine, way, lowered))
        rows = []
        for number, each in enumerate(begun, 1):
            row = each if isinstance(each, PlannedWay) else each.result()
            told(f"{number} of {len(begun)}: {row.told}")
            rows.append(row)
    return Plan(step.name, tuple(machines), tuple(rows), step.given)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that nobody waits for where something went wrong, as an interrupt."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _compiled_quickly(machine: Machine, way: str, lowered: jax.stages.Lowered) -> PlannedWay:
    """With the least effort; where that leaves little free, or nothing, with the usual one."""
    row = _compiled(machine, way, lowered, optimization_level=_LEAST_EFFORT)
    if row.needed is not None and row.memory is not None and row.needed > _SURE * row.memory:
        return _compiled(machine, way, lowered)
    return dataclasses.replace(row, is_quick=True)


def _compiled(
    machine: Machine, way: str, lowered: jax.stages.Lowered, **options: Any
) -> PlannedWay:
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(text_of(error))
        return PlannedWay(
            machine.name,
            way,
            seconds=time.perf_counter() - start,
            problem="" if needed else _first_line(error),
            memory=machine.memory,
            needed=needed,
        )
    seconds = time.perf_counter() - start
    program = ProgramCost.of_compiled(compiled, lowered.as_text())
    return PlannedWay(
        machine.name,
        way,
        program=program,
        seconds=seconds,
        memory=machine.memory,
        needed=_peak(program, machine),
    )


def _peak(program: ProgramCost, machine: Machine) -> int | None:
    """The bytes that a program takes at its peak."""
    if machine.devices[0].platform != "cpu":
        return program.peak_bytes
    parts = (program.argument_bytes, program.output_bytes, program.temp_bytes)
    if None in (*parts, program.alias_bytes):
        return None
    return sum(part or 0 for part in parts) - (program.alias_bytes or 0)


def _needed(text: str) -> int | None:
    """The bytes that a program would take, which the compiler of TPUs refuses for them.

    >>> _needed("memory required for HLO temporaries (16.47G) exceeds available HBM (15.75G).")
    17684527841
    """
    found = _TOO_LARGE.search(text)
    return round(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)) if found else None


_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")


def _first_line(error: Exception) -> str:
    return (text_of(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


def check_ways(ways: Sequence[str] | None) -> None:
    """Raises ArgumentTypeError for a way that there is not."""
    for way in ways or ():
        if way not in ways_of.WAYS:
            raise refusal(
                ArgumentTypeError,
                what=f"plan knows no way {way!r}",
                which=[f"they are {', '.join(ways_of.WAYS)}"],
                why="only these are programs that it can make of a step",
                do=_usage.hint(way, ways_of.WAYS, "Give one of them."),
            )


def machines_of(on: Any) -> list[Machine]:
    """The machines that are asked for, in order; see `plan`."""
    if isinstance(on, str | Topology):
        return [_machine(on)]
    asked = list(on)
    if not asked or isinstance(asked[0], jax.Device):
        return [_machine(asked)]
    return list(map(_machine, asked))


def _machine(asked: Any) -> Machine:
    if isinstance(asked, str):
        asked = topology(asked)
    if isinstance(asked, Topology):
        return Machine(asked.name, asked.devices, asked.memory)
    devices = tuple(asked) if isinstance(asked, Sequence) else ()
    if devices and all(isinstance(device, jax.Device) for device in devices):
        stats = devices[0].memory_stats() or {}
        name = _usage.counted(len(devices), f"{devices[0].device_kind} device")
        return Machine(name, devices, stats.get("bytes_limit"))
    raise refusal(
        ArgumentTypeError,
        what="plan got something else than a machine",
        which=[f"on={asked!r}"],
        why="programs are compiled for its devices",
        do="Give a name such as 'v5e:4x4', what jax_dist.topology returns, or a list of devices.",
    )
