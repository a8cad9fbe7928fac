"""Mends a file: makes the fixes of its findings, and makes sure that they do no harm.

After each round the new text must parse, and must not have findings that the old one had not.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jax_dist.checker import edits, modules, parsing, placing
from jax_dist.checker.examining import Examiner, load
from jax_dist.checker.findings import Code, Finding, Fix, Safety
from jax_dist.checker.rules import syntax_error, unused_suppression
from jax_dist.checker.sources import Source, UnreadableError

_MOST_ROUNDS = 10

# A comment that a fix has made needless is no harm: the next round removes it.
_HARMLESS = frozenset({unused_suppression.PAGE.code})


class HarmError(ValueError):
    """Fixes that would break a file; they are not made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mended:
    """A file with its fixes made."""

    data: bytes  # what the file shall hold
    findings: tuple[Finding, ...]  # that are left
    made: tuple[Finding, ...]  # whose fixes were made, in the order in which they were
    refused: str = ""  # why some fixes were not made


def mended(path: str, data: bytes, examiner: Examiner, allowed: frozenset[Safety]) -> Mended:
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
        able = [finding for finding in findings if _can_mend(finding, allowed)]
        if not able:
            break
        step = _round(path, data, findings, able, examiner)
        refused = step.refused
        if not step.made:
            break
        data, findings = step.data, list(step.findings)
        made += step.made
    return Mended(data, tuple(findings), tuple(made), refused)


def _can_mend(finding: Finding, allowed: frozenset[Safety]) -> bool:
    return finding.fix is not None and finding.fix.safety in allowed


def _round(
    path: str,
    data: bytes,
    findings: Sequence[Finding],
    able: Sequence[Finding],
    examiner: Examiner,
) -> Mended:
    """All fixes together; if that does harm, those that do none by themselves."""
    source = load(path, data)
    try:
        return _made(source, findings, able, examiner)
    except HarmError as error:
        harm = str(error)
    step = Mended(data, tuple(findings), ())
    for group in _groups(able):
        try:
            return dataclasses.replace(_made(source, findings, group, examiner), refused=harm)
        except HarmError:
            continue
    return dataclasses.replace(step, refused=harm)


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    groups: dict[object, list[Finding]] = {}
    for number, finding in enumerate(findings):
        name = finding.fix.group if finding.fix else ""
        groups.setdefault(name or number, []).append(finding)
    return list(groups.values())


def _made(
    source: Source, findings: Sequence[Finding], able: Sequence[Finding], examiner: Examiner
) -> Mended:
    """Raises HarmError."""
    fixes = [finding.fix for finding in able if finding.fix]
    applied, _ = edits.choose(fixes)
    data = _written(source, applied)
    try:
        after = examiner.of_source(load(source.path, data))
    except UnreadableError as error:
        raise HarmError(f"the file could not be read any more: {error}") from error
    _check(findings, after)
    taken = Counter(applied)
    made: list[Finding] = []
    for finding in able:
        if finding.fix and taken[finding.fix]:
            taken[finding.fix] -= 1
            made.append(finding)
    return Mended(data, tuple(after), tuple(made))


def _written(source: Source, fixes: Sequence[Fix]) -> bytes:
    try:
        code = placing.placed(modules.Module(source), fixes)
        return source.written(code)
    except (parsing.ParseError, SyntaxError) as error:
        raise HarmError(f"Python could not parse the file any more: {error}") from error
    except UnicodeEncodeError as error:
        raise HarmError(f"the file's encoding cannot hold it: {error}") from error
    except ValueError as error:
        raise HarmError(str(error)) from error


def _check(before: Sequence[Finding], after: Sequence[Finding]) -> None:
    """Raises HarmError where `after` has more of anything than `before`."""
    counts = Counter(finding.code for finding in after)
    counts.subtract(finding.code for finding in before)
    for finding in after:
        if counts[finding.code] > 0 and finding.code not in _HARMLESS:
            raise HarmError(_harm(finding, finding.code))


def _harm(finding: Finding, code: Code) -> str:
    place = f"line {finding.start.line}"
    if code == syntax_error.PAGE.code:
        return f"Python could not parse the file any more: {place}: {finding.message}"
    return f"there would be a new {code} in {place}: {finding.message}"
