"""Check that the persistent compilation cache works for a program, or say why not.

Runs the program twice, in fresh interpreters with a private cache and different hash seeds. The
first run fills the cache; the second should find everything that it compiles there. For each miss,
it prints the cause, the place in the program, and what to do.
"""

import argparse
import dataclasses
import json
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

if TYPE_CHECKING:
    from jax_dist._cache.verify import CacheReport

_EPILOG = """\
exit codes: 0 all programs were stable, written and found again,
            1 one was not, or the command failed,
            2 the command or an option is invalid

examples:
  jax-dist cache verify -- python train.py --steps 2
  jax-dist cache verify --json -- python train.py
"""
_MAX_OUTPUT_LINES = 20  # of a program that failed, from its end


def add_parser(commands: Any) -> None:
    text = "check that a program hits the compilation cache, or say why not"
    usage = "jax-dist cache verify [options] -- COMMAND ..."
    parser = terminal.add_command(commands, "cache", _run, __doc__, _EPILOG, help=text, usage=usage)
    parser.add_argument("action", choices=["verify"], help="run the program twice")
    terminal.flag(parser, "--json", help="print JSON")
    parser.add_argument(
        "--timeout", type=terminal.seconds, metavar="SECONDS", help="time limit of each run"
    )


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist._cache import verify  # only here: `--help` need not wait for it

    command = terminal.command_of(options, "cache verify")
    with tempfile.TemporaryDirectory(prefix="jax-dist-verify-") as directory:
        report = verify.verify(command, Path(directory), timeout=options.timeout)
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=2), file=out)
    else:
        out.writelines(f"{line}\n" for line in _format_verdicts(report))
    if report.exit_code != 0:
        err.writelines(f"{line}\n" for line in _format_failure(report))
    return Exit.OK if report.is_clean else Exit.FINDINGS


def _format_verdicts(report: "CacheReport") -> Iterator[str]:
    """Yield the lines of the report: each function with its verdict, and how many were hits."""
    # Misses come last, since the end of a long table is what one sees in a terminal.
    verdicts = sorted(report.verdicts, key=lambda verdict: bool(verdict.causes))
    width = max((len(verdict.function) for verdict in verdicts), default=0)
    for verdict in verdicts:
        times = f" ({verdict.programs} programs)" if verdict.programs > 1 else ""
        yield f"{verdict.function:{width}}  {verdict.verdict}{times}"
        for cause in verdict.causes:
            yield textwrap.indent(str(cause), "    ")
    total = sum(verdict.programs for verdict in verdicts)
    hits = sum(verdict.programs for verdict in verdicts if not verdict.causes)
    if total:
        noun = "program is" if total == 1 else "programs are"
        yield f"{hits} of {total} {noun} found again."
    elif report.exit_code == 0:
        yield (
            "Nothing was looked up in a cache: does the command run Python, without -E, -I or -S, "
            "and does that compile with jax_enable_compilation_cache on?"
        )


def _format_failure(report: "CacheReport") -> Iterator[str]:
    """Yield the last lines of a run that failed, and how it ended."""
    from jax_dist import launch  # not at the top: `--help` need not wait for it

    yield from report.output.splitlines()[-_MAX_OUTPUT_LINES:]
    end = "was stopped after --timeout"
    if report.exit_code is not None:
        end = f"ended with {launch.format_code(report.exit_code)}"
    yield f"jax-dist cache verify: run {report.runs} {end}"
