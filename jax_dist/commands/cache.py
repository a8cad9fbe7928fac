"""Checks, lists, repairs and fills JAX's persistent compilation cache.

The default folder is that of `jax_dist.cache.enable()`: $JAX_DIST_CACHE_DIR, or else
$JAX_COMPILATION_CACHE_DIR, or else a folder of this user.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO

from jax_dist.commands.terminal import Exit, Help

# Each in a module `cache_NAME`, with HELP, EPILOG, `add_arguments(parser)` and `run(options, ...)`.
_SUBCOMMANDS = ("verify", "ls", "show", "diff", "doctor", "prune", "warm", "failures")

_EPILOG = """\
exit codes: 0 all is well, 1 something was found, 2 the command was invalid

examples:
  jax-dist cache verify -- python train.py      does every program hit the cache, and if not, why?
  jax-dist cache ls                             list the programs, and when each was last used
  jax-dist cache doctor --fix                   find broken entries, and remove them
  jax-dist cache prune --max-size 20GB          remove the least recently used
  jax-dist cache warm programs.py:programs      compile ahead of time, from shapes
  jax-dist cache failures                       list programs that failed to compile
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="check, list, repair and fill the compilation cache",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.set_defaults(run=lambda options, *, out, err: _usage(parser, err))
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND")
    for name in _SUBCOMMANDS:
        _add(subcommands, name)


def _add(subcommands: Any, name: str) -> None:
    module = import_module(f"jax_dist.commands.cache_{name}")
    parser = subcommands.add_parser(
        name,
        help=module.HELP,
        usage=getattr(module, "USAGE", None),
        description=module.__doc__,
        epilog=module.EPILOG,
        formatter_class=Help,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _usage(parser: argparse.ArgumentParser, err: TextIO) -> Exit:
    parser.print_help(file=err)
    return Exit.USAGE


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The argument that the subcommands share which work on a folder."""
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="of the cache (default: that of enable())"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """Columns side by side.

    Args:
      head: their names.
      rows: the cells.
      numbers: which columns stand to the right.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
