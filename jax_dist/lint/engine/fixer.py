"""Mends files: makes the fixes of their findings, and makes sure that they do no harm.

After each round the new text must parse, and must not have findings that the old one had not.
The same fixes are shown as diffs.
"""

import dataclasses
import difflib
import os
import re
from collections import Counter
from collections.abc import Sequence

from jax_dist.lint.engine.linter import Examiner, load
from jax_dist.lint.model import new_imports
from jax_dist.lint.model.findings import (
    Finding,
    Safety,
    choose_fixes,
)
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError
from jax_dist.lint.rules import linter_findings

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

    `new`: the file is not there yet.
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
    """Makes fixes that are as safe as allowed, until nothing is left to be mended."""
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
