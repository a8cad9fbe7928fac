"""What `jax-dist migrate` does with its options."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist import _files
from jax_dist._usage import MisuseError, counted
from jax_dist.cli import migrate_forms, outputs, terminal
from jax_dist.cli.terminal import Exit
from jax_dist.lint.engine import config, fixer
from jax_dist.lint.engine.linter import load
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.sources import Patterns
from jax_dist.migrate import helper_homes, migration, report
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.report import MigrationReport
from jax_dist.migrate.results import (
    AXIS_STAYS,
    UNSHOWN,
    FileMigration,
    Form,
    ProjectContext,
)

if TYPE_CHECKING:
    from jax_dist.migrate.recorded_flow import RecordedFlow
    from jax_dist.migrate.verify.ledger import Ledger, LedgerEntry, Rung

_STDIN = "-"
_FULL = "full"  # of --helpers: not the path of a module
_CERTIFICATE, _REPORT = "a certificate", "a report of jax-dist migrate"
_ONLY_WITH = {"one_process": ("jax", "global"), "all_devices": ("jax",), "helpers": ("jax",)}


def run(options: argparse.Namespace, *, stdin: TextIO, out: TextIO, err: TextIO) -> Exit:
    """One run of the command.

    Raises:
      MisuseError: a path, an option or a setting cannot be followed.
    """
    _check(options)
    return _Migrate(options, stdin=stdin, out=out, err=err).run()


def _check(options: argparse.Namespace) -> None:
    if _STDIN in options.paths and len(options.paths) > 1:
        raise MisuseError("- reads the standard input, and goes with no other path")
    if _STDIN in options.paths and options.verify:
        raise MisuseError("--verify needs files, not the standard input")
    if options.idiomatic and options.to != "jax":
        raise MisuseError("--idiomatic goes with --to jax only")
    for name, targets in _ONLY_WITH.items():
        if getattr(options, name) and options.to not in targets:
            wanted = " and ".join(f"--to {target}" for target in targets)
            raise MisuseError(f"--{name.replace('_', '-')} goes with {wanted} only")
    modules = [each for each in options.helpers if each != _FULL]
    for each in modules:
        if not each.endswith(".py"):
            raise MisuseError(f"--helpers {each}: the name must end with .py, or be {_FULL}")
        if why := helper_homes.misfit(each):
            better = os.path.join(os.path.dirname(each), helper_homes.NAMES[0])
            raise MisuseError(f"--helpers {each}: {why}. Give another name, as {better}.py")
    if len(modules) > 1:
        raise MisuseError(f"--helpers names one module, not {counted(len(modules), 'module')}")
    if (options.idiomatic or options.to == "global") and not options.verify:
        option = "--idiomatic" if options.idiomatic else "--to global"
        what = "the device axis" if options.idiomatic else "a state"
        raise MisuseError(
            f"{option} asks a run of the program what carries {what}: add --verify and, behind --, "
            "a command that runs the code"
        )
    if options.program and shutil.which(options.program[0]) is None:
        raise MisuseError(f"{options.program[0]} cannot be started: there is no such program")
    if options.verify and not options.program:
        raise MisuseError("--verify needs a command: jax-dist migrate --verify src -- python a.py")
    if options.program and not options.verify:
        raise MisuseError("what stands behind -- is the command of --verify, which is not given")
    if options.verify and options.check:
        raise MisuseError("--check changes nothing, so there is nothing to --verify")
    if options.certificate is not None:
        if not (options.verify and options.write):
            raise MisuseError(
                "--certificate speaks of files that are verified and written: add "
                "--verify and --write"
            )
        if _suffix(options.certificate) != ".json":
            raise MisuseError(f"--certificate {options.certificate}: the name must end with .json")
        outputs.check("--certificate", options.certificate, _CERTIFICATE)
    if options.report not in (None, _STDIN):
        if _suffix(options.report) not in report.FORMS:
            raise MisuseError(
                f"--report {options.report}: the name must end with .md, .json or .sarif"
            )
        outputs.check("--report", options.report, _REPORT)


class _Migrate:
    def __init__(
        self, options: argparse.Namespace, *, stdin: TextIO, out: TextIO, err: TextIO
    ) -> None:
        self._options = options
        self._stdin, self._out, self._err = stdin, out, err
        self._name = options.stdin_filename or "stdin.py"
        self._failed = False  # a file could not be written
        self._paths: tuple[str, ...] = ()
        self._attempts: list[tuple[str, Ledger]] = []  # at a proof: what each was, what it found
        target = options.target_jax
        is_tried = options.verify and not options.keep and options.to != "jax_dist"
        self._aim = MigrationOptions(
            to=options.to,
            promises=Promises(options.one_process, options.all_devices),
            plainest=Form.IDIOMATIC if options.idiomatic else Form.DIRECT,
            is_tried=is_tried,
            slow_idioms=options.idiomatic,
            full_helpers=_FULL in options.helpers,
            target=config.version(target) if target else None,
        )

    def run(self) -> Exit:
        files, context, looked_at = self._migrated()
        places = (place for file in files for place in file.outcomes)
        is_run = self._options.verify and self._options.to != "jax_dist"
        if is_run and any(place.status == "done" or place.reason == UNSHOWN for place in places):
            self._aim = dataclasses.replace(self._aim, flow=self._flow(files, context))
            files, context, looked_at = self._migrated()
        proof = None
        if self._options.verify:
            files, proof = self._verified(files)
        if self._options.write and self._options.paths != [_STDIN]:
            files = self._written(files)
        self._show(files, proof)
        self._certify(files, proof)
        found = self._report(files, context, proof)
        self._summarize(found, looked_at)
        differs = proof is not None and bool(proof.below(self._required()) or proof.problems)
        would = self._options.check and bool(found.changed)
        return Exit.FINDINGS if self._failed or differs or would else Exit.OK

    # --- reading

    def _migrated(self) -> tuple[list[FileMigration], ProjectContext, int]:
        """What each file becomes, their projects, and how many were looked at."""
        if self._options.paths == [_STDIN]:
            data = self._stdin.buffer.read()
            context = ProjectContext(Project())
            found = migration.of_text(self._name, data, context, self._aim)
            return [found or FileMigration(self._name, data, data)], context, 1
        settings = config.load(self._options.paths, self._options.config)
        texts = (*settings.excluded.texts, *self._options.exclude)
        patterns = Patterns(texts, settings.excluded.folder)
        seen = sources.find_files(self._options.paths, patterns)
        for folder in seen.unreadable:
            self._complain(f"the folder {folder} cannot be read")
        self._paths = paths = seen.files
        with terminal.ProgressLine(self._err, "files migrated") as progress:
            found, context = self._of_paths(self._aim, progress=progress)
        return found, context, len(paths)

    def _of_paths(
        self, aim: MigrationOptions, **options: Any
    ) -> tuple[list[FileMigration], ProjectContext]:
        path = next((each for each in self._options.helpers if each != _FULL), "")
        return migration.migrate(self._paths, aim, helpers=path, **options)

    # --- proof

    def _flow(
        self, files: Sequence[FileMigration], context: ProjectContext
    ) -> "RecordedFlow | None":
        """Which values carry the device axis, by a run of the command as it is."""
        from jax_dist.migrate.recorded_flow import WatchedFiles
        from jax_dist.migrate.verify import trial

        modules = [
            context.project.module(load(file.path, file.before))
            for file in files
            if file.path.endswith(".py") and file.outcomes and not (file.problem or file.is_new)
        ]
        watched = WatchedFiles(modules)
        with self._running() as options:
            record = trial.watched(tuple(self._options.program), watched.texts, **options)
        return watched.flow(record, self._options.devices)

    def _verified(
        self, files: Sequence[FileMigration]
    ) -> "tuple[Sequence[FileMigration], Ledger | None]":
        """What is left of a migration when its places have been tried, and how sure they are.

        None where there is nothing to try.
        """
        if not any(file.changed for file in files):
            return files, None
        proof = self._tried(files, "with all places")
        if self._options.keep or not self._lacking(files, proof):
            return files, proof
        files, proof = self._kept(files, proof)
        proof = proof.with_attempts(self._attempts)
        back = {each.key: each for each in proof.entries if each.put_back}
        return [migrate_forms.with_reasons(file, back) for file in files], proof

    def _kept(
        self, files: Sequence[FileMigration], proof: "Ledger"
    ) -> "tuple[Sequence[FileMigration], Ledger]":
        """The places in the plainest form that is as sure as required; others are put back."""
        put_back: dict[tuple[str, int, str], LedgerEntry] = {}
        while lacking := self._lacking(files, proof):
            forms = {
                migrate_forms.key(place): place.form for file in files for place in file.outcomes
            }
            lacking, lowest = migrate_forms.to_lower(lacking, forms)
            put_back |= {each.key: each for each in lowest}
            before = _result(files)
            for limits in migrate_forms.lower(files, forms, lacking):
                known = dict(self._aim.limits)
                known |= {at: min(form, known.get(at, form)) for at, form in limits.items()}
                self._aim = dataclasses.replace(self._aim, limits=known)
                files, _, _ = self._migrated()
                if _result(files) != before:
                    break
            else:
                raise MisuseError("some places are not proved, and cannot be put back; report this")
            if not any(file.changed for file in files):
                proof = proof.only(())
                break
            how = "with the places that are left" if lowest else "with other forms"
            proof = self._tried(files, how)
        return files, proof.with_put_back(put_back.values())

    def _lacking(self, files: Sequence[FileMigration], proof: "Ledger") -> "list[LedgerEntry]":
        return migrate_forms.lacking(files, proof, self._required())

    def _tried(self, files: Sequence[FileMigration], how: str) -> "Ledger":
        """How sure each place is; `how` is what is tried, for the report."""
        from jax_dist.migrate.verify import trial

        with self._running() as options:
            proof = trial.verified(tuple(self._options.program), files, **options)
        self._attempts.append((how, proof))
        return proof

    @contextlib.contextmanager
    def _running(self) -> Iterator[dict[str, Any]]:
        """The options of runs of the command, whose progress is shown meanwhile."""
        with terminal.ProgressLine(self._err) as progress:
            yield {
                "devices": self._options.devices,
                "timeout": self._options.timeout,
                "scratch": self._options.scratch,
                "progress": (lambda line: None) if self._options.quiet else progress.print,
            }

    def _certify(self, files: Sequence[FileMigration], proof: "Ledger | None") -> None:
        """Writes the certificate of what is on the disk now."""
        path = self._options.certificate
        if path is None or proof is None:
            return
        from jax_dist.migrate.verify import certificate

        folder = os.path.dirname(os.path.abspath(path))
        found = certificate.made(
            ({**each.to_dict(), "signatures": each.signatures} for each in proof.entries),
            command=proof.command,
            files=((file.path, file.before, file.after) for file in files if file.changed),
            folder=folder,
        )
        text = json.dumps(found, separators=(",", ":")) + "\n"
        outputs.save("--certificate", path, text, _CERTIFICATE)

    # --- showing

    def _show(self, files: Sequence[FileMigration], proof: "Ledger | None") -> None:
        changed = [file for file in files if file.changed]
        if self._options.write:
            if self._options.paths == [_STDIN]:
                terminal.write_bytes(self._out, files[0].after)
        elif self._options.check:
            for file in changed:
                print(file.path, file=self._out)
        elif self._options.report != _STDIN:
            colour = terminal.wants_colour(self._options.color, self._out)
            for file in changed:
                encoding = load(file.path, file.before).encoding
                texts = (file.path, file.before, file.after, encoding)
                self._out.write(fixer.diff(*texts, new=file.is_new, colour=colour))
        if proof is not None:
            print(proof, file=self._out)

    def _written(self, files: Sequence[FileMigration]) -> list[FileMigration]:
        """The files as they are now: one that cannot be written does not keep others from it.

        Only a helper module does: it is written first.
        """
        needed = {each.helpers.path for each in files if each.helpers is not None}
        order = sorted(files, key=lambda file: os.path.abspath(file.path) not in needed)
        lost: set[str] = set()
        now: dict[str, FileMigration] = {}
        for file in order:
            if file.helpers is not None and file.helpers.path in lost:
                problem = "the module for its helpers could not be written"
                now[file.path] = FileMigration(file.path, file.before, file.before, problem=problem)
                continue
            now[file.path] = self._written_one(file)
            if now[file.path].problem:
                lost.add(os.path.abspath(file.path))
        used = {each.helpers.path for each in now.values() if each.helpers is not None}
        for file in files:
            if file.is_new and now[file.path].changed and os.path.abspath(file.path) not in used:
                os.remove(file.path)
                self._say(f"removed {file.path}: no file that needs it could be written")
                del now[file.path]
        return [now[file.path] for file in files if file.path in now]

    def _written_one(self, file: FileMigration) -> FileMigration:
        if not file.changed:
            return file
        try:
            expected = None if file.is_new else file.before
            _files.write_atomically(file.path, file.after, expected=expected)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            done = sum(outcome.status == "done" for outcome in file.outcomes)
            what = "wrote" if file.is_new else "refreshed" if not done else "migrated"
            self._say(f"{what} {file.path}" + (f": {counted(done, 'place')}" if done else ""))
            return file
        return FileMigration(file.path, file.before, file.before, problem=problem)

    # --- saying

    def _report(
        self, files: Sequence[FileMigration], context: ProjectContext, proof: "Ledger | None"
    ) -> MigrationReport:
        made = MigrationReport(
            self._options.to,
            files,
            None if proof is None else proof.to_dict(),
            "" if proof is None else str(proof),
            tuple(report.cautions_of(files, context, self._aim)),
        )
        where = self._options.report
        if where == _STDIN:
            self._out.write(report.FORMS[".md"](made))
        elif where is not None:
            outputs.save("--report", where, report.FORMS[_suffix(where)](made), _REPORT)
        return made

    def _summarize(self, found: MigrationReport, looked_at: int) -> None:
        for file in found.problems:
            self._complain(f"{file.path} is left as it is: {file.problem}")
        if not found.outcomes and not found.problems:
            self._say(f"Nothing to migrate in {counted(looked_at, 'file')}.")
            return
        verb = "migrated" if self._options.write else "would change"
        self._say(
            f"{counted(len(found.changed), 'file')} {verb}: "
            f"{counted(len(found.done), 'place')} done, {len(found.left)} left."
        )
        for caution in found.cautions:
            self._say(caution)
        for places in found.by_reason():
            first, more = places[0], len(places) - 1
            others = f" and {counted(more, 'other place')}" if more else ""
            self._say(f"  left: {first.where}{others}: {first.why}")
        for where, more, why in found.with_axis() if self._options.idiomatic else ():
            others = f" and {counted(more, 'other place')}" if more else ""
            self._say(f"  {AXIS_STAYS} in {where}{others}: {why}")
        if found.left and not self._options.quiet:
            if (further := self._further(len(found.left))) is not None:
                self._say(further)
            if self._options.report is None:
                self._say("--report FILE.md lists every place, and what to do by hand.")

    def _further(self, left: int) -> str | None:
        """The option that leaves fewer places, by trying it; None where none does."""
        if self._options.to == "jax_dist" or self._options.paths == [_STDIN]:
            return None
        promises = dataclasses.replace(self._aim.promises, one_process=True)
        alone = dataclasses.replace(self._aim, promises=promises)
        ours = dataclasses.replace(self._aim, to="jax_dist", promises=Promises())
        for option, aim in (("--one-process", alone), ("--to jax_dist", ours)):
            if aim == self._aim:  # it was given
                continue
            files, _ = self._of_paths(aim)
            places = (place for file in files for place in file.outcomes)
            # What a run has not shown may be done yet.
            fewer = left - sum(e.status == "left" and e.reason != UNSHOWN for e in places)
            if fewer > 0:
                promise = " It is a promise about the program." if aim is alone else ""
                return f"{option} would leave {fewer} fewer.{promise}"
        return None

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=self._err)

    def _complain(self, text: str) -> None:
        self._failed = True
        print(f"jax-dist migrate: {text}", file=self._err)

    def _required(self) -> "Rung":
        from jax_dist.migrate.verify.ledger import REQUIREMENTS

        return REQUIREMENTS[self._options.require]


def _result(files: Sequence[FileMigration]) -> dict[str, Any]:
    """What comes out: the texts, and whether each place counts as done."""
    return {file.path: (file.after, [e.status for e in file.outcomes]) for file in files}


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
