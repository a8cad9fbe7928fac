"""Starts the language server: findings and quick fixes in an editor.

It speaks the Language Server Protocol over its standard streams; an editor starts it.
"""

import argparse
import os
import sys
from typing import Any, TextIO

from jax_dist.commands.exits import Exit

_EPILOG = """\
exit codes: 0 ended by the editor, 1 ended without a shutdown request,
            2 a package that it needs is not installed

examples:
  pip install "pygls>=2.0"         the package that it needs
  jax-dist server                  the command to give to the editor, for Python files

in Neovim:
  vim.lsp.start({ name = "jax-dist", cmd = { "jax-dist", "server" } })
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "server",
        help="language server for editors",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    del options, out  # the protocol owns the process's own streams
    try:
        from jax_dist.checker import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        print(
            f'jax-dist server: {error.name} is not installed. Run: pip install "pygls>=2.0"',
            file=err,
        )
        return Exit.USAGE
    started = server.create()
    # A descriptor of its own: it is closed when the editor says exit.
    with open(os.dup(sys.stdout.fileno()), "wb") as stream:
        started.start_io(stdout=stream)
    return Exit(started.exit_code)
