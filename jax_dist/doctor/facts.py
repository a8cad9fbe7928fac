"""What the doctor sees of a machine, and what it says of it. The checks lie between the two."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Probed:
    """What the probe found, stage by stage, and how it ended."""

    stages: Mapping[str, Mapping[str, Any]]
    failed: str | None = None  # the stage that did not come to its end
    hung: bool = False  # it was stopped
    words: str = ""  # its last line, where it failed by itself


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The environment, what the probe found, and what the machine has."""

    environment: Mapping[str, str]
    probed: Probed
    accelerators: tuple[str, ...]  # such as "NVIDIA GPU": seen by the system, not by JAX

    def stage(self, name: str) -> Mapping[str, Any]:
        """What one stage found; empty where the probe did not come so far."""
        return self.probed.stages.get(name, {})

    @property
    def jax(self) -> Version | None:
        """The version of jax; None where it is not installed."""
        text = self.stage("versions").get("jax")
        return None if text is None else version(text)

    @property
    def python(self) -> Version:
        return version(self.stage("versions").get("python", ""))

    @property
    def devices(self) -> int:
        """How many JAX sees in one process; 0 where it saw none."""
        return self.stage("devices").get("count", 0)


def version(text: str) -> Version:
    """`"0.12.0.1"` as `(0, 12, 0, 1)`, to compare; what follows the numbers is left out."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


class Weight(enum.StrEnum):
    """How bad a finding is."""

    HARM = "harm"  # wrong numbers, no start, or work that is lost: the exit code tells it
    NOTE = "note"  # good to know


@dataclasses.dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that is wrong here, or good to know."""

    weight: Weight
    name: str  # such as "unknown-option"; scripts look for it
    what: str
    do: str  # one line
    rule: str = ""  # of the checker, such as "JXD002", which finds it in code

    def __str__(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"{self.weight}: {self.what}{rule}\n  help: {self.do}"


def harm(name: str, what: str, do: str, rule: str = "") -> DoctorFinding:
    return DoctorFinding(Weight.HARM, name, what, do, rule)


def note(name: str, what: str, do: str, rule: str = "") -> DoctorFinding:
    return DoctorFinding(Weight.NOTE, name, what, do, rule)
