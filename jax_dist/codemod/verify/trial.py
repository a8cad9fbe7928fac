"""Proves a migration place by place: runs the program in a sandbox, and never writes to its files.

First one run of both texts together, in which old and new are compared at each edited expression.
What cannot be merged is judged by two runs, before and after: a mapped function by its own calls, a
host edit by its values. Any other place is judged by all mapped functions of the program, and by
what that prints.
"""

import ast
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.checker.model import sources
from jax_dist.codemod import pmap_renames
from jax_dist.codemod.results import FileMigration, PlaceResult
from jax_dist.codemod.verify import calls, edits, evidence, sandbox
from jax_dist.codemod.verify.comparison import judged
from jax_dist.codemod.verify.edits import Merged
from jax_dist.codemod.verify.evidence import Evidence, Judgement, Run, RunRecord, entry
from jax_dist.codemod.verify.ledger import (
    Ledger,
    LedgerEntry,
    MigrationVerification,
    Rung,
    SiteComparison,
)
from jax_dist.codemod.verify.program_text import Marked, ProgramText, Spot
from jax_dist.codemod.verify.sandbox import Workspace

_LENIENT = frozenset(pmap_renames.REMOVED.values())
_STEADY = "without the migration, the command computes the same twice"
_UNSTEADY = (
    "the command does not compute the same twice, even without the migration: give it fixed seeds"
)

_Place: TypeAlias = tuple[str, int, str]  # the path, the line before, what stands there


