"""The same function written in several ways, side by side by what each moves between devices."""

import dataclasses

from jax_dist.passes.units import human_bytes
from jax_dist.rewriting import rendering
from jax_dist.rewriting.cost import Program
from jax_dist.rewriting.rendering import counted


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Ways to write one function, and the program that each becomes."""

    name: str  # of the function
    # Each way with its program, or with the reason why there is none. The later a way, the less of
    # the communication its user writes: of equal ones, the last is the simplest.
    rows: tuple[tuple[str, Program | str], ...]

    @property
    def best(self) -> str | None:
        """The way to take: the one that moves least, and of equal ones the simplest."""
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
        return f"Take {self.best}: {human_bytes(least)} moved per step{against}.{simpler}"

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "rows": [_row(way, outcome) for way, outcome in self.rows],
            "best": self.best,
            "advice": self.advice,
        }

    def sections(self) -> tuple[rendering.Section, ...]:
        """What both printed forms show below the advice."""
        programs = [(way, program) for way, program in self.rows if isinstance(program, Program)]
        failed = [rendering.Entry(way, each) for way, each in self.rows if isinstance(each, str)]
        bars = [(way, each.moved_bytes, human_bytes(each.moved_bytes)) for way, each in programs]
        sections = []
        if programs:
            header = ("", "collectives", "moved", "temporary")
            table = rendering.Table(header, tuple(_cells(*pair) for pair in programs), numbers=3)
            sections.append(rendering.Section("Each way, per step on one device", (table,)))
        if any(amount for _, amount, _ in bars):
            moved = rendering.Bars(tuple(bars))
            sections.append(rendering.Section("Moved, per step from one device", (moved,)))
        if failed:
            sections.append(rendering.Section("Does not compile", rendering.aligned(failed)))
        return tuple(sections)

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
        programs = [(way, each) for way, each in self.rows if isinstance(each, Program)]
        return {way: round(program.moved_bytes) for way, program in programs}


def _row(way: str, outcome: Program | str) -> dict[str, object]:
    if isinstance(outcome, str):
        return {"way": way, "moved_bytes": None, "program": None, "failed": outcome}
    return {
        "way": way,
        "moved_bytes": outcome.moved_bytes,
        "program": rendering.plain(outcome),
        "failed": None,
    }


def _cells(way: str, program: Program) -> tuple[str, ...]:
    count = sum(each.count for each in program.collectives)
    temporary = "unknown" if program.temp_bytes is None else human_bytes(program.temp_bytes)
    return way, str(count), human_bytes(program.moved_bytes), temporary
