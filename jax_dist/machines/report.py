"""What each way to run a step takes on each machine: as data, as text, as JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_dist._usage import counted, human_bytes
from jax_dist.machines import picture, rendering
from jax_dist.machines.cost import ProgramCost


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Devices to compile for."""

    name: str
    devices: tuple[Any, ...]
    memory: int | None  # bytes of one device that a program may use; None where that is unknown

    @property
    def hosts(self) -> int:
        return len({device.process_index for device in self.devices})


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedWay:
    """One way on one machine. Bytes are those of one device."""

    machine: str
    way: str
    program: ProgramCost | None = None  # None: it was not compiled
    seconds: float | None = None  # that compiling took
    memory: int | None = None  # that a program may use there
    needed: int | None = None  # at the peak; also of a program that was refused for it
    problem: str = ""  # why there is no program, if not for memory
    is_quick: bool = False  # compiled with the least effort: the peak is an estimate

    @property
    def fits(self) -> bool | None:
        """None where nothing says it: no program, or no limit."""
        if self.needed is None or self.memory is None:
            return None
        return self.needed <= self.memory and self.program is not None

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much."""
        if self.problem:
            return "no program"
        if self.needed is None or self.memory is None:
            return "limit unknown"
        spare = self.memory - self.needed
        if self.fits:
            return f"fits, {'about ' * self.is_quick}{human_bytes(spare)} free"
        return f"does NOT fit, by {human_bytes(-spare)}"

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; with the least effort, it has none worth a look."""
        return None if self.program is None or self.is_quick else self.program.cycles

    @property
    def told(self) -> str:
        """In a line, once it is known."""
        after = f", compiled in {self.seconds:.0f} s" if self.seconds is not None else ""
        return f"{self.way} on {self.machine}: {self.problem or self.verdict}{after}"

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return {
            "machine": self.machine,
            "way": self.way,
            "fits": self.fits,
            "needed_bytes": self.needed,
            "memory_bytes": self.memory,
            "compile_seconds": self.seconds,
            "is_quick": self.is_quick,
            "problem": self.problem or None,
            "moved_bytes": None if self.program is None else self.program.moved_bytes,
            "program": None if self.program is None else rendering.plain(self.program),
        }


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Plan(rendering.Printed):
    """A step in several ways on several machines. Printed, it fits a terminal of 80 columns."""

    name: str  # of the step
    machines: tuple[Machine, ...]
    rows: tuple[PlannedWay, ...]  # by machine
    slices: int  # of the call that was planned

    def on(self, machine: Machine) -> tuple[PlannedWay, ...]:
        """The ways on one machine."""
        return tuple(row for row in self.rows if row.machine == machine.name)

    @property
    def advice(self) -> str:
        """What fits where, in a sentence for each machine."""
        return " ".join(map(self._advice, self.machines))

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "advice": self.advice,
            "slices": self.slices,
            "machines": [
                {
                    "name": each.name,
                    "devices": len(each.devices),
                    "hosts": each.hosts,
                    "memory_bytes": each.memory,
                }
                for each in self.machines
            ],
            "rows": [row.to_dict() for row in self.rows],
        }

    def picture(self) -> str:
        """The memory of each way beside that of the device, as the text of an SVG file."""
        bars = []
        for machine in self.machines:
            for row in self.on(machine):
                arguments = row.program.argument_bytes if row.program else 0
                bars.append(
                    picture.Bar(machine.name, row.way, arguments or 0, row.needed, row.memory)
                )
        return picture.draw(f"Memory of one device at the peak of {self.name}", bars)

    @property
    def headline(self) -> str:
        return f"{self.name}: {self.advice}"

    def sections(self) -> Iterator[rendering.Section]:
        for machine in self.machines:
            rows = self.on(machine)
            devices = counted(len(machine.devices), "device")
            title = f"{machine.name}: {devices} on {counted(machine.hosts, 'host')}"
            if machine.memory is not None:
                title += f", with {human_bytes(machine.memory)} for programs on each"
            yield rendering.Section(title, tuple(_memory(rows)))
            if any(row.program for row in rows):
                yield rendering.Section(f"{machine.name}, in one step", (_work(rows),))
        if any(row.program for row in self.rows):
            cycles = any(row.cycles for row in self.rows)
            quick = any(row.is_quick for row in self.rows)
            ways = dict.fromkeys(row.way for row in self.rows if row.way in _WAYS)
            named = (rendering.ReportEntry(way, _WAYS[way]) for way in ways)
            yield rendering.Section("What the ways are", rendering.aligned(named))
            notes = [*self._batches(), _REST, *[_QUICK] * quick, _MOVED, *[_CYCLES] * cycles]
            entries = (rendering.ReportEntry(*note) for note in notes)
            yield rendering.Section("What the numbers are", rendering.aligned(entries))

    def _batches(self) -> Iterator[tuple[str, str]]:
        """Where the machine has other devices than the call had slices."""
        others = [each for each in self.machines if len(each.devices) != self.slices]
        if not others:
            return
        told = ", ".join(
            f"{len(each.devices) / self.slices:g} times as much on {each.name}" for each in others
        )
        had = counted(self.slices, "slice")
        yield "a batch", f"the call had {had}; each device gets one, which makes {told} in all"

    def _advice(self, machine: Machine) -> str:
        rows = [row for row in self.on(machine) if row.needed is not None]
        if not rows:
            return f"No way gives a program for {machine.name}."
        least = min(rows, key=lambda row: row.needed or 0)
        needs = f"{least.way} needs least, {human_bytes(least.needed or 0)}"
        if machine.memory is None:
            return f"On {machine.name}, {needs}; its limit is unknown."
        fitting = [row for row in rows if row.fits]
        if not fitting:
            return (
                f"It does not fit on {machine.name}: {needs} of {human_bytes(machine.memory)}. Try "
                "more devices, or less for each."
            )
        names = " or ".join(row.way for row in fitting)
        where = "in each way" if len(fitting) == len(self.on(machine)) else f"only as {names}"
        quickest = min(fitting, key=_sent)
        if quickest is least or len(fitting) == 1:
            return f"It fits on {machine.name} {where}; {needs}."
        return f"It fits on {machine.name} {where}; {quickest.way} sends least, {needs}."


