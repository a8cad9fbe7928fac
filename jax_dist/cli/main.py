"""The command line `jax-dist`: the parser of all subcommands, and how a run ends."""

import argparse
import errno
import gc
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO, cast

import jax_dist
from jax_dist import _usage
from jax_dist._usage import MisuseError
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

# One file each; only the file of the command that runs is loaded, so that `lint` starts at once.
COMMANDS = ("lint", "migrate", "run", "explain", "plan", "launch", "cache", "doctor")
# A command to run follows their `--`.
_WITH_PROGRAM = ("cache", "explain", "launch", "migrate", "plan", "run")

_EPILOG = """\
exit codes: 0 success, 1 something was found, 2 the command was invalid or could not end,
            130 Ctrl-C

examples:
  jax-dist lint .                               find pmap-era code in files and notebooks
  jax-dist lint --fix .                         apply the safe fixes
  jax-dist migrate src                          show the migration as a diff
  jax-dist migrate --write src                  apply it
  jax-dist plan --on v5e:4x4 -- python train.py   will its step fit there?
  jax-dist cache verify -- python train.py      check that the next run hits the cache
  jax-dist launch -n 2 -- python train.py       two processes, joined as one JAX job
  jax-dist doctor                               check this machine
"""


def main(
    arguments: Sequence[str] | None = None, *, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Run the subcommand that `arguments` start with, and return the exit code.

    By default, `arguments` are those of the process, without the program's name, and results and
    messages go to the standard output and the standard error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    out = cast(TextIO, out or sys.stdout)  # no default argument, since tests replace sys.stdout
    err = cast(TextIO, err or sys.stderr)
    parser = make_parser(arguments)
    program: list[str] = []  # argparse has no notion of a second command line after `--`
    if "--" in arguments and arguments[0] in _WITH_PROGRAM:
        end = arguments.index("--")
        arguments, program = arguments[:end], arguments[end + 1 :]
    options = parser.parse_args(arguments)
    options.program = program  # the command after `--`
    if options.command is None:
        parser.print_help(file=err)
        return Exit.USAGE
    try:
        code = int(options.run(options, out=out, err=err))
        out.flush()
        return code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `jax-dist lint | head`
        terminal.silence(out)
        return Exit.USAGE
    except MisuseError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - Python would exit with 1, which means findings
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            terminal.silence(out)
            problem = error.strerror
        else:
            traceback.print_exc(file=err)
            problem = "internal error; please report it"
    print(f"jax-dist {options.command}: {problem}", file=err)
    return Exit.USAGE


def run_as_program() -> int:
    """Run `main` as the whole process: for the script `jax-dist`, and `python -m jax_dist`."""
    gc.set_threshold(100_000, 20, 20)  # syntax trees are many objects, and few are garbage
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # so that temporary files are removed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    return main()


def make_parser(arguments: Sequence[str] = ()) -> "_Parser":
    """Return the parser of the subcommand that `arguments` start with, or else of all of them."""
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="jax-dist", description=jax_dist.__doc__, epilog=_EPILOG, formatter_class=form
    )
    parser.add_argument("--version", action="version", version=f"jax-dist {jax_dist.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    names = arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS
    for name in names:
        import_module(f"jax_dist.cli.{name}").add_parser(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviated options and suggests the nearest name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **options)
        if unknown:  # reported here, not by the parser above, so that this one's usage is shown
            is_program = self.prog.split()[-1] in _WITH_PROGRAM and unknown[0][:1] != "-"
            remedy = ". Put -- before the program" if is_program else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with the usage and argparse's message, to which the nearest known word is added."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        option = re.search(r"unrecognized arguments: (-[^ =]*)", message)
        suggestion = None
        if choice:
            suggestion = _usage.nearest(choice[1], re.findall(r"[\w.-]+", choice[2]))
        elif option:
            suggestion = _usage.nearest(option[1], self._option_string_actions)
        if suggestion:
            message += f". Did you mean {suggestion}?"
        elif option:
            message += f". `{self.prog} --help` lists the options."
        super().error(message)
