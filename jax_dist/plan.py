"""Memory and collectives of a training step on unattached machines, by strategy.

The function in a mapped step, with the arguments of one device, is mapped again over the devices of
each machine, and compiled. Nothing runs, and all numbers are those of the compiler.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_dist import _usage
from jax_dist._hlo import ProgramCost
from jax_dist._steps import MappedStep
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError
from jax_dist.topology import Topology, topology

STRATEGIES = ("jax.pmap", "jax_dist.pmap", "replicated", "fsdp", "hsdp", "fsdp-regather")
DEFAULT = ("jax.pmap", "replicated", "fsdp", "fsdp-regather")
_AT_ONCE = 4  # programs that are compiled side by side, at most
_LEAST_EFFORT = 9  # of "O0" to "O3", 9 to 39; jax 0.10 takes the number alone, 0.12 both
_SURE = 0.7  # of a device's memory: a quick program that takes less fits with usual effort, too


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """One strategy on one machine. Bytes are those of one device."""

    machine: str
    strategy: str
    memory: int | None = None  # that a program may use there; None if unknown
    needed: int | None = None  # at the peak; also of a program that the compiler rejects for it
    program: ProgramCost | None = None  # None: it was not compiled
    seconds: float | None = None  # of compilation
    problem: str = ""  # why there is no program, if not for memory
    is_quick: bool = False  # compiled with the least effort: the peak is an estimate

    @property
    def fits(self) -> bool | None:
        """Return whether the program fits; None if there is no program, or no limit."""
        if self.needed is None or self.memory is None:
            return None
        return self.needed <= self.memory and self.program is not None

    @property
    def verdict(self) -> str:
        """Return whether the program fits, and by how much."""
        if self.problem or self.needed is None or self.memory is None:
            return self.problem or "limit unknown"
        spare = human_bytes(abs(self.memory - self.needed))
        about = "about " * self.is_quick
        return f"fits, {about}{spare} free" if self.fits else f"does NOT fit, by {spare}"

    @property
    def cells(self) -> list[str]:
        """Return the numbers of its line in the table."""
        peak = "" if self.needed is None else human_bytes(self.needed)
        if self.program is None:
            return ["", peak, "", ""]
        # A loop of unknown length counts once.
        runs = [collective.runs for collective in self.program.collectives]
        sent = ">" * ("in a loop of unknown length" in runs) + human_bytes(self.program.moved_bytes)
        arguments = human_bytes(self.program.argument_bytes or 0)
        return [arguments, peak, sent, f"{self.seconds or 0:.0f} s"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A step with several strategies on several machines. Printed, it is a table."""

    name: str  # of the step
    machines: tuple[Topology, ...]
    rows: tuple[PlanRow, ...]  # by machine

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers, for JSON."""
        rows = []
        for row in self.rows:
            moved = row.program and row.program.moved_bytes
            rows.append({**dataclasses.asdict(row), "fits": row.fits, "moved_bytes": moved})
        machines = [
            {"name": m.name, "devices": len(m.devices), "hosts": m.hosts, "memory": m.memory}
            for m in self.machines
        ]
        return {"name": self.name, "machines": machines, "rows": rows}

    def __str__(self) -> str:
        from rich.table import Table  # slow to import

        parts: list[Any] = [self.name]
        for machine in self.machines:
            devices = _usage.counted(len(machine.devices), "device")
            title = f"\n{machine.name}: {devices} on {_usage.counted(machine.hosts, 'host')}"
            if machine.memory is not None:
                title += f", {human_bytes(machine.memory)} for programs on each"
            table = Table("strategy", "on one device", box=None)
            for header in ("arguments", "peak", "sent", "compiled"):
                table.add_column(header, justify="right")
            for row in self.rows:
                if row.machine == machine.name:
                    table.add_row(row.strategy, row.verdict, *row.cells)
            parts += [title, table]
        if any(row.program for row in self.rows):
            parts.append("\nsent: by each device in one step, around a ring")
        return _usage.render(*parts, width=78)


def plan(
    fun: Callable | MappedStep,
    *args: Any,
    on: Any,
    keywords: Mapping[str, Any] | None = None,
    state: int | Sequence[int] | None = None,
    strategies: Sequence[str] | None = None,
    quick: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Compile a step with several strategies for one or several machines; nothing runs.

    Args:
      fun: a function mapped by `jax.pmap` or `jax_dist.pmap`, or one that calls such a function; or
        a `MappedStep`.
      *args: as in a call, of any number of slices; types will do for arrays. On each machine, every
        device gets as much as here.
      on: a machine or several: a `Topology`, its name, such as "v5e:4x4", or a list of devices.
      keywords: the arguments that are passed by keyword.
      state: the position of the argument that is carried from call to call, or several; by
        default what comes back.
      strategies: of "jax.pmap", "jax_dist.pmap", "replicated", "fsdp", "hsdp", "fsdp-regather"; by
        default all but "jax_dist.pmap" and "hsdp".
      quick: compile with the least effort, some five times faster, and in full what so takes over
        70 % of the memory. The other peaks are estimates, mostly too high.
      progress: is called with a line of text for each program.

    Raises:
      ArgumentError: there is no such strategy or machine.
      NotImplementedError: nothing is mapped in `fun`.
      ImportError: the compiler of a machine is not installed.
    """
    step = fun if isinstance(fun, MappedStep) else MappedStep.of(fun, args, dict(keywords or {}))
    machines = machines_of(on)
    state = (state,) if isinstance(state, int) else state
    check_strategies(strategies or ())
    tasks: list[concurrent.futures.Future[PlanRow]] = []
    rows: list[PlanRow] = []
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for machine, strategy in itertools.product(machines, strategies or DEFAULT):
            try:  # tracing is Python's, one at a time
                lowered = step.lower(strategy, machine, state)
            except Exception as error:  # noqa: BLE001  # whatever fails is a row of the table
                problem = _first_line(error)
                tasks.append(pool.submit(PlanRow, machine.name, strategy, problem=problem))
            else:
                tasks.append(pool.submit(_compile, machine, strategy, lowered, quick=quick))
        for task in tasks:
            row = task.result()
            rows.append(row)
            if progress:
                words = f"{row.strategy} on {row.machine}: {row.verdict}"
                progress(f"{len(rows)} of {len(tasks)}: {words}")
    return Plan(step.name, tuple(machines), tuple(rows))


