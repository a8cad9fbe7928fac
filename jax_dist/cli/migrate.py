"""Move programs from jax.pmap to what replaces it: print a diff, or write the changes.

Comments and formatting outside the changes stay as they are.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jax_dist import _files
from jax_dist._usage import MisuseError, counted
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit
from jax_dist.lint.model.sources import display
from jax_dist.migrate.places import TARGETS

_EPILOG = """\
the targets:
  --to jax_dist   jax.pmap becomes jax_dist.pmap: names only, the smallest change
  --to vendored   the same, by one readable file of plain JAX that your project gets
  --to shard_map  jax.jit(jax.shard_map(...)) over one mesh, without the device axis
  --to jit        jax.jit with shardings over global arrays, where a run shows that the
                  numbers stay the same; else as shard_map. It needs a command.

With a command behind --, the old and the new program run in two copies of the tree, and
every call of every mapped function is compared bit for bit.

exit codes: 0 all is well, even if something would change,
            1 --check found something, a file could not be read or written, or numbers differ
            2 a path, an option or a setting is invalid

examples:
  jax-dist migrate src                          print a diff
  jax-dist migrate src | git apply              apply them, as --write does
  jax-dist migrate --write src/train.py:12      one place only
  jax-dist migrate --to shard_map --write src -- python train.py --steps 3
