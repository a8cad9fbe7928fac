"""Finds pmap-era code in Python files and notebooks, without running or importing them.

Every finding has a code; `jax-dist rule CODE` says why it matters and what to write instead.
"""

import argparse
import os
import sys
from typing import Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_FORMATS = ("text", "json", "sarif", "github")

_EPILOG = """\
exit codes: 0 nothing was found, 1 something was (with --diff: something would change),
            2 a path, an option or a setting is invalid

suppress findings in a file:
  step = jax.pmap(f)  # noqa: JXD001            on this statement
  step = jax.pmap(f)  # jax-dist: ignore[JXD001]
  # jax-dist: ignore-file[JXD0]                 in this file, all codes with this prefix

settings, in pyproject.toml or without the first line in jax-dist.toml:
  [tool.jax-dist]
  extend-select = ["JXD304"]
  extend-exclude = ["third_party"]
  per-file-ignores = { "tests/*" = ["JXD001"] }
  target-jax = "0.7.2"                          default: what the project requires

examples:
  jax-dist lint                                 everything below this folder
  jax-dist lint --diff src                      what --fix would change
  jax-dist lint --fix --unsafe-fixes src        also fixes to review
  jax-dist lint --statistics .                  number of findings by rule
  jax-dist lint --write-baseline known.json .   record the current findings ...
  jax-dist lint --baseline known.json .         ... and report only new ones
  jax-dist lint - --stdin-filename a.py < a.py  what an editor does
"""
_MEANT = {
    "--format": "Did you mean `--output-format`?",
    "--json": "Did you mean `--output-format json`?",
}


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands,
        "lint",
        _run,
        __doc__,
        _EPILOG,
        help="find pmap-era code in files and notebooks",
        meant=_MEANT,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        default=["."],
        metavar="PATH",
        help="files and folders (default: this folder); - reads standard input",
    )
    _add_rules(parser.add_argument_group("rules"))
    _add_fixes(parser.add_argument_group("findings"))
    _add_output(parser.add_argument_group("output"))
    _add_running(parser.add_argument_group("execution"))


def _add_rules(group: Any) -> None:
    codes = {"action": "append", "default": [], "metavar": "CODES"}
    group.add_argument(
        "--select", **codes, help="only these rules: codes, prefixes of codes, names, or ALL"
    )
    group.add_argument("--extend-select", **codes, help="also these rules")
    group.add_argument("--ignore", **codes, help="not these rules; the more specific option wins")
    group.add_argument("--target-jax", metavar="VERSION", help="the oldest jax to run on")
    group.add_argument(
        "--config", metavar="FILE", help="settings file to use instead of the nearest one"
    )


def _add_fixes(group: Any) -> None:
    terminal.flag(group, "--fix", help="apply the safe fixes")
    terminal.flag(
        group, "--unsafe-fixes", help="with --fix or --diff: also fixes that a person should review"
    )
    terminal.flag(group, "--diff", help="show what --fix would change")
    group.add_argument("--baseline", metavar="FILE", help="hide the findings listed in the file")
    group.add_argument("--write-baseline", metavar="FILE", help="list all findings in the file")


def _add_output(group: Any) -> None:
    group.add_argument(
        "--output-format",
        choices=_FORMATS,
        default=os.environ.get("JAX_DIST_OUTPUT_FORMAT", "text"),
        help="%(choices)s (default: text, or $JAX_DIST_OUTPUT_FORMAT)",
        metavar="FORMAT",
    )
    group.add_argument("-o", "--output-file", metavar="FILE", help="write to this file")
    terminal.flag(group, "--statistics", help="count findings by rule")
    terminal.flag(group, "-q", "--quiet", help="findings only, no summary")
    terminal.add_color(group)
    terminal.flag(group, "--exit-zero", help="exit with 0 even if something is found")


def _add_running(group: Any) -> None:
    group.add_argument("--stdin-filename", metavar="FILE", help="name to use for standard input")


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.cli import lint_run  # only here: `--help` need not wait for the rules

    return lint_run.run(options, stdin=sys.stdin, out=out, err=err)
