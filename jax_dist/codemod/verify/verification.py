"""What two runs of a command, before and after a migration, computed. Imports nothing heavy.

Shapes: `N` is the size of the device axis, which `jax.pmap` puts first and a migration may drop;
`*s` is the rest.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

How: TypeAlias = Literal[
    "as is",  # [*s] and [*s]
    "one of equal copies",  # [N, *s], all rows alike, and [*s]
    "device axis merged",  # [N, b, *s] and [N * b, *s]
]
_TAIL_LINES = 12  # of a program's output


class MigrationVerdict(enum.StrEnum):
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
    signatures: tuple[Mapping[str, Any], ...] = ()  # of its programs, as `slices.proof` takes them
    unproved: str = ""  # why its calls have no such signature

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
class MigrationVerification:
    """A command run before and after a migration, and what its mapped functions computed."""

    command: tuple[str, ...]
    verdict: MigrationVerdict
    before: Ending
    after: Ending
    sites: tuple[SiteComparison, ...]
    problems: tuple[str, ...] = ()  # why the verdict is "different", besides those of the sites
    unproven: tuple[str, ...] = ()  # what could not be compared, and why
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether something is not the same."""
        return self.verdict is MigrationVerdict.DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """For machines, in JSON's types; an infinite difference is None."""
        return {
            "command": list(self.command),
            "verdict": str(self.verdict),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "sites": [site.to_dict() for site in self.sites],
            "problems": list(self.problems),
            "unproven": list(self.unproven),
            "notes": list(self.notes),
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def tail(output: str) -> str:
    """The last lines of a program's output."""
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
