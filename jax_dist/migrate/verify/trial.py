"""Proves a migration place by place: runs the program in a sandbox, and never writes to its files.

Two runs, before and after, in which each place tells that it ran, and what was mapped there. A
place is judged by its own calls and values; where something differs, a third run, before the
migration again, says what differs from run to run anyway.
"""

import ast
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.lint.model import sources
from jax_dist.migrate import pmap_renames
from jax_dist.migrate.results import FileMigration, PlaceResult
from jax_dist.migrate.verify import calls, comparison, edits, judging, sandbox
from jax_dist.migrate.verify.evidence import Run, RunRecord
from jax_dist.migrate.verify.judging import Own
from jax_dist.migrate.verify.ledger import (
    Ledger,
    LedgerEntry,
    MigrationVerification,
    Rung,
    SiteComparison,
)
from jax_dist.migrate.verify.program_text import Marked, ProgramText
from jax_dist.migrate.verify.sandbox import Workspace

_LENIENT = frozenset(pmap_renames.REMOVED.values())  # of what puts values on devices
_ONE = ".addressable_data("
_STEADY = "without the migration, the command computes the same twice"
_UNSTEADY = (
    "the command does not compute the same twice, even without the migration: with fixed seeds, "
    "its calls could be compared too"
)
_FAILS = "the command fails without the migration too, and a command that fails is no proof"
_FAILS_IN_COPY = (
    "in a copy of the project, the command fails without the migration too, and a command that "
    "fails is no proof: if it works where it is, it may need what a copy has not, as its own path, "
    "a pipe or .hg; allow user namespaces, and no copy is made"
)

_Place: TypeAlias = tuple[str, int, str]  # the path, the line before, what stands there


