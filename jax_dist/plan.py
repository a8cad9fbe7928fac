"""Memory and collectives of a training step on machines that are not attached, by strategy.

The function that the step maps, with the arguments of one device, is mapped again over the devices
of each machine and compiled. Nothing runs; all numbers come from the compiler.
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

# The last four are those of `global_view`, of which "hsdp" shards over the devices of a host alone.
STRATEGIES = ("jax.pmap", "jax_dist.pmap", "replicated", "fsdp", "hsdp", "fsdp-regather")
DEFAULT = ("jax.pmap", "replicated", "fsdp", "fsdp-regather")
_MAX_THREADS = 4  # that compile at the same time
_LOWEST_EFFORT = 9  # XLA's "O0"; jax 0.10 accepts only the number
_SAFE_MEMORY_SHARE = 0.7  # a program that needs less with lowest effort also fits in full


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """The result of compiling a step with one strategy for one machine; bytes are per device."""

    machine: str
    strategy: str
    memory: int | None = None  # bytes that a program may use; None if unknown
    needed: int | None = None  # peak bytes; also known if the compiler rejects it for its size
    program: ProgramCost | None = None  # None if it was not compiled
    seconds: float | None = None  # of compilation
    problem: str = ""  # why there is no program, if not for its size
    is_quick: bool = False  # compiled with the lowest effort, so `needed` is an estimate

    @property
    def fits(self) -> bool | None:
        """Return whether the program fits in memory; None if there is no program or no limit."""
        if self.needed is None or self.memory is None:
            return None
        return self.needed <= self.memory and self.program is not None

    @property
    def verdict(self) -> str:
        """Return the verdict for the table, as "fits, 1.2 GB free", or why there is none."""
        if self.problem:
            return self.problem
        if self.needed is None or self.memory is None:
            return "limit unknown"
        difference = human_bytes(abs(self.memory - self.needed))
        if not self.fits:
            return f"does NOT fit, by {difference}"
        return f"fits, about {difference} free" if self.is_quick else f"fits, {difference} free"

    @property
    def cells(self) -> list[str]:
        """Return the four cells for the table: arguments, peak, sent bytes, compile time."""
        peak = "" if self.needed is None else human_bytes(self.needed)
        if self.program is None:
            return ["", peak, "", ""]
        sent = human_bytes(self.program.moved_bytes)
        if any(c.runs == "in a loop of unknown length" for c in self.program.collectives):
            sent = f">{sent}"  # such a loop was counted as one iteration
        arguments = human_bytes(self.program.argument_bytes or 0)
        return [arguments, peak, sent, f"{self.seconds or 0:.0f} s"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The results of `plan`, a row for each machine and strategy; `str(plan)` is a table."""

    name: str  # of the step's function
    machines: tuple[Topology, ...]
    rows: tuple[PlanRow, ...]  # all strategies of the first machine, then those of the second, ...

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers, for JSON."""
        machines = [
            {"name": m.name, "devices": len(m.devices), "hosts": m.hosts, "memory": m.memory}
            for m in self.machines
        ]
        rows = []
        for row in self.rows:
            moved_bytes = None if row.program is None else row.program.moved_bytes
            rows.append(dataclasses.asdict(row) | {"fits": row.fits, "moved_bytes": moved_bytes})
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
      *args: as in a call, with any mapped size; `jax.ShapeDtypeStruct` will do for arrays. Each
        device of a machine gets a slice of the same shape as here.
      on: a machine or several: a `Topology`, its name, such as "v5e:4x4", or a list of devices.
      keywords: the arguments that are passed by keyword.
      state: the position of the argument that is carried from call to call, or several; by
        default, those arguments that come back as results of the same tree, shapes and dtypes.
      strategies: of "jax.pmap", "jax_dist.pmap", "replicated", "fsdp", "hsdp", "fsdp-regather"; by
        default all but "jax_dist.pmap" and "hsdp".
      quick: compile with the lowest effort, about five times faster. What then needs over 70 % of
        the memory is compiled again in full; the other peaks are estimates, mostly too high.
      progress: called with a line of text for each program.

    Raises:
      ArgumentError: there is no such strategy or machine.
      NotImplementedError: nothing is mapped in `fun`.
      ImportError: the compiler of a machine is not installed.
    """
    step = fun if isinstance(fun, MappedStep) else MappedStep.find(fun, args, dict(keywords or {}))
    machines = machines_of(on)
    if isinstance(state, int):
        state = (state,)
    check_strategies(strategies or ())
    futures: list[concurrent.futures.Future[PlanRow]] = []
    rows: list[PlanRow] = []
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for machine, strategy in itertools.product(machines, strategies or DEFAULT):
            # Tracing holds Python's lock, so only compilation goes to the threads.
            try:
                lowered = step.lower(strategy, machine, state)
            except Exception as error:  # noqa: BLE001  # any failure becomes a row of the table
                problem = _first_line(error)
                futures.append(pool.submit(PlanRow, machine.name, strategy, problem=problem))
            else:
                futures.append(pool.submit(_compile, machine, strategy, lowered, quick=quick))
        for future in futures:
            row = future.result()
            rows.append(row)
            if progress:
                text = f"{row.strategy} on {row.machine}: {row.verdict}"
                progress(f"{len(rows)} of {len(futures)}: {text}")
    return Plan(step.name, tuple(machines), tuple(rows))


