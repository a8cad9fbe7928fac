"""`jax-dist`: puts the subcommands together."""

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

import jax_dist
from jax_dist.commands import info
from jax_dist.commands.exits import Exit

_COMMANDS = (info,)

_EPILOG = """\
exit codes: 0 all is well, 2 the command was not understood

examples:
  jax-dist info                                 what this machine runs
  JAX_NUM_CPU_DEVICES=8 jax-dist info --json    with 8 simulated devices
"""


def main(
    arguments: Sequence[str] | None = None,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Runs one subcommand.

    Args:
      arguments: the command line without the program's name; by default that of the process.
      out: where results are written; by default the standard output.
      err: where messages are written; by default the standard error.

    Returns:
      The exit code.
    """
    out, err = out or sys.stdout, err or sys.stderr  # as they are now, not at import
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(file=err)
        return Exit.USAGE
    return int(options.run(options, out=out, err=err))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax-dist",
        description=jax_dist.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jax-dist {jax_dist.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
