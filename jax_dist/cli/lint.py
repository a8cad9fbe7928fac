"""Find pmap-era code in Python files and notebooks, without running or importing them.

Every finding has a code; docs/rules.md says why it matters and what to write instead.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jax_dist import _files
from jax_dist._usage import MisuseError, counted
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_FORMATS = ("text", "concise", "json", "github")
_STDIN = "-"

_EPILOG = """\
exit codes: 0 nothing was found, 1 something was (with --diff: something would change),
            2 a path, an option or a setting is invalid

suppress findings:
  step = jax.pmap(f)  # noqa: JXD001            on this line

settings, in pyproject.toml:
  [tool.jax-dist]
  select, extend-select, ignore = ["JXD405"]
  exclude = ["third_party"]
  per-file-ignores = { "tests/*" = ["JXD001"] }
  target-jax = "0.7.2"                          default: what the project requires

examples:
  jax-dist lint                                 everything below this folder
  jax-dist lint --diff src                      what --fix would change
  jax-dist lint --fix --unsafe-fixes src        also fixes to review
  jax-dist lint - --stdin-filename a.py < a.py  what an editor does
"""


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands, "lint", _run, __doc__, _EPILOG, help="find pmap-era code in files and notebooks"
    )
    text = "files and folders (default: this folder); - reads standard input"
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help=text)
    add = parser.add_argument_group("rules").add_argument
    codes: Any = {"action": "append", "default": [], "metavar": "CODES"}
    add("--select", **codes, help="only these rules: codes, prefixes of codes, names, or ALL")
    add("--extend-select", **codes, help="also these rules")
    add("--ignore", **codes, help="not these rules; the more specific option wins")
    add("--target-jax", metavar="VERSION", help="the oldest jax to run on")
    add("--config", metavar="FILE", help="settings file in place of the nearest one")
    group = parser.add_argument_group("fixes")
    terminal.flag(group, "--fix", help="apply the safe fixes")
    terminal.flag(group, "--unsafe-fixes", help="with --fix or --diff: also fixes to review")
    terminal.flag(group, "--diff", help="show what --fix would change")
    group = parser.add_argument_group("output")
    form: Any = {"choices": _FORMATS, "default": _FORMATS[0], "metavar": "FORMAT"}
    group.add_argument("--output-format", **form, help="%(choices)s (default: %(default)s)")
    terminal.flag(group, "-q", "--quiet", help="findings only, no summary")
    terminal.add_color(group)
    terminal.flag(group, "--exit-zero", help="exit with 0 even if something is found")
    group.add_argument("--stdin-filename", metavar="FILE", help="name to use for standard input")


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    if _STDIN in options.paths and len(options.paths) > 1:
        raise MisuseError("- reads the standard input, and goes with no other path")
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise MisuseError("--unsafe-fixes needs --fix, or --diff")
    return _Lint(options, out=out, err=err).run()


class _Lint:
    """One run of `jax-dist lint`."""

    def __init__(self, options: argparse.Namespace, *, out: TextIO, err: TextIO) -> None:
        from jax_dist.lint.engine import config  # not at the top: `--help` need not wait for it
        from jax_dist.lint.engine.linter import RULES, Examiner
        from jax_dist.lint.model.project import Project

        self._options, self._out, self._err = options, out, err
        self._stdin = sys.stdin.buffer.read() if options.paths == [_STDIN] else None  # its bytes
        self._stdin_name = options.stdin_filename or _STDIN
        paths = options.paths if self._stdin is None else [self._stdin_name]
        self._config = config.load(paths, options.config)  # of the settings file
        rules = RULES.values()
        try:
            per_file_ignores = self._resolve_per_file_ignores(rules)
            config.select_rules([self._config], rules)  # raises for unknown codes in the file
        except MisuseError as error:
            raise MisuseError(f"{self._config.file}: {error}") from error
        command_line = config.Choice(
            select=_split_words(options.select) if options.select else None,
            extend_select=_split_words(options.extend_select),
            ignore=_split_words(options.ignore),
        )
        codes = config.select_rules([self._config, command_line], rules)
        text = options.target_jax
        target_jax = config.version(text) if text else self._config.target_jax
        self._examiner = Examiner(codes, Project(paths), target_jax, per_file_ignores)
        self._has_skipped = self._has_failed = False

    def _resolve_per_file_ignores(self, rules: Any) -> tuple[tuple[Any, frozenset[Any]], ...]:
        """Return the settings' `per-file-ignores` as pairs of path patterns and rule codes."""
        from jax_dist.lint.engine import config
        from jax_dist.lint.model.sources import Patterns

        ignores = []
        for glob, selectors in self._config.per_file_ignores:
            codes = frozenset().union(*[config.resolve(selector, rules) for selector in selectors])
            ignores.append((Patterns((glob,), self._config.folder), codes))
        return tuple(ignores)

    def run(self) -> Exit:
        """Lint the standard input or the files; report the findings, or fix them."""
        from jax_dist.lint.model import sources

        if self._stdin is not None:
            findings = self._examiner.examine(self._stdin_name, self._stdin)
        else:
            tree = sources.find_files(self._options.paths, self._config.excluded)
            for reason in tree.skipped:
                print(f"jax-dist lint: skipped: {reason}", file=self._err)
            self._has_skipped = bool(tree.skipped)
            if not tree.files:
                self._say("There are no Python files or notebooks here.")
            with terminal.progress(self._err, "checking files") as show:
                count = lambda done, total: show(f"{done} of {total} files checked")
                findings = self._examiner.examine_files(tree.files, count)
        if self._options.fix or self._options.diff:
            return self._fix(findings)
        return self._report(findings, self._out)

    def _fix(self, findings: Sequence[Any]) -> Exit:
        """Fix the files of the findings (--fix), or show how (--diff); report what is left."""
        from jax_dist.lint.engine import fixer
        from jax_dist.lint.findings import Safety
        from jax_dist.lint.model.sources import read_bytes

        options = self._options
        allowed = {Safety.SAFE, Safety.UNSAFE} if options.unsafe_fixes else {Safety.SAFE}
        findings_left: list[Any] = []
        fixes = files = 0
        stdin_after = self._stdin or b""
        for path, group in itertools.groupby(findings, key=lambda finding: finding.path):
            findings_of_file = list(group)
            if not any(finding.safety in allowed for finding in findings_of_file):
                findings_left += findings_of_file
                continue
            before = read_bytes(path) if self._stdin is None else self._stdin
            result = fixer.fix(path, before, self._examiner, frozenset(allowed))
            if result.rejected:
                self._complain(path, f"some fixes were not made: {result.rejected}")
            is_changed = result.data != before
            if is_changed and not self._output(path, before, result.data):
                findings_left += findings_of_file
                continue
            stdin_after = result.data  # if it is the only file
            findings_left += result.findings
            fixes += result.made
            files += is_changed
        if files or options.diff:
            verb = "Would fix" if options.diff else "Fixed"
            self._say(f"{verb} {counted(fixes, 'finding')} in {counted(files, 'file')}.")
        if options.diff:
            return self._exit(files)
        if self._stdin is not None:  # the output is the fixed code, so findings go elsewhere
            self._out.flush()
            self._out.buffer.write(stdin_after)  # in the encoding of the input
            return self._report(findings_left, self._err)
        return self._report(findings_left, self._out)

    def _output(self, path: str, before: bytes, after: bytes) -> bool:
        """Print the diff of a file (--diff), or write it; return False if that failed."""
        from jax_dist.lint.engine import fixer, linter

        if self._options.diff:
            color = terminal.wants_color(self._options.color, self._out)
            encoding = linter.load(path, before).encoding
            self._out.write(fixer.diff(path, before, after, encoding, color=color))
            return True
        return self._stdin is not None or self._write(path, after, before)  # stdin: printed later

    def _report(self, findings: Sequence[Any], out: TextIO) -> Exit:
        """Print the findings in the format of --output-format; return the exit code."""
        from jax_dist.lint.engine.report import format_report, summary

        output_format = self._options.output_format
        color = terminal.wants_color(self._options.color, out)
        out.write(format_report(findings, output_format, color=color))
        if output_format == "text" and not self._options.quiet:
            out.write(("\n" if findings else "") + f"{summary(findings)}\n")
        return self._exit(len(findings))

    def _write(self, path: str, after: bytes, before: bytes) -> bool:
        """Write a file that still contains `before`; return whether that succeeded."""
        try:
            _files.write_atomically(path, after, expected=before)
        except OSError as error:
            self._complain(path, f"left as it is: {error.strerror or error}")
            self._has_failed = True
            return False
        return True

    def _complain(self, path: str, reason: str) -> None:
        from jax_dist.lint.model.sources import display

        print(f"{display(path)}: {reason}", file=self._err)

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=self._err)

    def _exit(self, count: int) -> Exit:
        """Return the exit code after `count` findings, or files that would change."""
        if self._has_skipped:
            return Exit.USAGE
        has_findings = count > 0 and not self._options.exit_zero
        return Exit.FINDINGS if has_findings or self._has_failed else Exit.OK


def _split_words(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the words of all texts: ("JXD1", "JXD2", "JXD401") for ["JXD1,JXD2", "JXD401"]."""
    return tuple(word for text in texts for word in text.replace(",", " ").split())
