"""Compares two runs of one command: the verdict on what lies between them."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jax_dist.migrating.verify import comparison, matching
from jax_dist.migrating.verify.records import Site
from jax_dist.migrating.verify.runs import Run
from jax_dist.migrating.verify.verification import (
    Ending,
    SiteComparison,
    Verdict,
    Verification,
    tail,
)

_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")


def judged(
    command: Sequence[str],
    first: Run,
    second: Run,
    *,
    files: Iterable[Path],
    tolerance: float = 0.0,
) -> Verification:
    """Compares a run before a migration with one after it.

    Args:
      command: what ran.
      first: before the migration.
      second: after it.
      files: that were migrated; what is mapped there and was not compared is reported.
      tolerance: how far a float may differ, relative to the largest value of its array.

    Returns:
      The verdict, with its reasons.
    """
    before, after = first.record, second.record
    pairs, new = matching.pairs(before, after)
    sites = tuple(_shown(comparison.compare(one, other, tolerance)) for one, other in pairs)
    problems = tuple(_differing_ends(first, second))
    unproven = tuple(_not_compared(files, first, second))
    if problems or any(site.problems for site in sites):
        verdict = Verdict.DIFFERENT
    else:
        verdict = Verdict.UNPROVEN if unproven else Verdict.SAME
    return Verification(
        command=tuple(command),
        verdict=verdict,
        before=_ending(first),
        after=_ending(second),
        sites=sites,
        problems=problems,
        unproven=unproven,
        notes=tuple(_notes(first, second, new)),
    )


def _differing_ends(first: Run, second: Run) -> Iterator[str]:
    """A command that failed before owes nothing; any other must end as it did."""
    if first.exit_code == 0 and second.exit_code != 0:
        yield f"the command ended well before the migration; after it: {_ending(second)}"
    elif first.exit_code is not None and second.exit_code is None:
        yield f"the command ended before the migration ({_ending(first)}), and not in time after it"


def _not_compared(files: Iterable[Path], first: Run, second: Run) -> Iterator[str]:
    if first.exit_code != 0:
        now = "it runs now" if second.exit_code == 0 else f"after it: {_ending(second)}"
        yield f"the command failed before the migration ({_ending(first)}{_reason(first)}); {now}"
    if not first.record.called:
        yield "no mapped function was called before the migration: nothing to compare with"
    migrated = {os.path.realpath(file) for file in files}
    whole = first if first.exit_code == 0 else second  # the other one stopped on the way
    for site in whole.record.hidden:
        if site.file in migrated:
            yield f"{_place(site)} was called only inside a larger traced function"
    for site in whole.record.idle:
        if site.file in migrated:
            yield f"{_place(site)} was mapped, and never called"
    for run_, when in ((first, "before"), (second, "after")):
        for problem in run_.record.problems:
            yield f"a call could not be recorded {when} the migration: {problem}"


def _reason(run_: Run) -> str:
    """The error in its output; JAX may write more below it."""
    errors = [line for line in run_.output.splitlines() if _ERROR.match(line)]
    return f": {errors[-1]}" if errors else ""


def _notes(first: Run, second: Run, new: Sequence[Site]) -> Iterator[str]:
    if first.exit_code == 0:
        for site in new:
            yield f"{_place(site)} was called only after the migration"
    if first.exit_code == second.exit_code == 0:
        lines = zip(first.output.splitlines(), second.output.splitlines(), strict=False)
        for number, (one, other) in enumerate(lines, 1):
            if one != other:
                yield f"the output differs from line {number} on: {one!r} before, {other!r} after"
                return


def _ending(run_: Run) -> Ending:
    devices = [
        array.devices
        for site in run_.record.called
        for call in site.calls
        for array in call.returned
        if array.devices
    ]
    return Ending(
        exit_code=run_.exit_code,
        functions=len(run_.record.called),
        calls=sum(site.count for site in run_.record.called),
        devices=min(devices, default=0),
        output=tail(run_.output),
    )


def _shown(site: SiteComparison) -> SiteComparison:
    return dataclasses.replace(site, file=_relative(site.file))


def _place(site: Site) -> str:
    return f"{_relative(site.file)}:{site.line} {site.function}"


def _relative(file: str) -> str:
    """As people would write it: below the current folder without that."""
    here = os.path.realpath(os.curdir) + os.sep
    return file.removeprefix(here)
