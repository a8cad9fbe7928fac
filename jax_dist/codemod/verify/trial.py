"""Proves a migration place by place: runs the program in a sandbox, and never writes to its files.

First one run of both texts together, in which old and new are compared at each edited expression.
What cannot be merged is judged by two runs, before and after.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_dist._usage import MisuseError
from jax_dist.checker.model import sources
from jax_dist.codemod import pmap_renames
from jax_dist.codemod.results import FileMigration, PlaceResult
from jax_dist.codemod.verify import evidence, merged_program, runs, two_runs
from jax_dist.codemod.verify.evidence import Evidence, entry
from jax_dist.codemod.verify.ledger import Ledger, LedgerEntry, Rung
from jax_dist.codemod.verify.merged_program import Merged
from jax_dist.codemod.verify.program_text import Spot
from jax_dist.codemod.verify.runs import Workspace
from jax_dist.codemod.verify.verdict import judged
from jax_dist.codemod.verify.verification import MigrationVerification, tail

_LENIENT = frozenset(pmap_renames.REMOVED.values())


@dataclass(frozen=True)
class _Plan:
    """What is run, and where its places are."""

    files: Sequence[FileMigration]
    merged: Mapping[str, Merged]  # by path

    @property
    def before(self) -> dict[Path, bytes]:
        return {Path(f.path): f.before for f in self.files if f.changed and not f.is_new}

    @property
    def after(self) -> dict[Path, bytes]:
        return {Path(f.path): f.after for f in self.files if f.changed}

    @property
    def spots(self) -> dict[int, Spot]:
        return {spot.number: spot for each in self.merged.values() for spot in each.spots}

    @property
    def outcomes(self) -> Iterator[PlaceResult]:
        """What is to be proved."""
        for file in self.files:
            for outcome in file.outcomes:
                if outcome.status == "done" and file.changed:
                    yield outcome

    def changes(self) -> dict[Path, bytes]:
        """What the files of the merged program hold."""
        new = {Path(f.path): f.after for f in self.files if f.changed and f.is_new}
        for file in self.files:
            if file.path in self.merged:
                source = sources.read(file.path, file.before)
                text = self.merged[file.path].text.encode()
                new[Path(file.path)] = source.written(text)
        return new


def verified(
    command: Sequence[str],
    files: Sequence[FileMigration],
    *,
    devices: int = 8,
    tolerance: float = 0.0,
    merge: bool = True,
    timeout: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Ledger:
    """Runs a command, and says of each migrated place how sure it is.

    Args:
      command: the program to run and its arguments; any that imports jax in a Python of its own.
      files: before and after.
      devices: how many CPU devices to simulate.
      tolerance: how far a float of two runs may differ, relative to the largest of its array.
      merge: tries one run of both texts; not where values take another form, as without the axis
        over devices.
      timeout: the seconds that each run may take.
      progress: is told what begins.

    Raises:
      MisuseError: a file no longer holds what it was migrated from, or there is no room.
      OSError: the command cannot be started.
    """
    plan = _Plan(files, _merged(files) if merge else {})
    for path, data in plan.before.items():
        if path.read_bytes() != data:
            raise MisuseError(f"{path} has changed since it was read; start again")
    with runs.stage(command, plan.after, devices=devices, timeout=timeout) as stage:
        return _Trial(stage, plan, tolerance, progress).ledger()


def compared(
    command: Sequence[str],
    before: Mapping[Path, bytes],
    after: Mapping[Path, bytes],
    *,
    devices: int = 8,
    tolerance: float = 0.0,
    timeout: float | None = None,
) -> MigrationVerification:
    """Runs a command before and after a change of files, and compares what is mapped.

    Args, Raises: as `verified`.
    """
    with runs.stage(command, {*before, *after}, devices=devices, timeout=timeout) as stage:
        one, other = (stage.recorded(each, {*before, *after}) for each in (before, after))
        return judged(command, one, other, files={*before, *after}, tolerance=tolerance)


class _Trial:
    def __init__(
        self, stage: Workspace, plan: _Plan, tolerance: float, progress: Callable[[str], None]
    ):
        self._stage, self._plan = stage, plan
        self._tolerance, self._progress = tolerance, progress
        self._notes: list[str] = []

    def ledger(self) -> Ledger:
        found, entries, whole = {}, [], None
        left = [(path, *each) for path, m in self._plan.merged.items() for each in m.unmerged]
        if self._plan.spots:
            found, whole = self._merged_run()
        if whole is None:
            self._notes.append(
                "the two texts could not be run as one program: they were run one after the other"
            )
            told = [*self._plan.outcomes, *_as_outcomes(left, self._plan)]
            entries, runs_ = self._two_runs(told)
        else:
            entries, open_ = self._by_spots(found)
            runs_ = None
            if left or open_:
                names = [f"{os.path.relpath(path)}:{line}" for path, line, _ in left]
                where = f": {', '.join(names[:3])}" if names else ""
                self._notes.append(f"not all could be run as one program{where}")
                more, runs_ = self._two_runs([*open_, *_as_outcomes(left, self._plan)])
                entries += more
        code = whole[0] if whole is not None else runs_.after.exit_code if runs_ else 0
        failed = whole[1] if whole is not None and whole[0] != 0 else ""
        if whole is not None and whole[0] != 0:
            entries = [_capped(each) for each in entries]
            self._notes.append(
                "the command fails without the migration too, and a command that fails is no proof"
            )
        problems = () if runs_ is None else runs_.problems
        return Ledger(
            command=tuple(self._stage.command),
            entries=tuple(sorted(entries, key=lambda each: (each.path, each.line))),
            kept_apart=self._stage.way,
            merged=whole is not None,
            exit_code=code,
            output=failed or _output(runs_),
            runs=runs_,
            problems=problems,
            notes=(*self._notes, *(() if runs_ is None else (*runs_.unproven, *runs_.notes))),
        )

    def _two_runs(
        self, places: Sequence[PlaceResult]
    ) -> tuple[list[LedgerEntry], MigrationVerification]:
        ran = two_runs.made(
            self._stage,
            self._plan.files,
            places,
            tolerance=self._tolerance,
            progress=self._progress,
        )
        if ran.note:
            self._notes.append(ran.note)
        return list(ran.entries(places)), ran.found

    def _merged_run(self) -> tuple[dict[int, Evidence], tuple[int | None, str] | None]:
        """What happened, the exit code and the output; no code where the merge itself failed."""
        self._progress("running both texts as one program")
        found, code, output = self._stage.merged(self._plan.changes())
        if code == 0:
            return found, (code, "")
        self._progress("it failed: running the command without the migration")
        plain = self._stage.recorded({}, ())
        if plain.exit_code == code:
            return found, (code, tail(output))
        return {}, None

    def _by_spots(self, found: dict[int, Evidence]) -> tuple[list[LedgerEntry], list[PlaceResult]]:
        """The entries that the merged run can judge, and the outcomes of those that it cannot."""
        entries, spots = [], self._plan.spots
        taken: set[int] = set()
        left: list[PlaceResult] = []
        for outcome in self._plan.outcomes:
            own = [spot for spot in spots.values() if _belongs(spot, outcome)]
            if own:
                taken |= {spot.number for spot in own}
                judge = functools.partial(evidence.judged, found=found, spots=spots)
                lenient = outcome.code in _LENIENT
                entries.append(entry(outcome, [judge(each, lenient=lenient) for each in own]))
            elif not self._is_covered(outcome):
                left.append(outcome)
        for number, spot in spots.items():
            if number not in taken:
                judgement = evidence.judged(spot, found, lenient=False, spots=spots)
                place = PlaceResult(spot.path, spot.line, None, "", "done", spot.old)
                entries.append(entry(place, [judgement]))
        return entries, left

    def _is_covered(self, outcome: PlaceResult) -> bool:
        """Whether no expression was edited for it: another place does all."""
        merged = self._plan.merged.get(outcome.path)
        if merged is None:
            return False
        return not any(line == outcome.line for line, _ in merged.unmerged)


def _merged(files: Sequence[FileMigration]) -> dict[str, Merged]:
    found: dict[str, Merged] = {}
    number = 0
    for file in files:
        if file.changed and not file.is_new and file.path.endswith(".py"):
            texts = [
                sources.read(file.path, each).code.decode() for each in (file.before, file.after)
            ]
            found[file.path] = merged_program.merged(file.path, texts[0], texts[1], number)
            number += len(found[file.path].spots)
    return found


def _belongs(spot: Spot, outcome: PlaceResult) -> bool:
    if spot.path != outcome.path or outcome.cell is not None:
        return False
    if spot.name:
        return re.search(rf"(?<![\w.]){re.escape(spot.name)}\b", outcome.what) is not None
    last = outcome.line + outcome.what.count("\n")
    return spot.line <= last and outcome.line <= spot.end_line


def _as_outcomes(left: Sequence[tuple[str, int, str]], plan: _Plan) -> list[PlaceResult]:
    """Statements that no outcome speaks of."""
    known = {(each.path, each.line) for each in plan.outcomes}
    return [
        PlaceResult(path, line, None, "", "done", text)
        for path, line, text in left
        if (path, line) not in known
    ]


def _capped(entry: LedgerEntry) -> LedgerEntry:
    rung = min(entry.rung, Rung.RAN)
    return dataclasses.replace(entry, rung=rung, rules=(), signatures=())


def _output(found: MigrationVerification | None) -> str:
    if found is None or found.after.exit_code == 0:
        return ""
    return found.after.output
