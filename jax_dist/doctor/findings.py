"""What the doctor says: one thing, how bad it is, and one line of advice."""

import dataclasses
import enum


class Weight(enum.StrEnum):
    """How bad a finding is."""

    HARM = "harm"  # wrong numbers, no start, or work that is lost: the exit code tells it
    NOTE = "note"  # good to know


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong here, or good to know."""

    weight: Weight
    name: str  # such as "unknown-option"; scripts look for it
    what: str
    do: str  # one line
    rule: str = ""  # of the checker, such as "JXD002", which finds it in code

    def __str__(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"{self.weight}: {self.what}{rule}\n  help: {self.do}"


def harm(name: str, what: str, do: str, rule: str = "") -> Finding:
    return Finding(Weight.HARM, name, what, do, rule)


def note(name: str, what: str, do: str, rule: str = "") -> Finding:
    return Finding(Weight.NOTE, name, what, do, rule)
