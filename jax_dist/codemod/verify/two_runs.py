"""Judges places by two runs of the command, before and after: for what one program cannot hold.

A mapped function is judged by its own calls, a host edit by its values. Any other place is judged
by all mapped functions of the program, and by what that prints.
"""

import ast
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jax_dist.checker.model import sources
from jax_dist.codemod.results import FileMigration, PlaceResult
from jax_dist.codemod.verify import comparison, host_edits, marked_program, slices
from jax_dist.codemod.verify.equivalence import NotProvedError
from jax_dist.codemod.verify.evidence import Evidence, Judgement, entry
from jax_dist.codemod.verify.host_edits import HostForm
from jax_dist.codemod.verify.ledger import LedgerEntry, Rung
from jax_dist.codemod.verify.marked_program import Marked
from jax_dist.codemod.verify.program_text import ProgramText
from jax_dist.codemod.verify.runs import Run, Workspace
from jax_dist.codemod.verify.verdict import judged
from jax_dist.codemod.verify.verification import MigrationVerification, SiteComparison

_STEADY = "without the migration, the command computes the same twice"
_UNSTEADY = (
    "the command does not compute the same twice, even without the migration: give it fixed seeds"
)

_Place: TypeAlias = tuple[str, int, str]  # the path, the line before, what stands there


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """A run before and a run after, and what they say of the places."""

    found: MigrationVerification
    note: str  # of a third run, where something differs
    _ran: Mapping[tuple[str, int], bool]  # by path and line: whether the statement there ran
    _hosts: Mapping[_Place, Sequence[SiteComparison]]

    def entries(self, places: Iterable[PlaceResult]) -> Iterator[LedgerEntry]:
        """Each place by its own function or values, else by all mapped functions."""
        for place in places:
            sites = [each for each in self.found.sites if _is_at(each, place)]
            own = sites or self._hosts.get((place.path, place.line, place.what), ())
            ran = self._ran.get((place.path, place.line), False)
            yield entry(place, [_judgement(self.found, own, ran=ran)])


def made(
    stage: Workspace,
    files: Sequence[FileMigration],
    places: Sequence[PlaceResult],
    *,
    tolerance: float,
    progress: Callable[[str], None],
) -> TwoRuns:
    """Runs the command of a stage before and after.

    Args:
      stage: where.
      files: that were migrated.
      places: that are to be judged.
      tolerance: how far a float may differ, relative to the largest of its array.
      progress: is told what begins.
    """
    texts = list(_texts(files, places))
    paths = {Path(each.path) for each in files if each.changed}
    judge = functools.partial(judged, stage.command, files=paths, tolerance=tolerance)
    before = {Path(f.path): f.before for f in files if f.changed and not f.is_new}
    after = {Path(f.path): f.after for f in files if f.changed}
    progress("running the command before the migration")
    first = _on_lines_before(stage.recorded({t.at: t.bytes_before for t in texts}, paths), texts)
    progress("running the command after it")
    second = stage.recorded(after | {t.at: t.bytes_after for t in texts}, paths)
    found, note = judge(first, second), ""
    if found.differs:
        progress("running the command before the migration again, for something differs")
        third = stage.recorded(before, paths)
        note = _UNSTEADY if judge(first, third).differs else _STEADY
    ran = {
        (spot.path, spot.line): first.ran.get(spot.number, Evidence()).ran
        for text in texts
        for spot in text.before.spots
    }
    return TwoRuns(found, note, ran, _hosts(texts, first, second, tolerance))


# --- the texts that are run


@dataclass(frozen=True, slots=True)
class _Texts:
    """Of one file, before and after, both with marks."""

    file: FileMigration
    before: Marked
    after: Marked
    hosts: Mapping[int, _Place]

    @property
    def at(self) -> Path:
        return Path(self.file.path)

    @property
    def bytes_before(self) -> bytes:
        return _read(self.file, self.file.before).written(self.before.text.encode())

    @property
    def bytes_after(self) -> bytes:
        return _read(self.file, self.file.after).written(self.after.text.encode())


