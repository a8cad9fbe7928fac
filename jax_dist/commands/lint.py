"""Finds what pmap-era code does, in Python files and notebooks, without running or importing them.

Every finding has a code; `jax-dist rule CODE` says why it matters and what to write instead.
"""

import argparse
import os
import sys
from typing import Any, TextIO

from jax_dist.commands import arguments
from jax_dist.commands.exits import Exit
from jax_dist.commands.help import Help

_FORMATS = ("text", "json", "sarif", "github")

_EPILOG = """\
exit codes: 0 nothing was found, 1 something was (with --diff: something would change),
            2 a path, an option or a setting cannot be followed

switched off in a file:
  step = jax.pmap(f)  # noqa: JXD001            on this statement
  step = jax.pmap(f)  # jax-dist: ignore[JXD001]
  # jax-dist: ignore-file[JXD0]                 in this file, all codes that begin so

settings, in pyproject.toml or without the first line in jax-dist.toml:
  [tool.jax-dist]
  extend-select = ["JXD304"]
  extend-exclude = ["third_party"]
  per-file-ignores = { "tests/*" = ["JXD001"] }
  target-jax = "0.7.2"                          if not set: what the project requires

examples:
  jax-dist lint                                 all below this folder
  jax-dist lint --diff src                      what --fix would change
  jax-dist lint --fix --unsafe-fixes src        also what a person should look at
  jax-dist lint --statistics .                  how often each rule speaks
  jax-dist lint --write-baseline known.json .   begin with what is there ...
  jax-dist lint --baseline known.json .         ... and see only what is new
  jax-dist lint - --stdin-filename a.py < a.py  what an editor does
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "lint",
        help="find pmap-era code in files and notebooks",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        default=["."],
        metavar="PATH",
        help="files and folders (default: this folder); - reads the standard input",
    )
    _add_rules(parser.add_argument_group("which rules"))
    _add_fixes(parser.add_argument_group("what is done about findings"))
    _add_output(parser.add_argument_group("what is shown"))
    _add_running(parser.add_argument_group("how it runs"))
    parser.set_defaults(run=run)


def _add_rules(group: Any) -> None:
    codes = {"action": "append", "default": [], "metavar": "CODES"}
    group.add_argument(
        "--select", **codes, help="only these: codes, beginnings of codes, names, or ALL"
    )
    group.add_argument("--extend-select", **codes, help="these too")
    group.add_argument("--ignore", **codes, help="not these; the more precise option wins")
    group.add_argument("--target-jax", metavar="VERSION", help="the oldest jax to run on")
    group.add_argument("--config", metavar="FILE", help="settings, in place of the nearest file")


def _add_fixes(group: Any) -> None:
    group.add_argument("--fix", action="store_true", help="make the safe fixes")
    group.add_argument(
        "--unsafe-fixes",
        action="store_true",
        help="with --fix or --diff: also those that a person should look at",
    )
    group.add_argument("--diff", action="store_true", help="show what --fix would change")
    group.add_argument(
        "--add-noqa", action="store_true", help="switch every finding off by a comment"
    )
    group.add_argument(
        "--baseline", metavar="FILE", help="hide the findings that are listed in the file"
    )
    group.add_argument("--write-baseline", metavar="FILE", help="list all findings in the file")


def _add_output(group: Any) -> None:
    group.add_argument(
        "--output-format",
        choices=_FORMATS,
        default=os.environ.get("JAX_DIST_OUTPUT_FORMAT", "text"),
        help="%(choices)s (default: text, or $JAX_DIST_OUTPUT_FORMAT)",
        metavar="FORMAT",
    )
    group.add_argument("-o", "--output-file", metavar="FILE", help="write it there")
    group.add_argument("--statistics", action="store_true", help="count by rule")
    group.add_argument("-q", "--quiet", action="store_true", help="findings only, no summary")
    arguments.add_color(group)
    group.add_argument(
        "--exit-zero", action="store_true", help="exit with 0 also where something is found"
    )


def _add_running(group: Any) -> None:
    group.add_argument("--stdin-filename", metavar="FILE", help="what the standard input is called")
    group.add_argument(
        "-j",
        "--jobs",
        type=arguments.count,
        metavar="N",
        help="processes (default: as many as pay)",
    )
    group.add_argument("--no-cache", action="store_true", help="check every file anew")
    group.add_argument(
        "--cache-dir", metavar="FOLDER", help="in place of .jax_dist_cache by the settings"
    )


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.commands import linting  # only here: `--help` need not wait for the rules

    return linting.run(options, stdin=sys.stdin, out=out, err=err)
