"""Mends files: makes the fixes of their findings, and makes sure that they do no harm.

After each round the new text must parse, and must not have findings that the old one had not.
The same fixes are shown as diffs, and to editors.
"""

import dataclasses
import difflib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from jax_dist.checker.engine.linter import Examiner, load
from jax_dist.checker.model import new_imports, sources
from jax_dist.checker.model.findings import (
    Edit,
    Finding,
    Fix,
    Safety,
    apply_edits,
    choose_fixes,
    newline_of,
)
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.sources import ParseError, Source, UnreadableError
from jax_dist.checker.rules import linter_findings

_TEXT_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NO_END = "\\ No newline at end of file\n"
_COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}
_PLAIN = "\x1b[0m"


def diff(
    path: str,
    before: bytes,
    after: bytes,
    encoding: str = "utf-8",
    *,
    new: bool = False,
    colour: bool = False,
) -> str:
    """The lines that change, with three around them; empty where nothing does.

    Args:
      path: of the file.
      before: what it holds.
      after: what it would hold.
      encoding: of both.
      new: it is not there yet.
      colour: in a terminal's colours.
    """
    # As seen from the current folder, where the patch is applied.
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    shown = path if inside.startswith(os.pardir) else inside
    shown = shown.replace(os.sep, "/").lstrip("/")
    lines = difflib.unified_diff(
        _lines(before, encoding),
        _lines(after, encoding),
        "/dev/null" if new else f"a/{shown}",
        f"b/{shown}",
        lineterm="\n",
    )
    text = "".join(line if line.endswith("\n") else f"{line}\n{_NO_END}" for line in lines)
    return _coloured(text) if colour else text


def _coloured(text: str) -> str:
    return "".join(
        f"{_COLOURS[line[0]]}{line.removesuffix(chr(10))}{_PLAIN}\n"
        if line[0] in _COLOURS
        else line
        for line in _TEXT_LINE.findall(text)
    )


def _lines(data: bytes, encoding: str) -> list[str]:
    """Lines end at "\\n" only, as they do for `patch`; a "\\r" before it is part of the line."""
    return _TEXT_LINE.findall(data.decode(encoding, "surrogateescape"))


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
    fixes = [fix]
    if fix.group:
        fixes = [each.fix for each in findings if each.fix and each.fix.group == fix.group]
    if any(other.safety is Safety.DISPLAY for other in fixes):
        return []
    return changes(fixes, module)


def changes(fixes: Sequence[Fix], module: Module) -> list[Edit]:
    """What `fixes` change, without those that clash with earlier ones; none if they spoil the file.

    Unlike `new_imports.placed`, it can be used for a notebook with magics.

    Args:
      fixes: of one file.
      module: the file.
    """
    applied = choose_fixes(fixes)
    made = sorted({edit for fix in applied for edit in fix.edits})
    # Magics are no Python, and neither is what they become: seen from here they are not there.
    python = module.source.python
    shown = Source(module.source.path, python, python)
    try:
        edited = apply_edits(python, made, newline_of(python))
        new = new_imports.placed(Module(shown), applied)
        sources.parse(new)
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
        moved += len(apply_edits(b"", [Edit(0, 0, edit.text)], newline_of(code)))
        moved -= edit.end - edit.start
        if offset < edit.end + moved:
            return edit.end
    return offset - moved


_MOST_ROUNDS = 10

# A comment that a fix has made needless is no harm: the next round removes it.
_HARMLESS = frozenset({linter_findings.UNUSED.code})


class _HarmError(ValueError):
    """Fixes that would break a file; they are not made."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Mended:
    """A file with its fixes made."""

    data: bytes  # what the file shall hold
    findings: tuple[Finding, ...]  # that are left
    made: tuple[Finding, ...]  # whose fixes were made, in the order in which they were
    refused: str = ""  # why some fixes were not made


def mended(path: str, data: bytes, examiner: Examiner, allowed: frozenset[Safety]) -> _Mended:
    """Makes fixes until nothing is left to be mended.

    Args:
      path: the file.
      data: what it holds.
      examiner: what to look for.
      allowed: how safe a fix must be.
    """
    findings = examiner.examined(path, data)
    made: list[Finding] = []
    refused = ""
    for _ in range(_MOST_ROUNDS):
        able = [each for each in findings if each.fix and each.fix.safety in allowed]
        if not able:
            break
        step = _round(path, data, findings, able, examiner)
        refused = step.refused
        if not step.made:
            break
        data, findings = step.data, list(step.findings)
        made += step.made
    return _Mended(data, tuple(findings), tuple(made), refused)


def _round(
    path: str,
    data: bytes,
    findings: Sequence[Finding],
    able: Sequence[Finding],
    examiner: Examiner,
) -> _Mended:
    """All fixes together; if that does harm, those that do none by themselves."""
    source = load(path, data)
    harm = ""
    groups: dict[object, list[Finding]] = {}
    for number, finding in enumerate(able):
        groups.setdefault((finding.fix and finding.fix.group) or number, []).append(finding)
    for together in (able, *groups.values()):
        try:
            return dataclasses.replace(_made(source, findings, together, examiner), refused=harm)
        except _HarmError as error:
            harm = harm or str(error)
    return _Mended(data, tuple(findings), (), harm)


def _made(
    source: Source, findings: Sequence[Finding], able: Sequence[Finding], examiner: Examiner
) -> _Mended:
    """Raises _HarmError, also where there would be more findings of a code than before."""
    fixes = [finding.fix for finding in able if finding.fix]
    applied = choose_fixes(fixes)
    try:
        data = source.written(new_imports.placed(Module(source), applied))
    except (ParseError, SyntaxError) as error:
        raise _HarmError(f"Python could not parse the file any more: {error}") from error
    except UnicodeEncodeError as error:
        raise _HarmError(f"the file's encoding cannot hold it: {error}") from error
    except ValueError as error:
        raise _HarmError(str(error)) from error
    try:
        after = examiner.of_source(load(source.path, data))
    except UnreadableError as error:
        raise _HarmError(f"the file could not be read any more: {error}") from error
    counts = Counter(finding.code for finding in after)
    counts.subtract(finding.code for finding in findings)
    for finding in after:
        if counts[finding.code] > 0 and finding.code not in _HARMLESS:
            said = f"line {finding.start.line}: {finding.message}"
            if finding.code == linter_findings.SYNTAX_ERROR.code:
                raise _HarmError(f"Python could not parse the file any more: {said}")
            raise _HarmError(f"there would be a new {finding.code} in {said}")
    taken = Counter(applied)
    made: list[Finding] = []
    for finding in able:
        if finding.fix and taken[finding.fix]:
            taken[finding.fix] -= 1
            made.append(finding)
    return _Mended(data, tuple(after), tuple(made))