def verified(
    command: Sequence[str],
    files: Sequence[FileMigration],
    *,
    devices: int = 8,
    merge: bool = True,
    timeout: float | None = None,
    scratch: Iterable[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Ledger:
    """Runs a command, and says of each migrated place how sure it is.

    Args:
      command: the program to run and its arguments; any that imports jax in a Python of its own.
      files: before and after.
      devices: how many CPU devices to simulate.
      merge: tries one run of both texts; not where values take another form, as without the axis
        over devices.
      timeout: the seconds that each run may take.
      scratch: folders, empty or new, that it may write to where there is no overlay of all files.
      progress: is told what begins.

    Raises:
      MisuseError: a file no longer holds what it was migrated from, or there is no room.
      OSError: the command cannot be started.
    """
    plan = _Plan(files, merge=merge)
    for path, data in plan.before.items():
        if path.read_bytes() != data:
            raise MisuseError(f"{path} has changed since it was read; start again")
    apart = sandbox.stage(command, plan.after, devices=devices, timeout=timeout, scratch=scratch)
    with apart as stage:
        return _Trial(stage, plan, progress).ledger()


def watched(
    command: Sequence[str],
    texts: Mapping[Path, bytes],
    *,
    devices: int = 8,
    timeout: float | None = None,
    scratch: Iterable[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> RunRecord:
    """Runs a command as it is, with expressions that tell their values.

    Args:
      command: as `verified` takes it.
      texts: what the watched files hold for this run.
      devices, timeout, scratch, progress: as `verified` takes them.

    Raises:
      MisuseError: there is no room for it.
      OSError: the command cannot be started.
    """
    apart = sandbox.stage(command, texts, devices=devices, timeout=timeout, scratch=scratch)
    with apart as stage:
        progress("running the command to see what carries the device axis")
        record = stage.recorded(texts, texts, watched=True).record
        for site in record.sites:  # of the arrays themselves, nothing outlives the run
            site.calls = [
                replace(call, given=tuple(each.without_values() for each in call.given))
                for call in site.calls
            ]
        return record


class _Plan:
    """What is run, and where its places are."""

    def __init__(self, files: Sequence[FileMigration], *, merge: bool):
        # A place may change by what another file defines.
        self._files = [f for f in files if f.changed or any(o.status == "done" for o in f.outcomes)]
        self.programs = [f for f in self._files if not f.is_new and f.path.endswith(".py")]
        self.before = {Path(f.path): f.before for f in self._files if not f.is_new}
        self.after = {Path(f.path): f.after for f in self._files}
        # What is to be proved.
        self.outcomes = [o for f in self._files for o in f.outcomes if o.status == "done"]
        self.merged: dict[str, Merged] = {}  # by path
        self.spots: dict[int, Spot] = {}
        for file in self.programs if merge else ():
            texts = _text(file, file.before), _text(file, file.after)
            places = [(o.line, o.what) for o in file.outcomes if o.status == "done"]
            merged = Merged(file.path, *texts, len(self.spots), places)
            self.merged[file.path] = merged
            self.spots |= {spot.number: spot for spot in merged.spots}

    def merged_files(self) -> dict[Path, bytes]:
        """What the files of the merged program hold."""
        new = {Path(f.path): f.after for f in self._files if f.is_new}
        for file in self.programs:
            text = self.merged[file.path].text.encode()
            new[Path(file.path)] = sources.read(file.path, file.before).written(text)
        return new

    def spots_of(self, place: PlaceResult) -> list[Spot]:
        """Those of a place; of several that look alike in one line, each has its own."""
        merged = self.merged.get(place.path)
        if merged is None or place.cell is not None:
            return []
        found = merged.spots_of(place.line, place.what)
        alike = [o for o in self.outcomes if _key(o) == _key(place)]
        if len(found) == len(alike):
            return found[next(i for i, each in enumerate(alike) if each is place)]
        return [spot for each in found for spot in each]

    def is_by_uses(self, spot: Spot) -> bool:
        """Whether it is an import, of which other places say how sure they are."""
        name = self.merged[spot.path].imported.get(spot.number)
        return any((o.path, o.what) == (spot.path, name) for o in self.outcomes)

    def left(self) -> list[PlaceResult]:
        """Statements that cannot be merged, and that no outcome speaks of."""
        known = {(each.path, each.line) for each in self.outcomes}
        return [
            PlaceResult(path, line, None, "", "done", text)
            for path, merged in self.merged.items()
            for line, text in merged.unmerged
            if (path, line) not in known
        ]


def _key(place: PlaceResult) -> _Place:
    return place.path, place.line, place.what


def _text(file: FileMigration, data: bytes) -> str:
    return sources.read(file.path, data).code.decode()


class _Trial:
    def __init__(self, stage: Workspace, plan: _Plan, progress: Callable[[str], None]):
        self._stage, self._plan, self._progress = stage, plan, progress
        self._notes: list[str] = []
        self._refused: dict[str, None] = {}  # files that the runs may not write to, in order

    def ledger(self) -> Ledger:
        plan, runs = self._plan, None
        found, ended = self._merged_run() if plan.spots else ({}, None)
        if ended is None:
            self._notes.append(
                "the two texts could not be run as one program: they were run one after the other"
            )
            entries, runs = self._two_runs([*plan.outcomes, *plan.left()])
            code, output = runs.after.exit_code, ""
        else:
            code, output = ended
            entries, open_ = self._by_spots(found)
            unmerged = [(path, line) for path, m in plan.merged.items() for line, _ in m.unmerged]
            if unmerged or open_:
                names = [f"{os.path.relpath(path)}:{line}" for path, line in unmerged]
                where = f": {', '.join(names[:3])}" if names else ""
                self._notes.append(f"not all could be run as one program{where}")
                more, runs = self._two_runs([*open_, *plan.left()])
                entries += more
            if code != 0:
                entries = [
                    replace(each, rung=min(each.rung, Rung.RAN), rules=(), signatures=())
                    for each in entries
                ]
                self._notes.append(
                    "the command fails without the migration too, and a command that fails is no "
                    "proof"
                )
        if runs is not None:
            self._notes += [*runs.unproven, *runs.notes]
            if runs.after.exit_code != 0:
                output = output or runs.after.output
        self._notes += self._of_writing(failed=code != 0)
        return Ledger(
            command=tuple(self._stage.command),
            entries=tuple(sorted(entries, key=lambda each: (each.path, each.line))),
            kept_apart=self._stage.way,
            merged=ended is not None,
            exit_code=code,
            output=output,
            runs=runs,
            problems=() if runs is None else runs.problems,
            notes=tuple(self._notes),
        )

    def _of_writing(self, *, failed: bool) -> Iterator[str]:
        """What the runs were kept from, outside of the project."""
        first, more = next(iter(self._refused), ""), len(self._refused) - 1
        if first:
            others = f" and {more} more" if more else ""
            yield (
                f"the command was kept from writing to {first}{others}, outside of the project: "
                "--scratch FOLDER names a folder, empty or new, that it may write to"
            )
        elif failed and self._stage.way == "locked copy":
            yield "outside of the project, the command may write to what --scratch names alone"

    def _ended(self, run: Run) -> Run:
        self._refused |= dict.fromkeys(run.refused)
        return run

    # --- one run of both texts

    def _merged_run(self) -> tuple[Mapping[int, Evidence], tuple[int | None, str] | None]:
        """What happened, the exit code and the output; no code where the merge itself failed."""
        self._progress("running both texts as one program")
        ran = self._ended(self._stage.merged(self._plan.merged_files()))
        if ran.exit_code == 0:
            return ran.ran, (0, "")
        self._progress("it failed: running the command without the migration")
        plain = self._ended(self._stage.recorded({}, ()))
        if plain.exit_code == ran.exit_code:
            return ran.ran, (ran.exit_code, ran.tail)
        return {}, None

    def _by_spots(
        self, found: Mapping[int, Evidence]
    ) -> tuple[list[LedgerEntry], list[PlaceResult]]:
        """The entries that the merged run can judge, and the outcomes of those that it cannot."""
        plan, entries = self._plan, []
        left: list[PlaceResult] = []
        taken = {spot.number for each in plan.outcomes for spot in plan.spots_of(each)}
        for outcome in plan.outcomes:
            own = plan.spots_of(outcome)
            merged = plan.merged.get(outcome.path)
            if own:
                lenient = outcome.code in _LENIENT
                judge = functools.partial(evidence.judged, found=found, spots=plan.spots)
                entries.append(entry(outcome, [judge(spot, lenient=lenient) for spot in own]))
            elif merged is None or any(line == outcome.line for line, _ in merged.unmerged):
                left.append(outcome)  # else another place does all: no expression was edited for it
        for number, spot in plan.spots.items():
            if number not in taken and not plan.is_by_uses(spot):
                place = PlaceResult(spot.path, spot.line, None, "", "done", spot.old)
                entries.append(entry(place, [evidence.judged(spot, found, plan.spots)]))
        return entries, left

    # --- two runs, before and after

    def _two_runs(
        self, places: Sequence[PlaceResult]
    ) -> tuple[list[LedgerEntry], MigrationVerification]:
        """Each place by its own function or values, else by all mapped functions."""
        stage, plan = self._stage, self._plan
        files = list(_marked_files(plan.programs, places))
        paths = {*plan.after}
        judge = functools.partial(judged, stage.command, files=paths)
        self._progress("running the command before the migration")
        first = self._ended(stage.recorded({each.path: each.texts[0] for each in files}, paths))
        unmarked = {os.path.realpath(each.path): each.before for each in files}
        for site in first.record.sites:
            if site.file in unmarked:
                site.line = unmarked[site.file].line_before(site.line)
        self._progress("running the command after it")
        second = self._ended(
            stage.recorded(plan.after | {each.path: each.texts[1] for each in files}, paths)
        )
        found = judge(first, second)
        if found.differs:
            self._progress("running the command before the migration again, for something differs")
            third = self._ended(stage.recorded(plan.before, paths))
            self._notes.append(_UNSTEADY if judge(first, third).differs else _STEADY)
        hosts, idle = _hosts(files, first, second), _idle(files, first)
        entries = []
        for place in places:
            path = os.path.realpath(place.path)
            lines = range(place.line, place.line + place.what.count("\n") + 1)
            sites = [s for s in found.sites if os.path.realpath(s.file) == path and s.line in lines]
            unused = [s.function for s in first.record.idle if s.file == path and s.line in lines]
            own = sites or hosts.get(_key(place), ())
            judgement = _judgement(found, own, unused, never=_key(place) in idle)
            entries.append(entry(place, [judgement]))
        return entries, found


# --- the texts of two runs


@dataclass(frozen=True, slots=True)
class _MarkedFile:
    path: Path
    before: Marked
    texts: tuple[bytes, bytes]  # before and after, both with marks
    hosts: Mapping[int, _Place]


def _marked_files(
    files: Iterable[FileMigration], places: Sequence[PlaceResult]
) -> Iterator[_MarkedFile]:
    """Of the files that have places."""
    spots = hosts = 0
    for file in files:
        own = [place for place in places if place.path == file.path]
        if not own:
            continue
        one, other = _text(file, file.before), _text(file, file.after)
        known = {(place.line, place.what): place for place in own if place.cell is None}
        text, olds, news, at = ProgramText(one), {}, {}, {}
        for old, new in edits.host_edits(text.tree, ast.parse(other)):
            what = text.between(*text.span(old.node))
            if (place := known.get((old.node.lineno, what))) is not None:
                olds[hosts], news[hosts] = old, new
                at[hosts] = place.path, place.line, place.what
                hosts += 1
        before = Marked(file.path, one, [(p.line, p.what) for p in own], spots, olds)
        after = Marked(file.path, other, (), spots, news)
        spots += len(before.spots)
        sides = (file.before, before), (file.after, after)
        old, new = (sources.read(file.path, d).written(m.text.encode()) for d, m in sides)
        yield _MarkedFile(Path(file.path), before, (old, new), at)


# --- what two runs say


def _hosts(
    files: Iterable[_MarkedFile], first: Run, second: Run
) -> dict[_Place, list[SiteComparison]]:
    """The values of each host edit, in each process of the program."""
    partners = {(each.process, each.function): each for each in second.record.hosts}
    places = {str(number): place for each in files for number, place in each.hosts.items()}
    found: dict[_Place, list[SiteComparison]] = {}
    for host in first.record.hosts:
        if host.count:
            partner = partners.get((host.process, host.function))
            compared = calls.compare(host, partner)
            found.setdefault(places[host.function], []).append(compared)
    return found


def _idle(files: Iterable[_MarkedFile], first: Run) -> set[_Place]:
    """The places of which an expression never ran; of two that look alike, neither is sure."""
    ran = {number for number, each in first.ran.items() if each.ran}
    told = {host.function for host in first.record.hosts if host.count}
    found = {place for each in files for n, place in each.hosts.items() if str(n) not in told}
    for each in files:
        spots = each.before.spots
        found |= {(s.path, s.line, s.old) for s in spots if s.number not in ran}
    return found


def _judgement(
    found: MigrationVerification,
    own: Sequence[SiteComparison],
    unused: Sequence[str],
    *,
    never: bool,
) -> Judgement:
    """How sure a place is by two runs: by its own calls or values, and by no other ones.

    Args:
      found: what the runs say of all.
      own: what was mapped there, or what a host edit gave there.
      unused: functions that were mapped there, and never called.
      never: whether it never ran.
    """
    if never or unused:
        notes = (f"never called: {', '.join(unused)}",) if unused else ()
        return Judgement(Rung.NEVER_RAN, notes=notes)
    problems = [*found.problems, *(problem for site in own for problem in site.problems)]
    calls, equal = sum(site.calls_before for site in own), sum(site.compared for site in own)
    if problems or (not own and any(site.problems for site in found.sites)):
        said = tuple(problems) or ("what is mapped around it differs",)
        return Judgement(Rung.DIFFERENT, calls, 0, said)
    if found.before.exit_code != 0:
        return Judgement(Rung.RAN, notes=("the command failed before the migration",))
    if not own:
        return Judgement(Rung.RAN, notes=("it has no calls or values of its own to compare",))
    raised = sum(site.raised for site in own)
    if raised and not equal:
        return Judgement(Rung.RAISED, notes=("its calls raise the same error in both runs",))
    if not calls - raised == equal > 0:
        return Judgement(Rung.RAN)
    calls = equal
    same = Judgement(Rung.SAME_IN_TWO_RUNS, calls, equal)
    if unproved := next((site.unproved for site in own if site.unproved), ""):
        return replace(same, notes=(unproved,))
    return same.proved(each for site in own for each in site.signatures)
