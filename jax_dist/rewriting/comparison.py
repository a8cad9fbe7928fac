"""The same function written in several ways, by what each moves and what each device holds."""

import dataclasses
from typing import TYPE_CHECKING

from jax_dist.passes.findings import human_bytes
from jax_dist.rewriting import rendering
from jax_dist.rewriting.cost import ProgramCost
from jax_dist.rewriting.rendering import counted

if TYPE_CHECKING:
    from jax_dist.global_views.report import GlobalViewReport


@dataclasses.dataclass(frozen=True, slots=True)
class Sharded:
    """A step whose state is cut over the devices, as `jax_dist.global_view` runs it."""

    state: "GlobalViewReport"  # what was found of each leaf
    program: ProgramCost


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Ways to write one function, and the program that each becomes."""

    name: str  # of the function
    # Each way with its program, or with the reason why there is none. Of equal ones, the last is
    # the simplest.
    rows: tuple[tuple[str, ProgramCost | str], ...]
    sharded: Sharded | None = None  # the row "global view": it takes and gives other arrays

    @property
    def best(self) -> str | None:
        """The way to take: the one that moves least, and of equal ones the simplest.

        The global view is not among them: it saves memory, and its arguments are other arrays.
        """
        ways = self._moved()
        return min(reversed(ways), key=ways.__getitem__) if ways else None

    @property
    def advice(self) -> str:
        """Which way to take, in a sentence, and why."""
        ways = self._moved()
        if self.best is None:
            return "Take none of them: none compiles."
        least = ways[self.best]
        equal = [way for way, moved in ways.items() if moved == least and way != self.best]
        worse = [f"{human_bytes(moved)} with {way}" for way, moved in ways.items() if moved > least]
        against = f", against {' and '.join(worse)}" if worse else ""
        simpler = f" It moves as much as {' and '.join(equal)}, and is simpler." if equal else ""
        take = f"Take {self.best}: {human_bytes(least)} moved per step{against}.{simpler}"
        return f"{take} {self._memory_advice()}" if self.sharded else take

    def _memory_advice(self) -> str:
        assert self.sharded is not None
        state, moved = self.sharded.state, self.sharded.program.moved_bytes
        return (
            "If memory is short, shard the state with jax_dist.global_view(..., shardings='fsdp'): "
            f"a device then keeps {human_bytes(state.bytes_per_device)} of it instead of "
            f"{human_bytes(state.bytes_under_pmap)}, and {human_bytes(moved)} are moved per step."
        )

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "rows": [_row(way, outcome) for way, outcome in self.rows],
            "best": self.best,
            "advice": self.advice,
            "state": self.sharded.state.as_json() if self.sharded else None,
        }

    def sections(self) -> tuple[rendering.Section, ...]:
        """What both printed forms show below the advice."""
        programs = [
            (way, program) for way, program in self.rows if isinstance(program, ProgramCost)
        ]
        failed = [
            rendering.ReportEntry(way, each) for way, each in self.rows if isinstance(each, str)
        ]
        bars = [(way, each.moved_bytes, human_bytes(each.moved_bytes)) for way, each in programs]
        sections = []
        if programs:
            header = ("", "collectives", "moved", "arguments", "temporary")
            table = rendering.Table(header, tuple(_cells(*pair) for pair in programs), numbers=4)
            sections.append(rendering.Section("Each way, per step on one device", (table,)))
        if any(amount for _, amount, _ in bars):
            moved = rendering.Bars(tuple(bars))
            sections.append(rendering.Section("Moved, per step from one device", (moved,)))
        if self.sharded:
            sections += self._sharded_sections(programs, self.sharded.state)
        if failed:
            sections.append(rendering.Section("Does not compile", rendering.aligned(failed)))
        return tuple(sections)

    def _sharded_sections(
        self, programs: list[tuple[str, ProgramCost]], state: "GlobalViewReport"
    ) -> list[rendering.Section]:
        peaks = [(way, _peak(program)) for way, program in programs]
        bars = [(way, peak, human_bytes(peak)) for way, peak in peaks if peak is not None]
        header = ("leaf", "found", "kept as", "bytes on each")
        cells = tuple((path, *others) for path, _, *others in state.rows())
        rows = rendering.Table(header, cells, numbers=1)
        return [
            rendering.Section("Memory at the peak, on one device", (rendering.Bars(tuple(bars)),)),
            rendering.Section("State in the global view", (rows,)),
        ][not bars :]

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        return rendering.as_text(self._headline(), self.sections())

    def _repr_html_(self) -> str:
        return rendering.as_html(self._headline(), self.sections())

    def _headline(self) -> str:
        return f"{self.name}, {counted(len(self.rows), 'way')} to write it. {self.advice}"

    def _moved(self) -> dict[str, int]:
        """In whole bytes, so that ways which differ by rounding are equal."""
        programs = [(way, each) for way, each in self.rows if isinstance(each, ProgramCost)]
        if self.sharded:
            programs = [(way, each) for way, each in programs if each is not self.sharded.program]
        return {way: round(program.moved_bytes) for way, program in programs}


def _row(way: str, outcome: ProgramCost | str) -> dict[str, object]:
    if isinstance(outcome, str):
        return {"way": way, "moved_bytes": None, "program": None, "failed": outcome}
    return {
        "way": way,
        "moved_bytes": outcome.moved_bytes,
        "program": rendering.plain(outcome),
        "failed": None,
    }


def _cells(way: str, program: ProgramCost) -> tuple[str, ...]:
    count = sum(each.count for each in program.collectives)
    memory = [
        "unknown" if size is None else human_bytes(size)
        for size in (program.argument_bytes, program.temp_bytes)
    ]
    return way, str(count), human_bytes(program.moved_bytes), *memory


def _peak(program: ProgramCost) -> int | None:
    """Arguments and temporary memory: what lives while the step runs."""
    if program.argument_bytes is None or program.temp_bytes is None:
        return None
    return program.argument_bytes + program.temp_bytes
