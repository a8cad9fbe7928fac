"""Fixes made in files, and shown as diffs.

After each round the new text must parse, and must not have findings that the old one had not.
"""

import dataclasses
import difflib
import os
import re
from collections import Counter
from collections.abc import Sequence

from jax_dist import _codes
from jax_dist.lint.engine.linter import Examiner, load
from jax_dist.lint.model import new_imports, sources
from jax_dist.lint.model.findings import Finding, Safety, choose_fixes
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError

_MOST_ROUNDS = 10
_TEXT_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NO_END = "\\ No newline at end of file\n"
_COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}
_PLAIN = "\x1b[0m"


class _RejectedError(ValueError):
    """Fixes that would break a file; they are not made."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixResult:
    """A file with its fixes made."""

    data: bytes  # what the file shall hold
    findings: tuple[Finding, ...]  # that are left
    made: int = 0  # how many were fixed
    rejected: str = ""  # why some fixes were not made


def fix(path: str, data: bytes, examiner: Examiner, allowed: frozenset[Safety]) -> FixResult:
    """Make fixes that are as safe as allowed, until nothing is left to fix."""
    result = FixResult(data, tuple(examiner.examine(path, data)))
    for _ in range(_MOST_ROUNDS):
        fixable = [each for each in result.findings if each.fix and each.fix.safety in allowed]
        step = _round(path, result, fixable, examiner) if fixable else result
        if step.made == result.made:
            return step
        result = step
    return result


def _round(
    path: str, before: FixResult, fixable: Sequence[Finding], examiner: Examiner
) -> FixResult:
    """Make all fixes together; if that breaks the file, those that do not by themselves."""
    source = load(path, before.data)
    rejected = ""
    for together in (fixable, *([finding] for finding in fixable)):
        try:
            after = _fixed(source, before.findings, together, examiner)
        except _RejectedError as error:
            rejected = rejected or str(error)
        else:
            return dataclasses.replace(after, made=before.made + after.made, rejected=rejected)
    return dataclasses.replace(before, rejected=rejected)


def _fixed(
    source: Source, before: Sequence[Finding], fixable: Sequence[Finding], examiner: Examiner
) -> FixResult:
    """Raise _RejectedError, also where there would be more findings of a code than before."""
    chosen = choose_fixes([finding.fix for finding in fixable if finding.fix])
    try:
        data = source.written(new_imports.placed(Module(source), chosen))
        after = examiner.examine_source(load(source.path, data))
    except (ParseError, SyntaxError, UnreadableError) as error:
        raise _RejectedError(f"Python could not parse the file any more: {error}") from error
    except UnicodeEncodeError as error:
        raise _RejectedError(f"the file's encoding cannot hold it: {error}") from error
    except ValueError as error:
        raise _RejectedError(str(error)) from error
    counts = Counter(finding.code for finding in after)
    counts.subtract(finding.code for finding in before)
    for finding in after:
        if counts[finding.code] > 0:
            where = f"line {finding.start.line}: {finding.message}"
            if finding.code == _codes.SYNTAX_ERROR:
                raise _RejectedError(f"Python could not parse the file any more: {where}")
            raise _RejectedError(f"there would be a new {finding.code} in {where}")
    return FixResult(data, tuple(after), len(chosen))


def diff(
    path: str,
    before: bytes,
    after: bytes,
    encoding: str = "utf-8",
    *,
    new: bool = False,
    colour: bool = False,
) -> str:
    """Return the lines that change, with three around them; empty where nothing does.

    Args:
      path: the file, shown as seen from the current folder, where the patch is applied.
      before: what it holds.
      after: what it shall hold.
      encoding: of both.
      new: the file is not there yet.
      colour: mark what goes and what comes for a terminal.
    """
    inside = os.path.relpath(path)
    shown = path if inside.startswith(os.pardir) else inside
    shown = sources.display(shown.replace(os.sep, "/").lstrip("/"))
    texts = (data.decode(encoding, "surrogateescape") for data in (before, after))
    old_lines, new_lines = map(_TEXT_LINE.findall, texts)
    name = "/dev/null" if new else f"a/{shown}"
    pieces: list[str] = []
    for line in difflib.unified_diff(old_lines, new_lines, name, f"b/{shown}"):
        sign = _COLOURS.get(line[0]) if colour else None
        text = line.removesuffix("\n")
        pieces += (f"{sign}{text}{_PLAIN}\n" if sign else f"{text}\n",)
        pieces += () if line.endswith("\n") else (_NO_END,)
    return "".join(pieces)
