"""Run an unedited program with jax_dist.pmap in the place of jax.pmap.

Names that newer jax removed are put back where one other name takes their place. Both hold in all
Python processes that the command starts.
"""

import argparse
from typing import Any, TextIO

from jax_dist.cli import terminal

_EPILOG = """\
exit codes: those of the command; 2 if it cannot be started

examples:
  jax-dist run -- python train.py               will it work with a newer jax?
  jax-dist run -- python -m pytest tests
"""


def add_parser(commands: Any) -> None:
    text, usage = "run an unedited program with jax_dist.pmap", "jax-dist run -- COMMAND ..."
    terminal.add_command(commands, "run", _run, __doc__, _EPILOG, help=text, usage=usage)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    from jax_dist.migrate.verify import runs  # only here: `--help` need not wait for it

    return runs.run_with_library(terminal.command_of(options, "run"))
