"""Fixes made in files, and shown as diffs.

After each round the new text must parse, and must not have findings that the old one did not.
"""

import dataclasses
import difflib
import os
import re
from collections import Counter
from collections.abc import Sequence

from jax_dist.errors import display_path
from jax_dist.lint import new_imports
from jax_dist.lint.engine.linter import Examiner, load
from jax_dist.lint.findings import Finding, Fix, Safety, choose_fixes
from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Source

_MOST_ROUNDS = 10
_TEXT_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NO_END = "\\ No newline at end of file\n"
_COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}
_PLAIN = "\x1b[0m"


@dataclasses.dataclass(frozen=True, slots=True)
class FixResult:
    """A file with its fixes made."""

    data: bytes  # the new contents of the file; nothing is written yet
    findings: tuple[Finding, ...]  # those that remain
    made: int = 0  # the number of fixes made
    rejected: str = ""  # why the fixes of the last round were not made


def fix(path: str, data: bytes, examiner: Examiner, allowed: frozenset[Safety]) -> FixResult:
    """Return a file with its fixes made, in rounds, until there is nothing left to fix.

    Only fixes whose safety is in `allowed` are made. All that do not clash are made together; if
    that breaks the file, none of that round is.
    """
    result = FixResult(data, tuple(examiner.examine(path, data)))
    for _ in range(_MOST_ROUNDS):
        fixes = filter(None, (finding.fix for finding in result.findings))
        chosen = choose_fixes(fix for fix in fixes if fix.safety in allowed)
        if not chosen:
            break
        try:
            data, findings = _apply(load(path, result.data), result.findings, chosen, examiner)
        except (ValueError, SyntaxError) as error:  # also of encodings, notebooks and the parser
            return dataclasses.replace(result, rejected=str(error))
        result = FixResult(data, tuple(findings), result.made + len(chosen))
    return result


def _apply(
    source: Source, before: Sequence[Finding], chosen: Sequence[Fix], examiner: Examiner
) -> tuple[bytes, list[Finding]]:
    """Return the file with fixes made, and its findings then; raise ValueError if one is new."""
    data = source.written(new_imports.place_imports(Module(source), chosen))
    after = examiner.examine_source(load(source.path, data))
    # By code: how many findings more than before; a place may move, so they are only counted.
    counts = Counter(finding.code for finding in after)
    counts.subtract(finding.code for finding in before)
    for finding in after:
        if counts[finding.code] > 0:
            where = f"line {finding.start.line}: {finding.message}"
            raise ValueError(f"there would be a new {finding.code} in {where}")
    return data, after


def diff(
    path: str,
    before: bytes,
    after: bytes,
    encoding: str = "utf-8",
    *,
    new: bool = False,
    color: bool = False,
) -> str:
    """Return a unified diff of a file relative to the current folder; "" for no change."""
    shown_path = sources.display(display_path(path).replace(os.sep, "/").lstrip("/"))
    texts = (data.decode(encoding, "surrogateescape") for data in (before, after))
    old_lines, new_lines = map(_TEXT_LINE.findall, texts)
    old_path = "/dev/null" if new else f"a/{shown_path}"
    pieces: list[str] = []
    for line in difflib.unified_diff(old_lines, new_lines, old_path, f"b/{shown_path}"):
        paint = _COLOURS.get(line[0]) if color else None
        text = line.removesuffix("\n")
        pieces.append(f"{paint}{text}{_PLAIN}\n" if paint else f"{text}\n")
        if not line.endswith("\n"):
            pieces.append(_NO_END)
    return "".join(pieces)
