"""Findings that are known and left for later: a file that hides them, and only them.

A finding is known by its path, its code and the text of its line, so that it stays known when the
line moves. Of several that are alike, as many are hidden as there were.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.checker.model.findings import Code, Finding

_Known: TypeAlias = tuple[str, Code, str]  # path from the folder of the baseline, code, line

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stale:
    """An entry that hides nothing any more."""

    path: str
    code: Code
    line: str
    count: int  # of findings that are gone


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """Findings against a baseline."""

    new: tuple[Finding, ...]
    hidden: int
    stale: tuple[Stale, ...]


def text_of(findings: Iterable[Finding], file: str) -> str:
    """A baseline that hides these findings, to be written to `file`."""
    counts = Counter(_known(finding, file) for finding in findings)
    entries: dict[str, list[dict[str, Any]]] = {}
    for (path, code, line), count in sorted(counts.items()):
        entries.setdefault(path, []).append({"code": code, "line": line, "count": count})
    return json.dumps({"version": _VERSION, "findings": entries}, indent=2) + "\n"


def compared(
    findings: Sequence[Finding], file: str, *, files: Iterable[str], codes: frozenset[Code]
) -> Compared:
    """Takes from the findings those that a baseline hides.

    Args:
      findings: in order; of several that are alike the first are hidden.
      file: the baseline.
      files: what was checked; entries of other files are not called stale while they exist.
      codes: what was looked for; likewise.

    Raises:
      MisuseError: the baseline cannot be read.
    """
    left = _read(file)
    new: list[Finding] = []
    for finding in findings:
        known = _known(finding, file)
        if left[known]:
            left[known] -= 1
        else:
            new.append(finding)
    checked = {_seen(path, file) for path in files}
    folder = os.path.dirname(os.path.abspath(file))
    stale = tuple(
        Stale(path, code, line, count)
        for (path, code, line), count in sorted(left.items())
        if count and code in codes
        if path in checked or not os.path.exists(os.path.join(folder, path))
    )
    return Compared(tuple(new), len(findings) - len(new), stale)


def _known(finding: Finding, file: str) -> _Known:
    return _seen(finding.path, file), finding.code, finding.line_text.strip()


def _seen(path: str, file: str) -> str:
    folder = os.path.dirname(os.path.abspath(file))
    try:
        seen = os.path.relpath(path, folder)
    except ValueError:  # Windows: another drive
        seen = os.path.abspath(path)
    return seen.replace(os.sep, "/")


def _read(file: str) -> Counter[_Known]:
    try:
        with open(file, encoding="utf-8") as opened:
            table = json.load(opened)
    except OSError as error:
        remedy = "--write-baseline makes one." if isinstance(error, FileNotFoundError) else ""
        raise MisuseError(
            f"the baseline {file} cannot be read: {error.strerror}. {remedy}".rstrip()
        ) from error
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"the baseline {file} is not JSON: {error}") from error
    try:
        return _entries(table)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MisuseError(
            f"{file} is not a baseline of this version; --write-baseline writes a new one"
        ) from error


def _entries(table: Any) -> Counter[_Known]:
    if table["version"] != _VERSION:
        raise ValueError(table["version"])
    return Counter(
        {
            (str(path), str(entry["code"]), str(entry["line"])): int(entry["count"])
            for path, entries in table["findings"].items()
            for entry in entries
        }
    )
