"""What a rule says of a file: findings, their fixes, and the edits that a fix is made of.

All offsets count bytes of the UTF-8 text that is parsed (`Source.code`), as `ast` does.
"""

import dataclasses
import enum
from typing import TypeAlias

Code: TypeAlias = str  # such as "JXD001"


class Safety(enum.StrEnum):
    """How much a fix may be trusted."""

    SAFE = "safe"  # same values and shapes, in one process and in many
    UNSAFE = "unsafe"  # meant to be right; a person should look
    DISPLAY = "display-only"  # a sketch; never written


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Puts `text` in the place of the bytes `[start, end)`."""

    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fix:
    """Edits that belong together, and what they need at the top of the file.

    Fixes of one `group` are applied together or not at all.
    """

    title: str  # what it does, in a few words: "use jax.lax.axis_size"
    safety: Safety
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()  # statements, such as "import jax"
    group: str = ""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place as people count it: lines and columns (in characters) from 1; cells from 1."""

    line: int  # of the cell, in a notebook
    column: int
    cell: int | None = None  # None: not a notebook


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found at one place."""

    path: str  # as the user gave it
    code: Code
    name: str  # of the rule
    message: str  # one sentence, without the path
    start: Position
    end: Position
    span: tuple[int, int]  # bytes [start, end) of the code
    line_text: str  # the first line that it covers, without its end
    fix: Fix | None = None

    @property
    def sort_key(self) -> tuple[str, int, Code]:
        return (self.path, self.span[0], self.code)
