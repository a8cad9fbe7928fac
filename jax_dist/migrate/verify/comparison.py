"""The verdict on two runs of one command: pairs their mapped functions, and compares these."""

import dataclasses
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_dist.migrate.verify import calls
from jax_dist.migrate.verify.evidence import Run, RunRecord, SiteRecord
from jax_dist.migrate.verify.ledger import (
    Ending,
    Key,
    MigrationVerdict,
    MigrationVerification,
)

# Where equinox.filter_pmap and flax.nnx.pmap map. What takes their place maps inside jax_dist, and
# no hook sees that.
_OF_LIBRARIES = (
    os.path.join("equinox", "_vmap_pmap.py"),
    os.path.join("flax", "nnx", "transforms", "iteration.py"),
)
_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")


def judged(
    command: Sequence[str],
    first: Run,
    second: Run,
    again: Run | None = None,
    *,
    files: Iterable[Path],
    tolerance: float = 0.0,
) -> MigrationVerification:
    """Compares a run before a migration with one after it.

    Args:
      command: what ran.
      first: before the migration.
      second: after it.
      again: before it once more; what differs between these two shows nothing.
      files: that were migrated; what is mapped there and was not compared is reported.
      tolerance: how far a float may differ, relative to the largest value of its array.

    Returns:
      The verdict, with its reasons.
    """
    before, after = first.record, second.record
    partners, new = pairs(before, after)
    others = {} if again is None else {id(x): y for x, y in pairs(before, again.record)[0]}
    replaced = [
        one for one, other in partners if other is None and one.file.endswith(_OF_LIBRARIES)
    ]
    sites = []
    for one, other in partners:
        if one not in replaced:
            ignored = unsteady(one, others.get(id(one))) if again is not None else ()
            found = calls.compare(one, other, tolerance, ignored=ignored)
            sites.append(dataclasses.replace(found, file=_relative(one.file), site=one))
    problems = ()
    # A command that failed before owes nothing; any other must end as it did.
    if first.exit_code == 0 and second.exit_code != 0:
        problems = (f"the command ended well before the migration; after it: {_ending(second)}",)
    elif first.exit_code is not None and second.exit_code is None:
        problems = (
            f"the command ended before the migration ({_ending(first)}), and not in time after it",
        )
    unproven = (
        *_not_compared(files, first, second),
        *(f"{_place(site)} was called only before the migration" for site in replaced),
    )
    if problems or any(site.problems for site in sites):
        verdict = MigrationVerdict.DIFFERENT
    else:
        verdict = MigrationVerdict.UNPROVEN if unproven else MigrationVerdict.SAME
    return MigrationVerification(
        command=tuple(command),
        verdict=verdict,
        before=_ending(first),
        after=_ending(second),
        sites=tuple(sites),
        problems=problems,
        unproven=unproven,
        notes=tuple(_notes(first, second, new)),
        is_complete=before.is_complete and after.is_complete,
    )


def unsteady(first: SiteRecord, again: SiteRecord | None) -> frozenset[Key]:
    """What of a function differs between two runs of one program."""
    return calls.compare(first, again).differing


def _not_compared(files: Iterable[Path], first: Run, second: Run) -> Iterator[str]:
    if first.exit_code != 0:
        errors = [line for line in first.output.splitlines() if _ERROR.match(line)]
        reason = f": {errors[-1]}" if errors else ""  # JAX may write more below it
        now = "it runs now" if second.exit_code == 0 else f"after it: {_ending(second)}"
        yield f"the command failed before the migration ({_ending(first)}{reason}); {now}"
    if not first.record.called:
        yield "no mapped function was called before the migration: nothing to compare with"
    migrated = {os.path.realpath(file) for file in files}
    whole = first if first.exit_code == 0 else second  # the other one stopped on the way
    for site in whole.record.hidden:
        if site.file in migrated:
            yield f"{_place(site)} was called only inside a larger traced function"
    elsewhere = {(e.file, e.line, e.function): e.process for e in whole.record.called}
    for site in whole.record.idle:
        by = elsewhere.get((site.file, site.line, site.function), site.process)
        if site.file in migrated and by == site.process:  # no other process has called it
            yield f"{_place(site)} was mapped, and never called"
    for run_, when in ((first, "before"), (second, "after")):
        for problem in run_.record.problems:
            yield f"a call could not be recorded {when} the migration: {problem}"
        for command in run_.record.left:
            yield f"`{command}` still ran when the command ended {when} the migration: wait for it"
        if not run_.record.is_complete:
            yield f"not all that the command did {when} the migration was written down"


