"""Checks this machine: versions, devices, flags, launcher and cache.

JAX starts in a separate process, which is stopped after --timeout, so devices that hang do not hang
the doctor. Attach the output to a bug report.
"""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit, Help

if TYPE_CHECKING:
    from jax_dist.doctor.diagnosis import Diagnosis
    from jax_dist.doctor.facts import DoctorFinding

_EPILOG = """\
exit codes: 0 no harmful findings, 1 harmful findings, 2 an option is invalid

examples:
  jax-dist doctor
  jax-dist doctor --quiet                       only harmful findings
  jax-dist doctor --json
  JAX_NUM_CPU_DEVICES=8 jax-dist doctor         with 8 simulated devices
  srun jax-dist doctor --quiet                  in every process of a job
"""
_COLOURS = {"harm": "\x1b[1;31m", "note": "\x1b[33m"}
_CYAN, _PLAIN = "\x1b[36m", "\x1b[0m"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: versions, devices, flags, launcher, cache",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="only harmful findings")
    parser.add_argument(
        "--timeout",
        type=terminal.seconds,
        default=60.0,
        metavar="SECONDS",
        help="time limit for JAX to start (60)",
    )
    terminal.add_color(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Diagnoses and prints."""
    del err
    from jax_dist.doctor.diagnosis import diagnose  # not at the top: `--help` need not wait

    found = diagnose(timeout=options.timeout)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2), file=out)
    else:
        colour = terminal.wants_colour(options.color, out)
        lines = _lines(found, quiet=options.quiet, colour=colour)
        out.writelines(f"{line}\n" for line in lines)
    return Exit.OK if found.healthy else Exit.FINDINGS


def _lines(found: "Diagnosis", *, quiet: bool, colour: bool) -> Iterator[str]:
    if not quiet:
        width = max(len(name) for name in found.facts)
        yield from (f"{name:{width}}  {value}" for name, value in found.facts.items())
        yield from (f"{name}={value}" for name, value in found.variables.items())
        yield ""
    shown = [each for each in found.findings if each.weight == "harm" or not quiet]
    for each in shown:
        yield from _painted(each, colour=colour)
    yield _summary(found)


def _painted(finding: "DoctorFinding", *, colour: bool) -> Iterator[str]:
    first, second = str(finding).split("\n")
    if colour:
        weight = finding.weight.value
        first = f"{_COLOURS[weight]}{weight}{_PLAIN}{first.removeprefix(weight)}"
        second = second.replace("help:", f"{_CYAN}help:{_PLAIN}", 1)
    yield first
    yield second


def _summary(found: "Diagnosis") -> str:
    harms = sum(each.weight == "harm" for each in found.findings)
    notes = len(found.findings) - harms
    head = "All is well here" if harms == 0 else f"{harms} {_plural('thing', harms)} to fix"
    return f"{head}; {notes} {_plural('note', notes)}."


def _plural(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"
