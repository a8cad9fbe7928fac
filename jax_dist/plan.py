"""Memory and collectives of a training step on unattached machines, by strategy.

The function in a mapped step, with the arguments of one device, is mapped again over the devices of
each machine, and compiled. Nothing runs, and all numbers are those of the compiler.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.core import Tracer

from jax_dist import _compat, _usage
from jax_dist._hlo import ProgramCost
from jax_dist._pmap import axes
from jax_dist._pmap.body import Call, type_of
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError
from jax_dist.global_view.view import global_view
from jax_dist.pmap import Mapped, pmap
from jax_dist.topology import Topology, topology

STRATEGIES = {
    "jax.pmap": "the program as it is",
    "jax_dist.pmap": "the same, a gather that is only reduced replaced by a reduction",
    "replicated": "by global_view, a copy of the state on each device",
    "fsdp": "by global_view, the state sharded, gathered once in a step",
    "hsdp": "by global_view, the state sharded over the devices of a host, copied over hosts",
    "fsdp-regather": "sharded, gathered each time that it is read: less memory, more sent",
}
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


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A step with several strategies on several machines. Printed, it is a table."""

    name: str  # of the step
    machines: tuple[Topology, ...]
    rows: tuple[PlanRow, ...]  # by machine

    @property
    def advice(self) -> str:
        """Return what fits where, in a sentence for each machine."""
        return " ".join(map(self._advice, self.machines))

    def _advice(self, machine: Topology) -> str:
        rows = [row for row in self.rows if row.machine == machine.name]
        rows = [row for row in rows if row.needed is not None]
        if not rows:
            return f"There is no program for {machine.name}."
        least = min(rows, key=lambda row: row.needed or 0)
        needs = f"{least.strategy} needs least, {human_bytes(least.needed or 0)}"
        if machine.memory is None:
            return f"On {machine.name}, {needs}; its limit is unknown."
        fitting = [row.strategy for row in rows if row.fits]
        if not fitting:
            return f"It does not fit on {machine.name}: {needs} of {human_bytes(machine.memory)}."
        return f"It fits on {machine.name} with {', '.join(fitting)}; {needs}."

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers, for JSON."""
        rows = [{**dataclasses.asdict(row), "fits": row.fits} for row in self.rows]
        for row, source in zip(rows, self.rows, strict=True):
            row["moved_bytes"] = source.program and source.program.moved_bytes
        machines = [
            {"name": m.name, "devices": len(m.devices), "hosts": m.hosts, "memory": m.memory}
            for m in self.machines
        ]
        return {"name": self.name, "advice": self.advice, "machines": machines, "rows": rows}

    def __str__(self) -> str:
        return self.render()

    def render(self, width: int = 80) -> str:
        """Return the text of the plan, a table for each machine."""
        from rich.table import Table  # noqa: PLC0415  # slow to import

        parts: list[Any] = [f"{self.name}: {self.advice}"]
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
                    table.add_row(row.strategy, row.verdict, *_cells(row))
            parts += [title, table]
        if any(row.program for row in self.rows):
            parts.append("\nsent: by each device in one step, around a ring")
        return _usage.render(*parts, width=width)


def _cells(row: PlanRow) -> list[str]:
    peak = "" if row.needed is None else human_bytes(row.needed)
    if row.program is None:
        return ["", peak, "", ""]
    # A loop of unknown length counts once.
    is_bound = any(each.runs == "in a loop of unknown length" for each in row.program.collectives)
    sent = ">" * is_bound + human_bytes(row.program.moved_bytes)
    return [human_bytes(row.program.argument_bytes or 0), peak, sent, f"{row.seconds or 0:.0f} s"]


def plan(
    fun: "Callable | MappedStep",
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

    Returns:
      The plan: `rows`, with what each device holds, whether it fits, and what is sent; `advice`;
      a table when printed.

    Raises:
      ArgumentError: there is no such strategy or machine.
      NotImplementedError: nothing is mapped in `fun`.
      ImportError: the compiler of a machine is not installed.

    >>> import jax, jax.numpy as jnp
    >>> def step(w, x):
    ...     gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * jax.lax.pmean(gradient, "i")
    >>> mapped = jax.pmap(step, axis_name="i")
    >>> result = plan(mapped, jnp.ones((2, 64, 64)), jnp.ones((2, 4, 64)), on=jax.devices())
    >>> {row.strategy: row.program.argument_bytes for row in result.rows}["fsdp"]
    3072
    """
    step = fun if isinstance(fun, MappedStep) else MappedStep.of(fun, args, dict(keywords or {}))
    machines = machines_of(on)
    state = (state,) if isinstance(state, int) else state
    for strategy in strategies or ():
        if strategy not in STRATEGIES:
            near = _usage.hint(strategy, STRATEGIES, f"They are {', '.join(STRATEGIES)}.")
            raise ArgumentError(f"unknown strategy {strategy!r}. {near}")
    rows: list[PlanRow | concurrent.futures.Future] = []
    workers = min(_AT_ONCE, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for machine, strategy in itertools.product(machines, strategies or DEFAULT):
            try:  # tracing is Python's, one at a time
                lowered = step.lower(strategy, machine.devices, state)
            except Exception as error:  # noqa: BLE001  # whatever fails is a row of the table
                rows.append(PlanRow(machine.name, strategy, problem=_first_line(error)))
            else:
                rows.append(pool.submit(_compile, machine, strategy, lowered, quick=quick))
        done = []
        for number, row in enumerate(rows, 1):
            done.append(row if isinstance(row, PlanRow) else row.result())
            if progress:
                words = f"{done[-1].strategy} on {done[-1].machine}: {done[-1].verdict}"
                progress(f"{number} of {len(rows)}: {words}")
    return Plan(step.name, tuple(machines), tuple(done))


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
    start = time.perf_counter()
    options: dict[str, Any] = {"optimization_level": _LEAST_EFFORT} if quick else {}
    row = PlanRow(machine.name, strategy, machine.memory, is_quick=quick)
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        problem = "" if needed else _first_line(error)
        row = dataclasses.replace(row, needed=needed, problem=problem)
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
    """Return the bytes of a program that the compiler of TPUs rejects for its size.

    >>> _needed_bytes("the total memory (16.47G) exceeds available HBM (15.75G).")
    17684527841
    """
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", text)
    return round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1)) if match else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


