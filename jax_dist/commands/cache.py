"""Checks, lists, repairs and fills JAX's persistent compilation cache.

The default folder is that of `jax_dist.cache.enable()`: $JAX_DIST_CACHE_DIR, or else
$JAX_COMPILATION_CACHE_DIR, or else a folder of this user.
"""

import argparse
from collections.abc import Callable
from typing import Any, TextIO

from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit

_EPILOG = """\
exit codes: 0 all is well, 1 something was found, 2 the command was invalid

examples:
  jax-dist cache verify -- python train.py      does every program hit the cache, and if not, why?
  jax-dist cache ls                             list the programs, and when each was last used
  jax-dist cache doctor --fix                   find broken entries, and remove them
  jax-dist cache prune --max-size 20GB          remove the least recently used
  jax-dist cache warm programs.py:programs      compile ahead of time, from shapes
"""


# The page of each subcommand; its options are listed before the exit codes.

_VERIFY = """\
Checks that the persistent cache works for a program, or says why not.

Runs the program in fresh interpreters, with a private, empty cache and another hash seed each time.
The first run fills the cache; each later run should find everything that it compiles there. For
each miss, prints the cause, the place in the program, and what to do.

exit codes: 0 all programs were stable, written and found again,
            1 one was not, or the command failed,
            2 the command or an option is invalid

examples:
  jax-dist cache verify -- python train.py --steps 2
  jax-dist cache verify --runs 5 --json -- python train.py
"""
_LS = """\
Lists the programs of a cache, largest first, and when each was last used.

exit codes: 0 all is well, 2 an option is invalid
"""
_DOCTOR = """\
Checks a cache: broken entries, stray files, unsafe folders, a full disk, keys that never repeat.

With --fix it removes useless files, and write permission from users who must not change the folder.
Healthy entries stay. enable() replaces a damaged entry by itself when its program is next run.

exit codes: 0 all is well, or was repaired, 1 something is left to do,
            2 an option is invalid

examples:
  jax-dist cache doctor
  jax-dist cache doctor --fix /scratch/jax-cache
"""
_PRUNE = """\
Makes a cache smaller; keeps the most recently used programs.

exit codes: 0 all is well, 2 an option is invalid

examples:
  jax-dist cache prune --max-size 20GB
  jax-dist cache prune --older-than 30d --dry-run
"""
_WARM = """\
Compiles programs ahead of time, from the shapes of their arguments, into the cache.

PROGRAMS names a function without arguments, in a file or a module, that yields what to compile:

  def programs():
      x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32)
      yield train_step, x              # what jax_dist.cache.warm(train_step, x) takes

Compile the function that the program will call, with the same name and options, on the same kind
and number of devices.

exit codes: 0 all is in the cache, 1 something is not,
            2 an option is invalid

examples:
  jax-dist cache warm programs.py:programs
  jax-dist cache warm --devices 8 my.package.programs:programs      8 simulated CPU devices
  jax-dist cache warm --devices 4 --processes 2 programs.py:programs
"""


def add_parser(commands: Any) -> None:
    subcommands = terminal.add_group(
        commands,
        "cache",
        __doc__,
        _EPILOG,
        help="check, list, repair and fill the compilation cache",
    )

    def add(name: str, help_: str, page: str, usage: str | None = None) -> Callable:
        description, codes, rest = page.partition("exit codes:")
        added = terminal.add_command(
            subcommands, name, _run, description.rstrip(), codes + rest, help=help_, usage=usage
        )
        terminal.flag(added, "--json", help="print JSON")
        return added.add_argument

    _add_runs(add)
    terminal.add_color(subcommands.choices["verify"])
    _add_folders(add)


def _add_runs(add: Callable[..., Callable]) -> None:
    option = add(
        "verify",
        "check that a program hits the cache, or say why not",
        _VERIFY,
        usage="jax-dist cache verify [options] -- COMMAND ...",
    )
    runs = "number of runs (3; at least 2: one to fill the cache, one to hit it)"
    option("--runs", type=terminal.count(1000, least=2), default=3, metavar="N", help=runs)
    option("--timeout", type=terminal.seconds, metavar="SECONDS", help="time limit of each run")


def _add_folders(add: Callable[..., Callable]) -> None:
    folder = {"nargs": "?", "metavar": "FOLDER", "help": "of the cache (default: that of enable())"}
    only = {"metavar": "NAME", "help": "only this one, as in jit_step"}

    option = add("ls", "list the programs of a cache", _LS)
    option("folder", **folder)
    option("--function", **only)

    option = add("doctor", "find broken entries in a cache, and repair it", _DOCTOR)
    option("folder", **folder)
    option("--fix", action="store_true", help="repair what can be repaired")

    option = add("prune", "make a cache smaller", _PRUNE)
    option("folder", **folder)
    size, age = _read("bytes_of"), _read("seconds_of")
    option("--max-size", type=size, metavar="SIZE", help="as in 500MB, 20GB, 2GiB")
    option("--older-than", type=age, metavar="AGE", help="as in 36h, 30d, 2w")
    option("--dry-run", action="store_true", help="only list what would be removed")

    option = add("warm", "compile ahead of time, from shapes", _WARM)
    option("programs", metavar="PROGRAMS", help="as in programs.py:programs")
    option("--cache", metavar="FOLDER", help="(default: that of enable())")
    devices = terminal.count(terminal.MOST_DEVICES)
    option("--devices", type=devices, metavar="N", help="simulated CPU devices")
    processes = "number of processes, joined, on this machine"
    count = terminal.count(terminal.MOST_PROCESSES)
    option("--processes", type=count, default=1, metavar="N", help=processes)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.commands import cache_run  # only here: `--help` need not wait for the cache

    return cache_run.RUNS[options.subcommand](options, out, err)


def _read(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        from jax_dist.cache import entries

        try:
            return getattr(entries, name)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
