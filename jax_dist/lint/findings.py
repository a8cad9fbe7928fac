"""Findings of the rules, their fixes, and the edits of bytes that a fix consists of.

All offsets count bytes of the UTF-8 text that is parsed (`Source.code`), as `ast` does.
"""

import bisect
import dataclasses
import enum
import itertools
import re
from collections.abc import Iterable
from typing import TypeAlias

Code: TypeAlias = str  # such as "JXD001"


class Safety(enum.StrEnum):
    """Degree to which a fix may be trusted."""

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
    """Edits that are made together or not at all."""

    title: str  # what it does, in a few words: "use jax.lax.axis_size"
    safety: Safety
    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()  # statements, such as "import jax"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Position:
    """A line, a column (in characters) and a notebook's cell, all counted from 1."""

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
    def safety(self) -> Safety | None:
        """Return the safety of its fix; None if there is no fix."""
        return self.fix.safety if self.fix else None


def choose_fixes(fixes: Iterable[Fix]) -> list[Fix]:
    """Return the fixes, in order of place, but for those that clash with one before them."""
    taken: list[Edit] = []  # all edits of the chosen fixes, sorted
    chosen: list[Fix] = []
    for fix in sorted(fixes, key=lambda fix: fix.edits[:1]):
        edits = sorted(set(fix.edits))
        if not _clash(edits) and all(_fits(edit, taken) for edit in edits):
            for edit in edits:  # not sorted anew: a file may have thousands of fixes
                bisect.insort(taken, edit)
            chosen.append(fix)
    return chosen


def _fits(edit: Edit, taken: list[Edit]) -> bool:
    """Return whether `taken`, sorted, has an edit already, or none that clashes with it."""
    index = bisect.bisect_left(taken, edit)
    before, after = taken[max(index - 1, 0) : index], taken[index : index + 1]
    return after == [edit] or not _clash([*before, edit, *after])


def _clash(edits: list[Edit]) -> bool:
    """Return whether of sorted edits two overlap, or begin at one byte: no order is right then."""
    pairs = itertools.pairwise(edits)
    return any(first.start == second.start or first.end > second.start for first, second in pairs)


def apply_edits(code: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the code with all `edits` made, which must not overlap; new lines end as the first."""
    first_line_end = re.search(rb"\r\n|\r|\n", code)
    newline = first_line_end[0].decode() if first_line_end else "\n"
    pieces: list[bytes] = []
    end = 0  # of the edit before
    for edit in sorted(set(edits)):
        if edit.start < end:
            raise ValueError(f"edits overlap at byte {edit.start}")
        text = edit.text if newline == "\n" else re.sub(r"\r?\n", newline, edit.text)
        pieces += (code[end : edit.start], text.encode())
        end = edit.end
    return b"".join((*pieces, code[end:]))
