"""What `jax-dist lint` does with its options."""

import argparse
import functools
from collections.abc import Sequence, Sized
from typing import TextIO

from jax_dist import _files
from jax_dist._usage import MisuseError, counted, hint
from jax_dist.cli import outputs, terminal
from jax_dist.cli.terminal import Exit
from jax_dist.lint.engine import config, runner
from jax_dist.lint.engine.config import Choice, Config, selected, version
from jax_dist.lint.engine.linter import PAGES, Examiner, load
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Finding, Safety
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.sources import FoundFiles, Source, UnreadableError
from jax_dist.lint.output.context import RenderContext
from jax_dist.lint.output.report import FORMATS, statistics, summary

_STDIN = "-"
_BASELINE, _REPORT = "a baseline", "a report of jax-dist lint"


def _check(options: argparse.Namespace) -> None:
    """Raises MisuseError where options contradict each other."""
    if _STDIN in options.paths and len(options.paths) > 1:
        raise MisuseError("- reads the standard input, and goes with no other path")
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise MisuseError("say --fix with --unsafe-fixes to make the fixes, or --diff to see them")
    ways = ("fix", "diff", "write_baseline")
    asked = [f"--{way.replace('_', '-')}" for way in ways if getattr(options, way)]
    if len(asked) > 1 and asked != ["--fix", "--diff"]:
        raise MisuseError(f"{' and '.join(asked)} do not go together")
    if options.write_baseline is not None:
        outputs.check("--write-baseline", options.write_baseline, _BASELINE)
    if options.output_file is not None:
        outputs.check("--output-file", options.output_file, _REPORT)
    if options.output_format not in FORMATS:  # argparse does not look at the environment
        remedy = hint(options.output_format, FORMATS, f"Say {', '.join(FORMATS)}.")
        raise MisuseError(f"$JAX_DIST_OUTPUT_FORMAT is {options.output_format!r}. {remedy}")


def _examiner(options: argparse.Namespace, config: Config, paths: Sequence[str]) -> Examiner:
    """What to look for.

    Raises:
      MisuseError: an option names a rule or a version that is none.
    """
    asked = Choice(
        select=_words(options.select) if options.select else None,
        extend_select=_words(options.extend_select),
        ignore=_words(options.ignore),
    )
    target = options.target_jax
    return Examiner(
        codes=selected([config.choice, asked], PAGES),
        project=Project((*config.project_roots, *paths)),
        target=version(target) if target else config.target_jax,
        ignores=config.ignores(PAGES),
    )


def _words(texts: Sequence[str]) -> tuple[str, ...]:
    """`["JXD1,JXD2", "JXD401"]` as a tuple of three."""
    return tuple(word for text in texts for word in text.replace(",", " ").split())


def run(options: argparse.Namespace, *, stdin: TextIO, out: TextIO, err: TextIO) -> Exit:
    """One run of the command.

    Raises:
      MisuseError: a path, an option or a setting cannot be followed.
    """
    _check(options)
    lint = _Lint(options, stdin=stdin, out=out, err=err)
    if options.write_baseline:
        return lint.write_baseline()
    if options.diff:
        return lint.diff()
    return lint.fix() if options.fix else lint.report(lint.findings())


