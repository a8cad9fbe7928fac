"""All that one fix changes, for editors and code scanning: its group, its imports, its helpers."""

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence

from jax_dist.checker import edits, parsing, placing
from jax_dist.checker.findings import Edit, Finding, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.parsing import ParseError
from jax_dist.checker.sources import Source

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def repair(finding: Finding, findings: Sequence[Finding], module: Module) -> list[Edit]:
    """The edits that mend one finding, and with it those of its group; none where that cannot be.

    Args:
      finding: with a fix.
      findings: all of the file, for a group is mended as a whole.
      module: the file.
    """
    fix = finding.fix
    if fix is None:
        return []
    fixes = [other.fix for other in findings if other.fix] if fix.group else [fix]
    fixes = [other for other in fixes if other.group == fix.group]
    if any(other.safety is Safety.DISPLAY for other in fixes):
        return []
    return changes(fixes, module)


def changes(fixes: Sequence[Fix], module: Module) -> list[Edit]:
    """What `fixes` change, without those that clash with earlier ones; none if they spoil the file.

    Unlike `placing.placed`, it can be used for a notebook with magics.

    Args:
      fixes: of one file.
      module: the file.
    """
    applied, _ = edits.choose(fixes)
    made = sorted({edit for fix in applied for edit in fix.edits})
    # Magics are no Python, and neither is what they become: seen from here they are not there.
    python = module.source.python
    shown = Source(module.source.path, python, python)
    try:
        edited = edits.apply(python, made, edits.newline_of(python))
        new = placing.placed(Module(shown), applied)
        parsing.parse(new)
    except ParseError:
        return []
    inserted = [
        Edit(_before(edit.start, made, python), _before(edit.end, made, python), edit.text)
        for edit in between(edited, new)
    ]
    return sorted([*made, *inserted])


def between(old: bytes, new: bytes) -> Iterator[Edit]:
    """The lines that differ."""
    before, after = _LINE.findall(old), _LINE.findall(new)
    starts = [0, *itertools.accumulate(map(len, before))]
    # What is alike at both ends is set aside: a matcher needs seconds for a long file.
    head = _alike(before, after)
    tail = _alike(before[head:][::-1], after[head:][::-1])
    before, after = before[head : len(before) - tail], after[head : len(after) - tail]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind != "equal":
            text = b"".join(after[new_first:new_last]).decode()
            yield Edit(starts[head + first], starts[head + last], text)


def _alike(one: Sequence[bytes], two: Sequence[bytes]) -> int:
    """How many lines at the beginning are the same."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(two)))


def _before(offset: int, made: Sequence[Edit], code: bytes) -> int:
    """Where `offset` of the edited text was before the edits were made.

    Within what an edit has put there, it is the end of what was there before.
    """
    moved = 0
    for edit in made:
        start = edit.start + moved
        if offset <= start:
            break
        moved += len(edits.apply(b"", [Edit(0, 0, edit.text)], edits.newline_of(code)))
        moved -= edit.end - edit.start
        if offset < edit.end + moved:
            return edit.end
    return offset - moved
