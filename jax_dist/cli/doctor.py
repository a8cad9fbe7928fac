"""Check this installation: JAX's environment, a sum over all devices, the cache's directory.

JAX starts in a separate process, which is stopped after --timeout, so devices that hang do not hang
the command. Attach the output to a bug report.
"""

import argparse
from typing import Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_EPILOG = """\
exit codes: 0 no problem, 1 a problem, 2 an option is invalid

examples:
  jax-dist doctor
  JAX_NUM_CPU_DEVICES=8 jax-dist doctor         with 8 simulated devices
"""


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands, "doctor", _run, __doc__, _EPILOG, help="check this installation"
    )
    text = "time limit for JAX to start (60)"
    parser.add_argument(
        "--timeout", type=terminal.seconds, default=60.0, metavar="SECONDS", help=text
    )


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.doctor import diagnose  # not at the top: `--help` need not wait

    with terminal.progress(err, "waiting for the devices"):
        diagnosis = diagnose(options.timeout)
    print(diagnosis.output, end="", file=out)
    print(f"problem: {diagnosis.problem}" if diagnosis.problem else "no problem found", file=out)
    return Exit.FINDINGS if diagnosis.problem else Exit.OK