def _sent(row: PlannedWay) -> tuple[float, int]:
    """By what a way sends; of those that send as much, by what it needs."""
    return row.program.moved_bytes if row.program else 0.0, row.needed or 0


def _memory(rows: tuple[PlannedWay, ...]) -> Iterator[rendering.Part]:
    """What each way holds on one device; and why there is no program of others."""
    cells = []
    for row in rows:
        if row.needed is None:
            continue
        given = None if row.program is None else row.program.argument_bytes
        rest = None if given is None else row.needed - given
        shown = ("-" if size is None else human_bytes(size) for size in (given, rest, row.needed))
        cells.append((row.way, row.verdict, *shown))
    if cells:
        header = ("way", "on one device", "arguments", "the rest", "peak")
        yield rendering.Table(header, tuple(cells), numbers=3)
    problems = [row for row in rows if row.problem]
    yield from rendering.aligned(rendering.ReportEntry(row.way, row.problem) for row in problems)


def _work(rows: tuple[PlannedWay, ...]) -> rendering.Table:
    """What each way sends, and what compiling it took."""
    programs = [(row, row.program) for row in rows if row.program is not None]
    cells = []
    for row, program in programs:
        cycles = "-" if row.cycles is None else f"{row.cycles / 1e6:.1f} M"
        seconds = f"{row.seconds or 0:.1f} s"
        is_bound = any(each.runs == "in a loop of unknown length" for each in program.collectives)
        moved = f"{'at least ' * is_bound}{human_bytes(program.moved_bytes)}"
        cells.append((row.way, moved, cycles, seconds))
    notes = tuple(_kinds(program) for _, program in programs)
    header = ("way", "moved", "cycles", "compiled in")
    return rendering.Table(header, tuple(cells), numbers=3, notes=notes)


def _kinds(program: ProgramCost) -> str:
    """
    >>> from jax_dist.machines.cost import Collective
    >>> gather = Collective("all-gather", ("i",), 8, 3, 64, 56.0)
    >>> _kinds(ProgramCost((gather, Collective("all-reduce", ("i",), 8, 1, 4, 7.0))))
    '3 all-gather, 1 all-reduce'
    """
    counts: dict[str, int] = {}
    for each in program.collectives:
        counts[each.kind] = counts.get(each.kind, 0) + each.count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


_WAYS = {
    "jax.pmap": "the program as it is",
    "jax_dist.pmap": "the same, a gather replaced by a sum",
    "replicated": "by global_view, a whole copy of the state on each device",
    "fsdp": "by global_view, the state in parts, gathered once in a step",
    "hsdp": "by global_view, in parts over the devices of a host, copied over hosts",
    "fsdp-regather": "in parts, gathered each time that it is read: less memory, more sent",
}
_REST = (
    "the rest",
    "results that take over no donated argument, and what the step works with, at its peak",
)
_QUICK = (
    "peak",
    "of programs that were compiled with the least effort (--quick): an estimate, 13 and 36 % too "
    "high for two trainers that were tried, too low for small programs; what comes near the limit "
    "is compiled in full",
)
_MOVED = (
    "moved",
    "sent over the network by each device in one step, around a ring; what is in a loop of unknown "
    "length counts once, so that it is more",
)
_CYCLES = (
    "cycles",
    "the compiler's own estimate of what it orders its work by, bodies of loops once, waiting for "
    "other devices left out: it compares programs for one machine, and is no time",
)