def check_strategies(strategies: Sequence[str]) -> None:
    """Raise ArgumentError for a name that is no strategy."""
    for strategy in strategies:
        if strategy not in STRATEGIES:
            near = _usage.hint(strategy, STRATEGIES, f"They are {', '.join(STRATEGIES)}.")
            raise ArgumentError(f"unknown strategy {strategy!r}. {near}")


def machines_of(on: Any) -> list[Topology]:
    """Return the machines that are asked for, in order; see `plan`."""
    if isinstance(on, str | Topology):
        return [topology(on) if isinstance(on, str) else on]
    items = list(on) if isinstance(on, Sequence | np.ndarray) else []
    if items and all(isinstance(item, jax.Device) for item in items):
        stats = items[0].memory_stats() or {}
        name = _usage.counted(len(items), f"{items[0].device_kind} device")
        return [Topology(name, tuple(items), stats.get("bytes_limit"))]
    if not items:
        raise ArgumentError(
            f"on={on!r} is not a machine. Give a name such as 'v5e:4x4', what jax_dist.topology "
            "returns, or a list of devices."
        )
    return [machine for item in items for machine in machines_of(item)]


def _compile(
    machine: Topology, strategy: str, lowered: jax.stages.Lowered, *, quick: bool
) -> PlanRow:
    """Return the row of a program, compiled with less effort if that is enough to tell."""
    start = time.perf_counter()
    row = PlanRow(machine.name, strategy, machine.memory, is_quick=quick)
    options: dict[str, Any] = {"optimization_level": _LEAST_EFFORT} if quick else {}
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        row = dataclasses.replace(row, needed=needed, problem="" if needed else _first_line(error))
    else:
        program = ProgramCost.of(lowered, compiled)
        needed = program.peak_bytes
        if machine.devices[0].platform == "cpu":  # whose compiler leaves out arguments
            sizes = (program.argument_bytes, program.output_bytes, program.temp_bytes)
            needed = sum(size or 0 for size in sizes) - (program.alias_bytes or 0)
        row = dataclasses.replace(row, needed=needed, program=program)
    if quick and row.needed and row.memory and row.needed > _SURE * row.memory:
        return _compile(machine, strategy, lowered, quick=False)
    return dataclasses.replace(row, seconds=time.perf_counter() - start)


def _needed_bytes(text: str) -> int | None:
    """Return the bytes of a program that the compiler of TPUs rejects for its size."""
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", text)
    return round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1)) if match else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")