def verified(
    command: Sequence[str],
    files: Sequence[FileMigration],
    *,
    devices: int = 8,
    timeout: float | None = None,
    scratch: Iterable[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Ledger:
    """Runs a command, and says of each migrated place how sure it is.

    Args:
      command: the program to run and its arguments; any that imports jax in a Python of its own.
      files: before and after.
      devices: how many CPU devices to simulate.
      timeout: the seconds that each run may take.
      scratch: folders, empty or new, that it may write to where there is no overlay of all files.
      progress: is told what begins.

    Raises:
      MisuseError: a file no longer holds what it was migrated from, or there is no room.
      OSError: the command cannot be started.
    """
    plan = _Plan(files)
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


@dataclass(frozen=True)
class _MarkedFile:
    """One file, before and after, with marks."""

    path: str
    before: Marked
    texts: tuple[bytes, bytes]
    hosts: Mapping[int, _Place]  # by the number of a host edit
    moving: frozenset[int]  # the numbers of those that take the copy of one device


class _Plan:
    """What is run, and where its places are."""

    def __init__(self, files: Sequence[FileMigration]):
        # A place may change by what another file defines.
        files = [f for f in files if f.changed or any(o.status == "done" for o in f.outcomes)]
        self.before = {Path(f.path): f.before for f in files if not f.is_new}
        self.after = {Path(f.path): f.after for f in files}
        self.places = [o for f in files for o in f.outcomes if o.status == "done"]
        self.files: list[_MarkedFile] = []
        hosts = count = 0
        for file in files:
            if not file.is_new and file.path.endswith(".py"):
                marked = self._marked(file, count, hosts)
                self.files.append(marked)
                count, hosts = marked.before.count, hosts + len(marked.hosts)

    def _marked(self, file: FileMigration, first: int, hosts: int) -> _MarkedFile:
        """A file, with a place for each edit that no outcome speaks of."""
        old, new = (sources.read(file.path, d).code.decode() for d in (file.before, file.after))
        program = ProgramText(old)
        new = edits.with_names_kept(program.tree, new)
        other = ast.parse(new)
        told = [o for o in self.places if o.path == file.path]
        names, own = {}, [*told]
        for change in edits.changes(program, other):
            if change.imported in {o.what for o in told} - {""}:
                continue  # each use of it is a place
            if not any(_covers(program, o, change) for o in told):
                own.append(PlaceResult(file.path, change.line, None, "", "done", change.what))
                names[change.line, change.what] = change.imported
        self.places += own[len(told) :]
        olds, news, at = {}, {}, {}
        for one, two in edits.host_edits(program.tree, other):
            if (place := _place_of(program, own, one.node)) is not None:
                number = hosts + len(at)
                olds[number], news[number], at[number] = one, two, key(place)
        wanted = [(o.line, o.what, names.get((o.line, o.what), "")) for o in own]
        sides = Marked(old, wanted, first, olds), Marked(new, (), 0, news)
        texts = zip((file.before, file.after), sides, strict=True)
        data = [sources.read(file.path, d).written(m.text.encode()) for d, m in texts]
        taking = frozenset(n for n, form in news.items() if _ONE in form.around(""))
        return _MarkedFile(file.path, sides[0], (data[0], data[1]), at, taking)


def key(place: PlaceResult) -> _Place:
    return place.path, place.line, place.what


def _covers(program: ProgramText, place: PlaceResult, change: edits.Change) -> bool:
    """Whether a change belongs to a place."""
    spans = program.extents(place.line, place.what)
    if change.span is None or not spans:
        return change.line in _lines(place)
    start, stop = change.span
    return any(a < stop and start < b for a, b in spans)


def _lines(place: PlaceResult) -> range:
    return range(place.line, place.line + place.what.count("\n") + 1)


def _place_of(
    program: ProgramText, places: Iterable[PlaceResult], node: ast.expr
) -> PlaceResult | None:
    """The place that an expression is, or that is the statement around it."""
    text = program.between(*program.span(node))
    for place in places:
        is_statement = node.lineno in _lines(place) and not program.spans(place.line, place.what)
        if is_statement or (place.line, place.what) == (node.lineno, text):
            return place
    return None


class _Trial:
    def __init__(self, stage: Workspace, plan: _Plan, progress: Callable[[str], None]):
        self._stage, self._plan, self._progress = stage, plan, progress
        self._notes: list[str] = []
        self._refused: dict[str, None] = {}  # files that the runs may not write to, in order

    def ledger(self) -> Ledger:
        plan = self._plan
        self._progress("running the command before the migration")
        first = self._before()
        self._progress("running the command after it")
        marked = {Path(each.path): each.texts[1] for each in plan.files}
        second = self._run(plan.after | marked)
        runs, values = self._compared(first, second, None)
        if runs.differs or any(each.problems for each in values.values()):
            self._progress("running the command before the migration again, for something differs")
            again = self._before()
            alone, others = self._compared(first, again, None)
            steady = not (alone.differs or any(each.problems for each in others.values()))
            self._notes.append(_STEADY if steady else _UNSTEADY)
            runs, values = self._compared(first, second, again)
        entries = self._entries(first, second, runs, values)
        entries, problems = _with_unexplained(entries, runs)
        self._notes += [*runs.unproven, *runs.notes]
        if first.exit_code != 0 and second.exit_code != 0:
            self._notes.append(_FAILS if self._stage.way == "overlay" else _FAILS_IN_COPY)
        self._notes += self._of_writing(failed=second.exit_code != 0)
        return Ledger(
            command=tuple(self._stage.command),
            entries=tuple(sorted(entries, key=lambda each: (each.path, each.line))),
            kept_apart=self._stage.way,
            exit_code=second.exit_code,
            output=runs.after.output if second.exit_code != 0 else "",
            runs=runs,
            problems=tuple(dict.fromkeys((*runs.problems, *problems))),
            notes=tuple(self._notes),
        )

    def _before(self) -> Run:
        """The program as it was, with the lines of its places as they were."""
        ran = self._run({Path(each.path): each.texts[0] for each in self._plan.files})
        unmarked = {os.path.realpath(each.path): each.before for each in self._plan.files}
        for site in ran.record.sites:
            if site.file in unmarked:
                site.line = unmarked[site.file].line_before(site.line)
        return ran

    def _run(self, changes: Mapping[Path, bytes]) -> Run:
        ran = self._stage.recorded(changes, self._plan.after)
        self._refused |= dict.fromkeys(ran.refused)
        return ran

    def _compared(
        self, first: Run, second: Run, again: Run | None
    ) -> tuple[MigrationVerification, dict[int, SiteComparison]]:
        """What two runs say of mapped functions, and of host edits, by the record of these."""
        command, files = self._stage.command, self._plan.after
        runs = comparison.judged(command, first, second, again, files=files)
        codes = {key(place): place.code for place in self._plan.places}
        moving = {
            str(n)
            for each in self._plan.files
            for n, at in each.hosts.items()
            if codes[at] in _LENIENT or n in each.moving
        }
        partners, others = (
            {} if run is None else {(e.process, e.function): e for e in run.record.hosts}
            for run in (second, again)
        )
        values = {}
        for one in first.record.hosts:
            if one.count:
                name = one.process, one.function
                ignored = comparison.unsteady(one, others.get(name)) if again is not None else ()
                values[id(one)] = calls.compare(
                    one,
                    partners.get(name),
                    may_move=one.function in moving,
                    ignored=ignored,
                )
        return runs, values

    def _entries(
        self,
        first: Run,
        second: Run,
        runs: MigrationVerification,
        values: Mapping[int, SiteComparison],
    ) -> list[LedgerEntry]:
        """Each place by its own calls and values."""
        inside = comparison.pairs_inside(first.record, second.record)
        numbers = _numbers(self._plan)
        entries = []
        for place, own, by_line in numbers:
            path, mine = os.path.realpath(place.path), set(own)
            sites = [s for s in first.record.sites if s.places & mine]
            if by_line:
                lines = _lines(place)
                sites += [s for s in first.record.sites if s.file == path and s.line in lines]
            file = next((each for each in self._plan.files if each.path == place.path), None)
            hosts = {str(n) for n, at in file.hosts.items() if at == key(place)} if file else set()
            given = [h for h in first.record.hosts if h.function in hosts]
            told = {h.function for h in given if h.count or h.inside}
            found = Own(
                ran=bool(mine) and mine <= first.ran and told == hosts,
                alone=bool(mine & first.alone) and not given and not (by_line and sites),
                sites=[s for s in sites if s.is_mapped],
                values=[values[id(h)] for h in given if id(h) in values],
                around=[s for s in first.record.sites if s.around & mine],
            )
            entries.append(judging.entry(place, judging.judged(found, runs, inside)))
        return entries

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


def _numbers(plan: _Plan) -> Iterator[tuple[PlaceResult, list[int], bool]]:
    """Each place, the numbers that are its own, and whether its calls are those of its lines.

    Of several places that look alike in one line, each has its own.
    """
    for place in plan.places:
        marked = next((each.before for each in plan.files if each.path == place.path), None)
        at = place.line, place.what
        numbers = marked.numbers.get(at, []) if marked else []
        alike = [other for other in plan.places if key(other) == key(place)]
        if len(alike) == len(numbers):
            numbers = [numbers[next(i for i, each in enumerate(alike) if each is place)]]
        yield place, numbers, marked is not None and at in marked.by_line


def _with_unexplained(
    entries: Sequence[LedgerEntry], runs: MigrationVerification
) -> tuple[Sequence[LedgerEntry], tuple[str, ...]]:
    """No place is sure where something differs that none of them explains."""
    problems = [
        *runs.problems,
        *(
            f"{site.file}:{site.line} {site.function}, {said}"
            for site in runs.sites
            for said in site.problems
        ),
    ]
    if not problems or any(each.rung is Rung.DIFFERENT for each in entries):
        return entries, ()
    said = calls.first_few(problems)
    lowered = {"rung": Rung.DIFFERENT, "rules": (), "signatures": (), "problems": said}
    return [replace(each, **lowered) for each in entries], said
