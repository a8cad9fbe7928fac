"""What `--verify` found: data, and the table that people read. Imports nothing heavy.

Shapes: `N` is the size of the device axis, which `jax.pmap` puts first and a migration may drop;
`*s` is the rest.
"""

import enum
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

How: TypeAlias = Literal[
    "as is",  # [*s] and [*s]
    "one of equal copies",  # [N, *s], all rows alike, and [*s]
    "device axis merged",  # [N, b, *s] and [N * b, *s]
]
_TAIL_LINES = 12  # of a program's output


class Verdict(enum.StrEnum):
    """What the two runs say of the migration."""

    SAME = "same"  # all that was mapped was called, and is equal, on as many devices
    DIFFERENT = "different"
    UNPROVEN = "unproven"  # nothing differs, but not all could be compared


@dataclass(frozen=True, slots=True)
class SiteComparison:
    """One mapped function before and after."""

    file: str
    line: int  # before
    function: str
    calls_before: int
    calls_after: int
    compared: int  # calls whose arrays were compared
    devices_before: int  # the fewest that hold a result
    devices_after: int
    absolute: float  # the largest difference between two results
    relative: float  # the same, relative to the largest value of its array
    how: tuple[How, ...]  # results were compared
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "calls_before": self.calls_before,
            "calls_after": self.calls_after,
            "compared": self.compared,
            "devices_before": self.devices_before,
            "devices_after": self.devices_after,
            "largest_absolute_difference": _finite(self.absolute),
            "largest_relative_difference": _finite(self.relative),
            "how": list(self.how),
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Ending:
    """How one run of the command ended."""

    exit_code: int | None  # negative: the signal that ended it; None: it ran out of time
    functions: int  # mapped functions that were called
    calls: int  # of these
    devices: int  # the fewest that hold a result of a mapped function
    output: str  # the last lines

    def __str__(self) -> str:
        if self.exit_code is None:
            return "no end in time"
        if self.exit_code < 0:
            return f"signal {-self.exit_code}"
        return f"exit {self.exit_code}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "functions": self.functions,
            "calls": self.calls,
            "devices": self.devices,
            "output": self.output,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """A command run before and after a migration, and what its mapped functions computed."""

    command: tuple[str, ...]
    verdict: Verdict
    rolled_back: bool  # the files are as they were
    before: Ending
    after: Ending
    sites: tuple[SiteComparison, ...]
    problems: tuple[str, ...] = ()  # why the verdict is "different", besides those of the sites
    unproven: tuple[str, ...] = ()  # what could not be compared, and why
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether all that was mapped is the same."""
        return self.verdict is Verdict.SAME

    @property
    def differs(self) -> bool:
        """Whether something is not the same."""
        return self.verdict is Verdict.DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """For machines, in JSON's types; an infinite difference is None."""
        return {
            "command": list(self.command),
            "verdict": str(self.verdict),
            "rolled_back": self.rolled_back,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "sites": [site.to_dict() for site in self.sites],
            "problems": list(self.problems),
            "unproven": list(self.unproven),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_SENTENCES = {
    Verdict.SAME: "The same before and after the migration.",
    Verdict.DIFFERENT: "Not the same before and after the migration.",
    Verdict.UNPROVEN: "Nothing differs, but not all could be compared.",
}


def _lines(verification: Verification) -> Iterator[str]:
    yield _SENTENCES[verification.verdict] + _what_became_of_the_files(verification)
    yield f"  command: {shlex.join(verification.command)}"
    for name, ending in (("before", verification.before), ("after", verification.after)):
        called = f"{_count(ending.functions, 'mapped function')}, {_count(ending.calls, 'call')}"
        where = f", results on {_count(ending.devices, 'device')}" if ending.devices else ""
        yield f"  {name + ':':<8} {ending}, {called}{where}"
    if verification.sites:
        yield ""
        yield from _table(verification.sites)
    for title, texts in (
        ("Different:", verification.problems),
        ("Not proven:", verification.unproven),
        ("Also:", verification.notes),
    ):
        if texts:
            yield ""
            yield title
            yield from (f"  * {text}" for text in texts)
    if verification.after.exit_code != 0:
        yield ""
        yield "The output after the migration ended with:"
        yield from (f"    {line}" for line in verification.after.output.splitlines())


def _what_became_of_the_files(verification: Verification) -> str:
    if verification.rolled_back:
        return " The files are as they were."
    return "" if verification.proven else " The files are migrated."


def _table(sites: tuple[SiteComparison, ...]) -> Iterator[str]:
    rows = [("mapped function", "calls compared", "devices", "difference", "how")]
    rows += [_row(site) for site in sites]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, site in zip(rows, (None, *sites), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
        if site is not None:
            yield from (f"      different: {problem}" for problem in site.problems)
            yield from (f"      {note}" for note in site.notes)


def _row(site: SiteComparison) -> tuple[str, ...]:
    return (
        f"{site.file}:{site.line} {site.function}",
        f"{site.compared} of {site.calls_before}",
        f"{site.devices_before} -> {site.devices_after}",
        f"{site.absolute:.3g}" if site.compared else "-",
        ", ".join(site.how) or "-",
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tail(output: str) -> str:
    """The last lines of a program's output."""
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