# The function of one device in a mapped step, to be mapped over other devices.


@dataclasses.dataclass(frozen=True, slots=True)
class MappedStep:
    """A function of one device, and how it is mapped."""

    options: Any  # of `jax_dist.pmap`
    call: Call
    slices: tuple[jax.ShapeDtypeStruct, ...]  # what one device gives for each leaf of the arguments
    axes: tuple[int | None, ...]  # the mapped dimension of each leaf, from the left

    @property
    def name(self) -> str:
        return self.call.fun_name

    @classmethod
    def of(cls, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MappedStep":
        """Return the step in a mapped function, or the first that a larger function calls.

        Raises:
          NotImplementedError: it maps nothing.
          MappedAxisError: the sizes of the mapped axis differ, or there is none.
        """
        inner = fun if isinstance(fun, Mapped) else getattr(fun, "__wrapped__", None)
        if isinstance(inner, Mapped):
            options = inner._dispatcher.options
            call = Call.bind(options, inner.__wrapped__, args, kwargs)
        else:
            options, call = _intercept_pmap(fun, args, kwargs)
        _ = call.size  # raises if the sizes differ
        slices, dims = [], []
        for leaf, axis in zip(map(type_of, call.leaves), call.axes, strict=True):
            shape = list(leaf.shape)
            if axis is not None:
                axis %= len(shape)
                del shape[axis]
            slices.append(type_of(leaf, shape))
            dims.append(axis)
        return cls(options, call, tuple(slices), tuple(dims))

    def leaves(self, devices: int, whole: Sequence[int] = ()) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the leaves, `[N, *s]`; of the arguments `whole`, `[*s]`."""
        types = []
        for leaf, axis, owner in zip(self.slices, self.axes, self.call.owners, strict=True):
            shape = list(leaf.shape)
            if axis is not None and owner not in whole:
                shape.insert(axis, devices)
            types.append(type_of(leaf, shape))
        return types

    def mapped(self, pmap: Callable[..., Any], devices: Sequence[Any], **options: Any) -> Any:
        """Return the step mapped over devices, a function of leaves."""

        def of_leaves(*leaves: Any) -> Any:
            return self.call.run(leaves)

        of_leaves.__name__ = of_leaves.__qualname__ = self.name
        of_leaves.__wrapped__ = self.call.fun  # pyright: ignore[reportFunctionMemberAccess]
        owners = enumerate(self.call.owners)
        return pmap(
            of_leaves,
            self.options.axis_name,
            in_axes=self.axes,
            out_axes=self.options.out_axes,
            donate_argnums=tuple(n for n, owner in owners if owner in self.options.donated),
            devices=list(devices),
            **options,
        )

    def state(self, devices: int) -> tuple[int, ...]:
        """Return the positions of the first arguments whose tree, shapes and types come back.

        What comes back after an argument that does not may be anything.
        """
        trace = jax.make_jaxpr(
            lambda *leaves: self.call.run(leaves),
            axis_env=[(self.options.mesh_axis, devices)],
            return_shape=True,
        )
        _, results = trace(*self.slices)
        parts = [results, *results] if isinstance(results, tuple | list) else [results]
        kinds = [_kind_of(part) for part in parts]
        positions = []
        for position, arg in enumerate(self.call.rebuild(self.slices)[0]):
            if position in self.options.static:
                continue
            kind = _kind_of(arg)
            if kind in kinds and jax.tree.leaves(arg):
                kinds.remove(kind)
                positions.append(position)
            elif positions:
                break
        return tuple(positions)

    def lower(
        self, strategy: str, devices: Sequence[Any], state: Sequence[int] | None
    ) -> jax.stages.Lowered:
        """Return the program of the step with one of the `STRATEGIES`."""
        if strategy.endswith(".pmap"):
            function = jax.pmap if strategy == "jax.pmap" else pmap
            return self.mapped(function, devices).lower(*self.leaves(len(devices)))
        carried = self.state(len(devices)) if state is None else tuple(state)
        if not carried:
            raise ArgumentError(
                f"'{self.name}' carries no state: no argument has the tree, shapes and types of a "
                "result. Give its position by state=."
            )
        args, kwargs = self.call.rebuild(self.leaves(len(devices), whole=carried))
        dims, _ = self.call.rebuild(self.axes)
        static = self.options.static
        rows, names = np.array(devices), (self.options.mesh_axis,)
        if strategy == "hsdp":
            rows, names = rows.reshape(_count_hosts(devices), -1), ("hosts", "devices")
        options: dict[str, Any] = {"regather": True} if strategy == "fsdp-regather" else {}
        view = global_view(
            self.call.fun,
            self.options.mesh_axis,
            in_axes=tuple(None if n in static else dim for n, dim in enumerate(dims)),
            out_axes=self.options.out_axes,
            state=carried,
            mesh=_compat.auto_mesh(rows, names),
            mesh_axes=names,
            static_broadcasted_argnums=static,
            donate_argnums=self.options.donated,
            shardings="replicated" if strategy == "replicated" else "fsdp",
            **options,
        )
        return view.lower(*args, **kwargs)


def _count_hosts(devices: Sequence[Any]) -> int:
    return len({device.process_index for device in devices})


def _kind_of(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


class _Intercepted(Exception):  # noqa: N818  # it ends a trace, and is no error
    """The first pmap that a function calls."""


def _intercept_pmap(fun: Callable, args: tuple, kwargs: dict) -> tuple[Any, Call]:
    """Return the options and the call of the first `jax.pmap` in a function."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [n for n, leaf in enumerate(leaves) if hasattr(leaf, "shape")]  # others may be static

    def intercept(taken: Any, mapped: Sequence[Any]) -> Any:
        raise _Intercepted(taken, [type_of(jax.typeof(leaf)) for leaf in mapped])

    def traced(arrays: Sequence[Any]) -> None:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        positional, keywords = jax.tree.unflatten(tree, filled)
        fun(*positional, **keywords)

    name = axes.function_name(fun)
    try:
        with _compat.intercept_pmaps(intercept), contextlib.suppress(NameError):
            jax.eval_shape(traced, [type_of(leaves[place]) for place in places])
    except _Intercepted as intercepted:
        taken, types_ = intercepted.args
    else:  # nothing was mapped, or a collective stands outside of any map
        raise NotImplementedError(
            f"'{name}' maps nothing. Give the mapped function, as in jax.pmap(step, axis_name='i')."
        )

    def of_device(*args: Any, **kwargs: Any) -> Any:
        return taken.fun(*args, **kwargs)

    of_device.__name__ = of_device.__qualname__ = name
    call = Call.of_taken(taken, types_, of_device, name)
    pairs = list(zip(call.owners, taken.donated, strict=True))
    donated = {owner for owner, _ in pairs if isinstance(owner, int)}
    donated -= {owner for owner, is_donated in pairs if not is_donated}
    options = {"out_axes": taken.out_axes, "donate_argnums": tuple(donated)}
    return pmap(of_device, taken.axis_name, **options)._dispatcher.options, call


# The step that a program calls: the program runs up to it, and no further.


def find_step(program: Callable[[], object], name: str | None = None) -> MappedStep:
    """Run a program until it calls its training step, and return the step.

    Without a name, it is the first mapped function that takes what one of its results is like, and
    something else, as a batch; or, if it takes nothing else, the first that gets its own results.

    Args:
      program: runs it; what it maps with `jax.pmap` or `jax_dist.pmap` is looked at.
      name: the name of the function that is mapped.

    Raises:
      NotImplementedError: the program ended, or raised, before it called such a function.

    >>> def train():
    ...     step = jax.pmap(lambda w, x: (w - x, (w * x).sum()))
    ...     w = x = jax.numpy.ones((8, 3))
    ...     while True:
    ...         w, loss = step(w, x)
    >>> find_step(train).slices
    (ShapeDtypeStruct(shape=(3,), dtype=float32), ShapeDtypeStruct(shape=(3,), dtype=float32))
    """
    search, end, cause = _Search(name), "ended", None
    with contextlib.ExitStack() as stack:
        for home in (jax, sys.modules["jax_dist"]):  # where programs find it
            stack.enter_context(mock.patch.object(home, "pmap", search.watch(home.pmap)))
        try:
            program()
        except (Exception, SystemExit, _Reached) as error:  # noqa: BLE001  # told below
            cause = error
            end = "trains" if isinstance(error, _Reached) else f"raised {error!r}"
    if search.step is not None:  # even if the program caught what was to end it
        return search.step
    what = f"'{name}'" if name else "a training step, which gets its result again"
    called = ", ".join(axes.function_name(function) for function in search.last) or "none"
    raise NotImplementedError(
        f"The program {end}, and did not call {what}. Mapped functions that it called: {called}."
    ) from cause


class _Reached(BaseException):
    """The end of the program: no `except Exception` of its own keeps it."""


class _Search:
    """The mapped functions of a program, and its step."""

    def __init__(self, name: str | None):
        self.step: MappedStep | None = None
        self.last: dict[Callable, list[Any]] = {}  # the last results of functions of a state alone
        self._name = name

    def watch(self, pmap: Callable) -> Callable:
        """Return a `pmap` whose functions are looked at before each call."""

        def watched_pmap(*args: Any, **kwargs: Any) -> Any:
            if not args and "fun" not in kwargs:
                return functools.partial(watched_pmap, **kwargs)
            function = pmap(*args, **kwargs)

            def watched(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
                    return function(*args, **kwargs)  # a part of what is compiled
                has_state = self._end_at_step(function, args, kwargs)
                result = function(*args, **kwargs)
                self.last[function] = jax.tree.leaves(result) if has_state else []
                return result

            watched.__name__ = watched.__qualname__ = axes.function_name(function)
            watched.lower = function.lower  # pyright: ignore[reportFunctionMemberAccess]
            return watched

        return watched_pmap

    def _end_at_step(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """End the program at its step; else return whether the function takes a state alone."""
        last = {id(leaf) for leaf in self.last.get(function, [])}
        is_again = any(id(leaf) in last for leaf in jax.tree.leaves((args, kwargs)))
        if function in self.last and not is_again:
            return bool(last)
        step = MappedStep.of(function, args, kwargs)
        state = step.state(jax.local_device_count())
        trains = is_again or bool(state and {*step.call.owners} - {*state})
        if self._name == axes.function_name(function) or (self._name is None and trains):
            self.step = step
        self.last.setdefault(function, [])
        if self.step is not None or trains:  # under another name, it would train to its end
            raise _Reached
        return bool(state)
