"""Puts fixes into a file: those of a group together or not at all, and never two over one byte."""

import ast
import bisect
import re
from collections.abc import Iterable, Sequence

from jax_dist.checker.model.findings import Edit, Fix
from jax_dist.checker.model.semantic_model import Module


def choose(fixes: Iterable[Fix]) -> tuple[list[Fix], list[Fix]]:
    """`(applied, left)`: in order of place; a group with one fix that cannot be is left whole."""
    fixes = sorted(fixes, key=lambda fix: fix.edits[0] if fix.edits else Edit(0, 0, ""))
    groups: dict[str, list[Fix]] = {}
    for number, fix in enumerate(fixes):
        groups.setdefault(fix.group or f"alone {number}", []).append(fix)
    taken = _Taken()
    applied: list[Fix] = []
    left: list[Fix] = []
    for group in groups.values():
        wanted = list(dict.fromkeys(edit for fix in group for edit in fix.edits))
        if all(map(taken.has_room_for, wanted)) and not _clash_within(wanted):
            taken.add(wanted)
            applied += group
        else:
            left += group
    return applied, left


def apply(code: bytes, edits: Iterable[Edit], newline: str = "\n") -> bytes:
    """The code with all `edits` made; they must not overlap."""
    pieces: list[bytes] = []
    at = 0
    for edit in sorted(set(edits)):
        if edit.start < at:
            raise ValueError(f"edits overlap at byte {edit.start}")
        text = edit.text if newline == "\n" else re.sub(r"\r?\n", newline, edit.text)
        pieces += (code[at : edit.start], text.encode())
        at = edit.end
    return b"".join((*pieces, code[at:]))


def indentation_of(text: str) -> str:
    """One step of indentation, as most lines of a file show it.

    >>> indentation_of("if a:\\n  b = 1\\n")
    '  '
    """
    depths = [len(found[1]) for found in re.finditer(r"(?m)^( +)\S", text)]
    if not depths and re.search(r"(?m)^\t", text):
        return "\t"
    return "  " if sum(depth % 4 == 2 for depth in depths) * 5 > len(depths) else "    "


def newline_of(code: bytes) -> str:
    """How the file ends its lines; the first one decides."""
    match = re.search(rb"\r\n|\r|\n", code)
    return match[0].decode() if match else "\n"


class _Taken:
    """Edits that do not clash, in order."""

    def __init__(self) -> None:
        self._edits: list[Edit] = []

    def has_room_for(self, edit: Edit) -> bool:
        """Whether an edit is one of them, or clashes with none."""
        place = bisect.bisect_left(self._edits, edit)
        around = self._edits[max(place - 1, 0) : place + 1]
        return edit in around or not any(_clash(edit, other) for other in around)

    def add(self, edits: Iterable[Edit]) -> None:
        for edit in edits:
            place = bisect.bisect_left(self._edits, edit)
            if self._edits[place : place + 1] != [edit]:
                self._edits.insert(place, edit)


def _clash_within(edits: Sequence[Edit]) -> bool:
    ordered = sorted(edits)
    return any(_clash(one, two) for one, two in zip(ordered, ordered[1:], strict=False))


def _clash(one: Edit, two: Edit) -> bool:
    """Two insertions at one place clash too: their order would be a guess."""
    if one.start == two.start:
        return True
    first, second = (one, two) if one.start < two.start else (two, one)
    return first.end > second.start


def removal(module: Module, statement: ast.stmt) -> Edit:
    """The statement goes with its line; `pass` stands for it where its block would be empty."""
    start, end = module.span(statement)
    block = getattr(module.parent(statement), "body", [])
    if len(block) == 1 or statement not in block:
        return Edit(start, end, "pass")
    code = module.source.code
    line = code.rfind(b"\n", 0, start) + 1
    after = code.find(b"\n", end)
    rest = code[end : after if after >= 0 else None]
    if code[line:start].strip() or rest.strip():
        return Edit(start, end, "pass")  # the line holds more
    return Edit(line, after + 1 if after >= 0 else len(code), "")
