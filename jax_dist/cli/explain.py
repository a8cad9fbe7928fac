"""Run a program and print what jax_dist.explain says of its mapped functions.

Each function is explained at its first call. The program is not edited.
"""

import argparse
from typing import Any, TextIO

from jax_dist.cli import terminal

_EPILOG = """\
exit codes: those of the command; 2 if it cannot be started

example:
  jax-dist explain -- python train.py
"""


def add_parser(commands: Any) -> None:
    text = "explain the mapped functions of an unedited program"
    usage = "jax-dist explain -- COMMAND ..."
    terminal.add_command(commands, "explain", _run, __doc__, _EPILOG, help=text, usage=usage)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    from jax_dist.migrate.verify import runs  # only here: `--help` need not wait for it

    code, reports = runs.explain(terminal.command_of(options, "explain"))
    out.writelines(f"{report}\n" for report in reports)
    if not reports:
        print("jax-dist explain: no function under jax.pmap was called, or only in jit", file=err)
    return code