def _notes(first: Run, second: Run, new: Sequence[SiteRecord]) -> Iterator[str]:
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
        output=run_.tail,
    )


def _place(site: SiteRecord) -> str:
    return f"{_relative(site.file)}:{site.line} {site.function}"


def _relative(file: str) -> str:
    """As people would write it: below the current folder without that."""
    here = os.path.realpath(os.curdir) + os.sep
    return file.removeprefix(here)


# --- the same function in both runs

_Key = Callable[[SiteRecord], Hashable]

# What two must share, the surest first. At the end, only the file: a lambda that got a name.
_NAMED: tuple[_Key, ...] = (
    lambda site: (site.process, site.file, site.function, site.within),
    lambda site: (site.process, site.file, site.function),
)
_IN_ONE_FILE: _Key = lambda site: (site.process, site.file)


def pairs(
    before: RunRecord, after: RunRecord
) -> tuple[list[tuple[SiteRecord, SiteRecord | None]], list[SiteRecord]]:
    """Pairs what is the same function; of those that look alike, the order of making decides.

    A jit without anything mapped inside stands for a mapped function only where nothing better is
    left; it must have the same name.

    Returns:
      Each site that was called before with its partner, if it has one; and the mapped functions
      that were called after, and are nobody's partner.
    """
    partners = _matched(
        before,
        # First those that were called; then, where one of two is idle in one run, all that there
        # are.
        (before.called, after.called, _NAMED),
        ((*before.called, *before.idle), after.sites, _NAMED),
        (before.called, after.called, (_IN_ONE_FILE,)),
    )
    taken = {id(site) for site in partners.values()}
    new = [site for site in after.called if id(site) not in taken]
    return [(site, partners.get(id(site))) for site in before.called], new


def pairs_inside(before: RunRecord, after: RunRecord) -> dict[int, SiteRecord]:
    """The partners, by identity, of what was traced as a part of something else."""
    ones, others = ([s for s in run.sites if s.traced] for run in (before, after))
    return _matched(before, (ones, others, _NAMED), parts=True)


def _matched(
    before: RunRecord, *rounds: tuple[Sequence[Any], Sequence[Any], Any], parts: bool = False
) -> dict[int, SiteRecord]:
    """Partners by identity, round by round: what is to be paired, with what, and by which keys.

    Args:
      before: the run, for the order of making.
      *rounds: the surest first.
      parts: what is only a part of what another site made may be a partner.
    """
    partners: dict[int, SiteRecord] = {}
    for ones, others, keys in rounds:
        for key in keys:
            taken = {id(site) for site in partners.values()}
            left = {id(site) for site in ones} - {*partners}
            ones_left = [site for site in before.sites if id(site) in left]
            tops = [site for site in others if parts or site.count or not site.inside]
            others_left = [site for site in tops if id(site) not in taken]
            groups = _groups(others_left, key)
            for shared, group in _groups(ones_left, key).items():
                alike = groups.get(shared, [])
                if len(alike) == len(group):  # of others, who is who would be a guess
                    partners |= {id(site): other for site, other in zip(group, alike, strict=True)}
    return partners


def _groups(sites: Iterable[SiteRecord], key: _Key) -> dict[Hashable, list[SiteRecord]]:
    groups: dict[Hashable, list[SiteRecord]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return groups
