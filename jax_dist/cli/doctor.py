"""Checks this machine: versions, devices, flags, launcher and cache.

JAX starts in a separate process, which is stopped after --timeout, so devices that hang do not hang
the doctor. Attach the output to a bug report.
"""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.doctor import Diagnosis

_EPILOG = """\
exit codes: 0 no findings, 1 findings, 2 an option is invalid

examples:
  jax-dist doctor
  jax-dist doctor --quiet                       only the findings
  jax-dist doctor --json
  JAX_NUM_CPU_DEVICES=8 jax-dist doctor         with 8 simulated devices
  srun jax-dist doctor --quiet                  in every process of a job
"""
_RED, _CYAN, _PLAIN = "\x1b[1;31m", "\x1b[36m", "\x1b[0m"


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands,
        "doctor",
        _run,
        __doc__,
        _EPILOG,
        help="check this machine: versions, devices, flags, launcher, cache",
    )
    terminal.flag(parser, "--json", help="print one JSON object")
    terminal.flag(parser, "--quiet", help="only the findings")
    parser.add_argument(
        "--timeout",
        type=terminal.seconds,
        default=60.0,
        metavar="SECONDS",
        help="time limit for JAX to start (60)",
    )
    terminal.add_color(parser)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Diagnoses and prints."""
    from jax_dist.doctor import diagnose  # not at the top: `--help` need not wait

    with terminal.ProgressLine(err, "waiting for the devices"):
        found = diagnose(options.timeout)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2), file=out)
    else:
        colour = terminal.wants_colour(options.color, out)
        lines = _lines(found, quiet=options.quiet, colour=colour)
        out.writelines(f"{line}\n" for line in lines)
    return Exit.FINDINGS if found.findings else Exit.OK


def _lines(found: "Diagnosis", *, quiet: bool, colour: bool) -> Iterator[str]:
    if not quiet:
        width = max(map(len, found.facts))
        yield from (f"{name:{width}}  {value}" for name, value in found.facts.items())
        yield from (f"{name}={value}" for name, value in found.variables.items())
        yield ""
    for each in found.findings:
        text = str(each)
        if colour:
            text = f"{_RED}harm{_PLAIN}{text.removeprefix('harm')}"
            text = text.replace("\n  help:", f"\n  {_CYAN}help:{_PLAIN}", 1)
        yield text
    match len(found.findings):
        case 0:
            yield "All is well here."
        case 1:
            yield "1 thing to fix."
        case several:
            yield f"{several} things to fix."
