"""Moves programs from jax.pmap to jit(shard_map): prints a diff, or writes the changes.

Comments and formatting outside the changes stay as they are. Code that cannot be shown to do the
same afterwards is left alone; --report says why, and what to do by hand.
"""

import argparse
import sys
from typing import Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_EPILOG = """\
the targets:
  --to jax_dist  jax.pmap becomes jax_dist.pmap, which means the same: the smallest change
  --to jax       jax.jit(jax.shard_map(...)) where two promises or, with --verify, a run of the
                 program show that it does the same; else mapped, of a small module of plain JAX
                 that your package gets
  --to global    a step that carries a state becomes jax_dist.global_view: the state is cut over
                 the devices instead of copied to each; other mapped functions stay; it needs
                 --verify, for a run shows what the state is

exit codes: 0 all is well, even if something would change,
            1 a problem: --check found something to migrate, a file could not be read or
              written, --verify found a place that is not as sure as --require asks,
            2 a path, an option or a setting is invalid

examples:
  jax-dist migrate src                          print the changes as a diff
  jax-dist migrate src > a.patch                the same, for git apply
  jax-dist migrate --write src                  change it
  jax-dist migrate --to jax --report left.md .  why code is left, and what to do by hand
  jax-dist migrate --check .                    in continuous integration
  jax-dist migrate --to jax --write --verify src -- python train.py --steps 3
                                                run a program on 8 simulated devices, compare old
                                                and new, and keep the places that are the same
  jax-dist migrate - < a.py                     what an editor does
"""
_DIFF = "Leave it out: a diff is printed unless --write or --check is there."


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands,
        "migrate",
        _run,
        __doc__,
        _EPILOG,
        help="move files and notebooks from pmap to jit(shard_map)",
        usage="jax-dist migrate [options] PATH [PATH ...] [-- COMMAND ...]",
        meant=dict.fromkeys(("--diff", "--dry-run"), _DIFF)
        | dict.fromkeys(("--fix", "--in-place", "--apply"), "Did you mean `--write`?"),
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files, notebooks and folders; - reads standard input",
    )
    _add_aims(parser.add_argument_group("target"))
    _add_effects(parser.add_argument_group("actions"))
    _add_proof(parser.add_argument_group("verification"))
    _add_running(parser.add_argument_group("execution"))


def _add_aims(group: Any) -> None:
    group.add_argument(
        "--to",
        choices=("jax_dist", "jax", "global"),
        default="jax_dist",
        help="what the code should use (default: jax_dist)",
    )
    terminal.flag(
        group,
        "--idiomatic",
        help="with --to jax: take out the device axis where the data flow proves that all devices "
        "hold the same; --write then needs --verify",
    )
    terminal.flag(
        group,
        "--one-process",
        help="with --to jax and --to global: a promise that the program never runs in several "
        "processes",
    )
    terminal.flag(
        group,
        "--all-devices",
        help="with --to jax: a promise that what is mapped has one slice for each device there is; "
        "with --one-process, most places can then be jax.jit(jax.shard_map(...))",
    )
    group.add_argument(
        "--helpers",
        action="append",
        default=[],
        metavar="PATH|full",
        help="with --to jax: the module that gets the helpers; else each package and each folder "
        "of scripts gets _mapped.py, and a notebook has them inside. full: a `mapped` that keeps "
        "the whole contract of jax.pmap, in place of what the code needs; both may be given",
    )
    group.add_argument("--target-jax", metavar="VERSION", help="the oldest jax to run on")
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="skip names or paths that match, inside folders",
    )


def _add_effects(group: Any) -> None:
    what = group.add_mutually_exclusive_group()
    terminal.flag(what, "--write", help="write the changes; else print a diff")
    terminal.flag(what, "--check", help="only name the files that would change")
    group.add_argument(
        "--report",
        metavar="FILE",
        help="say of each place what was done or why it was left, and how sure it is: FILE.md, "
        "FILE.json, FILE.sarif, or - for Markdown on the standard output in place of the diff",
    )


def _add_proof(group: Any) -> None:
    terminal.flag(
        group,
        "--verify",
        help="run the command behind --, apart from the project, and compare old and new at each "
        "place that is edited; what is not as sure as --require asks gets another form, or stays "
        "as it was",
    )
    group.add_argument(
        "--require",
        choices=("proved", "replayed", "ran"),
        default="replayed",
        help="how sure a place must be: its program is the same, all its calls gave the same, or "
        "it ran (default: replayed)",
    )
    group.add_argument(
        "--certificate",
        metavar="FILE",
        help="with --write: FILE.json gets the programs and what is proved of them, which "
        "`jax-dist certificate FILE.json` checks again, without jax",
    )
    group.add_argument(
        "--devices",
        type=terminal.count(terminal.MOST_DEVICES),
        default=8,
        metavar="N",
        help="CPU devices to simulate (8)",
    )
    group.add_argument(
        "--timeout", type=terminal.seconds, metavar="SECONDS", help="for each run of the command"
    )
    group.add_argument(
        "--scratch",
        action="append",
        default=[],
        metavar="FOLDER",
        help="an empty or new folder outside of the project that the command may write to; what "
        "it leaves there goes",
    )
    terminal.flag(group, "--keep", help="with --write: keep every place, however sure it is")


def _add_running(group: Any) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="settings file to use instead of the nearest one"
    )
    group.add_argument("--stdin-filename", metavar="FILE", help="name to use for standard input")
    terminal.flag(group, "-q", "--quiet", help="no summary and no reasons")
    terminal.add_color(group)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.cli import migrate_run  # only here: `--help` need not wait for the rules

    return migrate_run.run(options, stdin=sys.stdin, out=out, err=err)