class _Lint:
    """One run: what it was asked for, and what it knows of the files."""

    def __init__(
        self, options: argparse.Namespace, *, stdin: TextIO, out: TextIO, err: TextIO
    ) -> None:
        self._options = options
        self._out, self._err = out, err
        self._stdin = stdin.buffer.read() if options.paths == [_STDIN] else None
        self._name = options.stdin_filename or _STDIN
        places = [self._name] if self._stdin is not None else options.paths
        self._config = config.load(places, options.config)
        self._config.check_codes(PAGES)
        self._examiner = _examiner(options, self._config, places)
        self._made: dict[str, bytes] = {}  # what mended files hold now, or would hold

    def findings(self) -> list[Finding]:
        """What is found in all files, and not switched off."""
        if self._stdin is not None:
            return runner.examined(self._name, self._stdin, self._examiner)
        with terminal.ProgressLine(self._err, "files checked") as progress:
            return runner.run(self._found.files, self._examiner, progress=progress)

    def report(self, findings: Sequence[Finding], out: TextIO | None = None) -> Exit:
        """Shows findings; the exit code says whether there are any."""
        findings = self._without_known(findings)
        self._show(findings, out or self._out)
        return self._exit(findings)

    def fix(self) -> Exit:
        """Mends files, and shows what is left."""
        left = self._mend(self.findings())
        if self._stdin is not None:
            terminal.write_bytes(self._out, self._made.get(self._name, self._stdin))
            return self.report(left, self._err)  # in the output they would become code
        return self.report(left)

    def diff(self) -> Exit:
        """Shows what `fix` would change."""
        from jax_dist.lint.engine import fixer  # only here: it is slow to load

        self._mend(self.findings(), write=False)
        colour = terminal.wants_colour(self._options.color, self._out)
        for path, after in self._made.items():
            before = self._read(path)
            encoding = load(path, before).encoding
            self._out.write(fixer.diff(path, before, after, encoding, colour=colour))
        return self._exit(self._made)

    def write_baseline(self) -> Exit:
        """Lists all findings in a file."""
        from jax_dist.lint.engine import suppressions

        findings, file = self.findings(), self._options.write_baseline
        outputs.save("--write-baseline", file, suppressions.baseline_of(findings, file), _BASELINE)
        self._say(f"Listed {counted(len(findings), 'finding')} in {file}.")
        return Exit.OK

    @functools.cached_property
    def _found(self) -> FoundFiles:
        found = sources.find_files(self._options.paths, self._config.excluded)
        for folder in found.unreadable:
            print(f"jax-dist lint: the folder {folder} cannot be read", file=self._err)
        if not found.files:
            self._say("There are no Python files or notebooks here.")
        return found

    def _mend(self, findings: Sequence[Finding], *, write: bool = True) -> list[Finding]:
        """Makes fixes; the findings that are left."""
        from jax_dist.lint.engine import fixer

        allowed = {Safety.SAFE, *([Safety.UNSAFE] if self._options.unsafe_fixes else [])}
        left: list[Finding] = []
        made = 0
        for path, group in _by_path(findings).items():
            if not any(finding.fix and finding.fix.safety in allowed for finding in group):
                left += group
                continue
            data = self._read(path)
            try:
                mended = fixer.mended(path, data, self._examiner, frozenset(allowed))
            except Exception as error:  # noqa: BLE001 - other files must not suffer
                left += [*group, runner.failed(path, error)]
                continue
            if mended.refused:
                print(f"{path}: some fixes were not made: {mended.refused}", file=self._err)
            on_disk = write and self._stdin is None and mended.data != data
            if on_disk and not self._rewrite(path, mended.data, data):
                left += group
                continue
            left += mended.findings
            made += len(mended.made)
            if mended.data != data:
                self._made[path] = mended.data
        word = "Mended" if write else "Would mend"
        if self._made or not write:
            files = counted(len(self._made), "file")
            self._say(f"{word} {counted(made, 'finding')} in {files}.")
        return left

    def _without_known(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        file = self._options.baseline or self._config.baseline
        if file is None:
            return findings
        from jax_dist.lint.engine import suppressions

        files = self._found.files if self._stdin is None else (self._name,)
        codes = self._examiner.codes
        compared = suppressions.beyond_baseline(findings, file, files=files, codes=codes)
        if compared.hidden:
            known = "finding" if compared.hidden == 1 else "findings"
            self._say(f"{file} hides {compared.hidden} known {known}.")
        for entry in compared.stale:
            self._say(f"{file}: {entry.path}: {entry.code} is gone: {entry.line}")
        if compared.stale:
            self._say(f"--write-baseline {file} takes out what is gone.")
        return compared.new

    def _show(self, findings: Sequence[Finding], out: TextIO) -> None:
        options = self._options
        file = options.output_file
        colour = terminal.wants_colour(options.color, out) and (
            file is None or options.color == "always"
        )
        context = RenderContext(PAGES, self._source, colour)
        if options.statistics and options.output_format == "text":
            text = statistics(findings) + summary(findings) + "\n"
        else:
            text = FORMATS[options.output_format](findings, context)
        if options.quiet and options.output_format == "text":
            text = text[: text[:-1].rfind("\n") + 1].rstrip("\n") + "\n" if findings else ""
        if file is None:
            out.write(text)
        else:
            outputs.save("--output-file", file, text, _REPORT)

    def _source(self, path: str) -> Source | None:
        """A file as it was when its findings were made."""
        try:
            return load(path, self._made[path] if path in self._made else self._read(path))
        except (OSError, UnreadableError):
            return None

    def _read(self, path: str) -> bytes:
        if self._stdin is not None:
            return self._stdin
        with open(path, "rb") as file:
            return file.read()

    def _rewrite(self, path: str, after: bytes, before: bytes) -> bool:
        """Whether the file could be written."""
        try:
            _files.write_atomically(path, after, expected=before)
        except OSError as error:
            print(f"{path} is left as it is: {error.strerror or error}", file=self._err)
            return False
        return True

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=self._err)

    def _exit(self, found: Sized) -> Exit:
        if self._stdin is None and self._found.unreadable:
            return Exit.USAGE
        return Exit.FINDINGS if found and not self._options.exit_zero else Exit.OK


def _by_path(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.path, []).append(finding)
    return groups