def check_strategies(strategies: Sequence[str]) -> None:
    """Raise ArgumentError if a name is not one of `STRATEGIES`."""
    for strategy in strategies:
        if strategy not in STRATEGIES:
            remedy = _usage.hint(strategy, STRATEGIES, f"They are {', '.join(STRATEGIES)}.")
            raise ArgumentError(f"unknown strategy {strategy!r}. {remedy}")


def machines_of(on: Any) -> list[Topology]:
    """Return the machines of `on` as for `plan`; a sequence of devices is one machine."""
    if isinstance(on, Topology):
        return [on]
    if isinstance(on, str):
        return [topology(on)]
    items = list(on) if isinstance(on, Sequence | np.ndarray) else []
    if not items:
        raise ArgumentError(
            f"on={on!r} is not a machine. Give a name such as 'v5e:4x4', what jax_dist.topology "
            "returns, or a list of devices."
        )
    if all(isinstance(item, jax.Device) for item in items):
        memory_stats = items[0].memory_stats() or {}  # None on CPU
        name = _usage.counted(len(items), f"{items[0].device_kind} device")
        return [Topology(name, tuple(items), memory_stats.get("bytes_limit"))]
    return [machine for item in items for machine in machines_of(item)]


def _compile(
    machine: Topology, strategy: str, lowered: jax.stages.Lowered, *, quick: bool
) -> PlanRow:
    """Compile a program and return its row; if `quick`, with full effort only near the limit."""
    start = time.perf_counter()
    row = PlanRow(machine.name, strategy, machine.memory, is_quick=quick)
    options: dict[str, Any] = {"optimization_level": _LOWEST_EFFORT} if quick else {}
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        row = dataclasses.replace(row, needed=needed, problem="" if needed else _first_line(error))
    else:
        cost = ProgramCost.measure(lowered, compiled)
        needed = cost.peak_bytes
        if machine.devices[0].platform == "cpu":  # the peak of XLA's CPU compiler is incomplete
            sizes = (cost.argument_bytes, cost.output_bytes, cost.temp_bytes)
            needed = sum(size or 0 for size in sizes) - (cost.alias_bytes or 0)
        row = dataclasses.replace(row, needed=needed, program=cost)
    if quick and row.needed and row.memory and row.needed > _SAFE_MEMORY_SHARE * row.memory:
        return _compile(machine, strategy, lowered, quick=False)
    return dataclasses.replace(row, seconds=time.perf_counter() - start)


def _needed_bytes(error_text: str) -> int | None:
    """Return the bytes in the TPU compiler's error "... (20.5G) exceeds available HBM", or None."""
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", error_text)
    if match is None:
        return None
    return round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))


def _first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or its class name if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")