"""
_PATH_WITH_LINE = re.compile(r"(.+\.(?:py|ipynb)):(\d+)")


def add_parser(commands: Any) -> None:
    text = "move files and notebooks from pmap to jit(shard_map)"
    usage = "jax-dist migrate [options] PATH[:LINE] ... [-- COMMAND ...]"
    parser = terminal.add_command(
        commands, "migrate", _run, __doc__, _EPILOG, help=text, usage=usage
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files, notebooks and folders")
    add("--to", choices=TARGETS, default=TARGETS[0], help="the target (default: %(default)s)")
    mode = parser.add_mutually_exclusive_group()
    terminal.flag(mode, "--write", help="write the changes; else print a diff")
    terminal.flag(mode, "--check", help="only name the files that would change")
    terminal.flag(parser, "--concise", help="print one line a place, not a diff")
    add("--report", metavar="FILE", help="list every place: FILE.md, FILE.json, FILE.txt; - prints")
    add("--target-jax", metavar="VERSION", help="the oldest jax to run on")
    add("--exclude", action="append", default=[], metavar="PATTERN", help="skip paths that match")
    add("--devices", type=terminal.count, default=8, metavar="N", help="simulated CPU devices (8)")
    add("--timeout", type=terminal.seconds, metavar="SECONDS", help="for each run of the command")
    add("--config", metavar="FILE", help="settings file to use instead of the nearest one")
    terminal.flag(parser, "-q", "--quiet", help="no summary and no reasons")
    terminal.add_color(parser)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    _check_options(options)
    return _Migrate(options, out, err).run()


def _check_options(options: argparse.Namespace) -> None:
    """Raise MisuseError for options that do not go together."""
    if options.program and options.check:
        raise MisuseError("a command does not go with --check")
    if options.program or options.to == "jit":  # which needs a command; raises without one
        terminal.command_of(options, "migrate --to jit PATH")
    if options.report not in (None, "-"):
        if os.path.splitext(options.report)[1].lower() not in (".md", ".json", ".txt"):
            raise MisuseError(f"--report {options.report}: the name must end with .md, .json, .txt")
        if not os.path.isdir(os.path.dirname(options.report) or os.curdir):
            raise MisuseError(f"--report {options.report}: its directory does not exist")


class _Migrate:
    """One run of `jax-dist migrate`."""

    def __init__(self, options: argparse.Namespace, out: TextIO, err: TextIO) -> None:
        from jax_dist.lint.engine import config  # not at the top: `--help` need not wait for it
        from jax_dist.migrate.migration import MigrationOptions

        self._options, self._out, self._err = options, out, err
        self._failed = False
        paths: dict[str, None] = {}  # as an ordered set: a path with several lines occurs once
        lines: dict[str, frozenset[int]] = {}  # by path: the only lines to migrate
        for path in options.paths:
            path_with_line = _PATH_WITH_LINE.fullmatch(path)
            if path_with_line and not os.path.exists(path):
                path, line = path_with_line.groups()
                lines[path] = lines.get(path, frozenset()) | {int(line)}
            paths[path] = None
        self._paths = list(paths)
        jax_version = config.version(options.target_jax) if options.target_jax else None
        self._target = MigrationOptions(options.to, jax_version, lines)

    def run(self) -> Exit:
        """Migrate the files, verify them by a command if there is one, write and report."""
        from jax_dist.migrate.report import MigrationReport

        options = self._options
        files, file_count = self._migrate()
        verification = None
        if options.program and any(file.changed for file in files):
            files, verification = self._verify(files)
        if options.write:
            files = self._write_all(files)
        report = MigrationReport(options.to, files, verification)
        self._show(report)
        self._save(report)
        self._summarize(report, file_count)
        numbers_differ = verification is not None and verification.has_differences
        check_failed = options.check and bool(report.changed)
        return Exit.FINDINGS if self._failed or numbers_differ or check_failed else Exit.OK

    def _migrate(self) -> tuple[list[Any], int]:
        """Return the files with something to migrate or a problem, and how many were read."""
        from jax_dist.lint.engine import config
        from jax_dist.lint.model import sources
        from jax_dist.migrate import migration

        settings = config.load(self._paths, self._options.config)
        excluded = (*settings.excluded.texts, *self._options.exclude)
        patterns = sources.Patterns(excluded, settings.excluded.folder)
        tree = sources.find_files(self._paths, patterns)
        for reason in tree.skipped:
            self._complain(f"skipped: {reason}")
        with terminal.progress(self._err, "migrating files") as show:
            count = lambda done, total: show(f"{done} of {total} files migrated")
            return migration.migrate(tree.files, self._target, progress=count), len(tree.files)

    def _verify(self, files: Sequence[Any]) -> tuple[list[Any], Any]:
        """Run the program before and after the migration, and compare all mapped calls.

        Returns the files, unchanged if the numbers differ, and a `Verification`.
        """
        from jax_dist.migrate.verify import trial

        options = self._options
        try:
            with terminal.progress(
                self._err, "runs the program", is_quiet=options.quiet
            ) as progress:
                files, verification = trial.verify(
                    options.program,
                    files,
                    self._migrate_again,
                    devices=options.devices,
                    timeout=options.timeout,
                    progress=progress,
                )
        except KeyboardInterrupt:
            print("jax-dist migrate: interrupted; nothing was written", file=self._err)
            raise
        if verification.has_differences:
            self._complain("the program differs, so nothing is written")
            files = [dataclasses.replace(x, after=x.before) for x in files if not x.is_new]
        return list(files), verification

    def _migrate_again(self, places: Mapping[tuple[str, int], Any]) -> list[Any]:
        """Migrate the files again, with other targets for some places, by (path, line)."""
        fallbacks: dict[str, dict[int, Any]] = {}
        for (path, line), fallback in places.items():
            fallbacks.setdefault(path, {})[line] = fallback
        self._target = dataclasses.replace(self._target, fallbacks=fallbacks)
        return self._migrate()[0]

    def _show(self, report: Any) -> None:
        """Print the changes as the options ask for, and the results of verification."""
        from jax_dist.migrate.report import FORMATS, review_lines

        options = self._options
        if options.check:
            self._out.writelines(f"{display(file.path)}\n" for file in report.changed)
        elif options.concise:
            self._out.write(FORMATS[".txt"](report))
        elif not options.write and options.report != "-":
            for file in report.changed:
                self._print_diff(file)
        if report.verification is not None and not options.concise:
            stream = self._out if options.write else self._err  # standard output may be a diff
            print(report.verification, file=stream)
            stream.writelines(f"{line}\n" for line in review_lines(report))

    def _print_diff(self, file: Any) -> None:
        from jax_dist.lint.engine import fixer, linter

        encoding = "utf-8" if file.is_new else linter.load(file.path, file.before).encoding
        texts = (file.path, file.before, file.after, encoding)
        color = terminal.wants_color(self._options.color, self._out)
        self._out.write(fixer.diff(*texts, new=file.is_new, color=color))

    def _write_all(self, files: Sequence[Any]) -> list[Any]:
        """Write the changed files, and return all as they are now, with problems.

        A vendored module comes first: without it, the files that import it are not written.
        """
        failed_paths: set[str] = set()
        written: list[Any] = []
        for file in sorted(files, key=lambda file: not file.is_new):
            problem = ""
            if file.changed and file.needs_module in failed_paths:
                problem = f"{file.needs_module} could not be written"
            elif file.changed:
                problem = self._write(file)
            if problem:
                failed_paths.add(os.path.abspath(file.path))
                file = dataclasses.replace(file, after=file.before, problem=problem)
            written.append(file)
        return sorted(written, key=lambda file: file.is_new)

    def _write(self, file: Any) -> str:
        """Write a file and say so; return why it cannot be written, or an empty text."""
        try:
            if file.is_new and os.path.exists(file.path):
                return "it was created during the run; run migrate again"
            expected = None if file.is_new else file.before
            _files.write_atomically(file.path, file.after, expected=expected)
        except OSError as error:
            return f"it cannot be written: {error.strerror or error}"
        text = f"{'wrote' if file.is_new else 'migrated'} {display(file.path)}"
        places = sum(place.status == "done" for place in file.places)
        if places:
            text += f": {counted(places, 'place')}"
        self._say(text)
        return ""

    def _save(self, report: Any) -> None:
        """Write the file of --report; its suffix is the format, and "-" prints Markdown."""
        from jax_dist.migrate.report import FORMATS

        path = self._options.report
        if path == "-":
            self._out.write(FORMATS[".md"](report))
        elif path is not None:
            suffix = os.path.splitext(path)[1].lower()
            try:
                _files.write_atomically(path, FORMATS[suffix](report))
            except OSError as error:
                raise MisuseError(f"--report {path} cannot be written: {error.strerror}") from error

    def _summarize(self, report: Any, file_count: int) -> None:
        """Print what was migrated of the `file_count` files, what is left, and what to do next."""
        options = self._options
        for file in report.problems:
            self._complain(f"{display(file.path)} is left as it is: {file.problem}")
        if not report.places and not report.problems:
            self._say(f"Nothing to migrate in {counted(file_count, 'file')}.")
            return
        verb = "migrated" if options.write else "would change"
        self._say(f"{counted(len(report.changed), 'file')} {verb}: {report.count_places()}")
        mapped = [place for place in report.done if place.is_mapped and place.form != options.to]
        for places in report.group_by_reason([*report.left, *mapped]):
            others = f" and {counted(len(places) - 1, 'other place')}" if places[1:] else ""
            form = f"to {places[0].form}" if places[0].form else "left"
            self._say(f"  {form}: {display(places[0].where)}{others}: {places[0].reason}")
        if report.left and options.report is None:
            self._say("--report FILE.md lists every place, and what to do by hand.")
        if report.changed and not options.write and not options.check:
            self._say("Apply it with --write, or pipe the diff into `git apply`.")
        if report.changed and options.to == "shard_map" and not options.program:
            self._say("It is not verified: add a command that runs the program, as -- python a.py")

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=self._err)

    def _complain(self, text: str) -> None:
        self._failed = True
        print(f"jax-dist migrate: {text}", file=self._err)
