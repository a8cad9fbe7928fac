"""Runs an unedited program with jax_dist.pmap in the place of jax.pmap.

Names that newer jax removed are put back where one other name takes their place. Both hold in all
Python processes that the command starts.
"""

import argparse
import shutil
from typing import Any, TextIO

from jax_dist._usage import MisuseError
from jax_dist.cli import terminal

_EPILOG = """\
exit codes: those of the command; 2 if it cannot be started

examples:
  jax-dist run -- python train.py               will it work with a newer jax?
  jax-dist run -- python -m pytest tests
"""


def add_parser(commands: Any) -> None:
    terminal.add_command(
        commands,
        "run",
        _run,
        __doc__,
        _EPILOG,
        help="run an unedited program with jax_dist.pmap",
        usage="jax-dist run -- COMMAND ...",
    )


def command_of(options: argparse.Namespace, name: str) -> list[str]:
    """Return the command behind --. Raises MisuseError if it cannot be started."""
    if not options.program:
        raise MisuseError(f"{name} needs a command: jax-dist {name} -- python train.py")
    if shutil.which(options.program[0]) is None:
        raise MisuseError(f"{options.program[0]} cannot be started: there is no such program")
    return list(options.program)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    from jax_dist.migrate import programs  # only here: `--help` need not wait for it

    return programs.run(command_of(options, "run"))