def _texts(files: Sequence[FileMigration], places: Sequence[PlaceResult]) -> Iterator[_Texts]:
    spots = hosts = 0
    for file in files:
        own = [place for place in places if place.path == file.path]
        if not own or not file.changed or file.is_new or not file.path.endswith(".py"):
            continue
        one, other = (_read(file, each).code.decode() for each in (file.before, file.after))
        forms = dict(enumerate(_host_edits(one, other, own), hosts))
        hosts += len(forms)
        lines = sorted({place.line for place in own})
        olds, news = ({n: pair[side] for n, (_, pair) in forms.items()} for side in (0, 1))
        before = marked_program.marked(file.path, one, lines, spots, olds)
        after = marked_program.marked(file.path, other, (), spots, news)
        spots += len(before.spots)
        yield _Texts(file, before, after, {number: place for number, (place, _) in forms.items()})


def _host_edits(
    one: str, other: str, places: Iterable[PlaceResult]
) -> Iterator[tuple[_Place, tuple[HostForm, HostForm]]]:
    """Those that are places."""
    known = {(place.line, place.what): place for place in places if place.cell is None}
    before = ProgramText(one)
    for edit in host_edits.find(before.tree, ast.parse(other)):
        what = before.between(*before.span(edit.before.node))
        if (place := known.get((edit.line, what))) is not None:
            yield (place.path, place.line, place.what), (edit.before, edit.after)


def _read(file: FileMigration, data: bytes) -> sources.Source:
    return sources.read(file.path, data)


# --- what they say


def _on_lines_before(run: Run, texts: Iterable[_Texts]) -> Run:
    """The same, with the lines that the files have without marks."""
    by_file = {os.path.realpath(text.at): text.before for text in texts}
    sites = tuple(
        dataclasses.replace(site, line=by_file[site.file].line_before(site.line))
        if site.file in by_file
        else site
        for site in run.record.sites
    )
    return dataclasses.replace(run, record=dataclasses.replace(run.record, sites=sites))


def _hosts(
    texts: Iterable[_Texts], first: Run, second: Run, tolerance: float
) -> dict[_Place, list[SiteComparison]]:
    """The values of each host edit, in each process of the program."""
    partners = {(each.process, each.function): each for each in second.record.hosts}
    places = {str(number): place for text in texts for number, place in text.hosts.items()}
    found: dict[_Place, list[SiteComparison]] = {}
    for host in first.record.hosts:
        if host.count:
            partner = partners.get((host.process, host.function))
            compared = comparison.compare(host, partner, tolerance)
            found.setdefault(places[host.function], []).append(compared)
    return found


def _is_at(site: SiteComparison, place: PlaceResult) -> bool:
    last = place.line + place.what.count("\n")
    return os.path.realpath(site.file) == os.path.realpath(place.path) and (
        place.line <= site.line <= last
    )


def _judgement(
    found: MigrationVerification, own: Sequence[SiteComparison], *, ran: bool
) -> Judgement:
    problems = [*found.problems, *(problem for site in own for problem in site.problems)]
    calls = sum(site.calls_before for site in own or found.sites)
    equal = sum(site.compared for site in own or found.sites)
    if problems or (not own and any(site.problems for site in found.sites)):
        said = tuple(problems) or ("what is mapped around it differs",)
        return Judgement(Rung.DIFFERENT, calls, 0, said)
    if not own and not ran:
        return Judgement(Rung.NEVER_RAN)
    if found.before.exit_code != 0:
        return Judgement(Rung.RAN, notes=("the command failed before the migration",))
    if own and calls == equal > 0:
        return _by_texts(Judgement(Rung.SAME_RUNS, calls, equal), own)
    if own or not calls or calls != equal:
        return Judgement(Rung.RAN)
    if any(note.startswith("the output differs") for note in found.notes):
        return Judgement(Rung.RAN, notes=("what the program prints differs",))
    return Judgement(Rung.SAME_RUNS, notes=("by the mapped calls around it",))


def _by_texts(same: Judgement, own: Sequence[SiteComparison]) -> Judgement:
    """More than that the runs were the same, where the texts of all programs show it."""
    signatures = tuple(each for site in own for each in site.signatures)
    if unproved := next((site.unproved for site in own if site.unproved), ""):
        return dataclasses.replace(same, notes=(unproved,))
    rules: set[str] = set()
    try:
        for signature in signatures:
            rules |= set(slices.proof(signature).rules)
    except NotProvedError as reason:
        return dataclasses.replace(same, notes=(f"its programs differ: {reason}",))
    rung = Rung.BY_RULES if rules else Rung.SAME_PROGRAM
    ordered = tuple(sorted(rules))
    return dataclasses.replace(same, rung=rung, rules=ordered, signatures=signatures)
