"""Shared parts of the subcommands: exit codes, option types, color, progress."""

import argparse
import contextlib
import enum
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from jax_dist._usage import MisuseError


class Exit(enum.IntEnum):
    """Exit codes, as `--help` lists them."""

    OK = 0
    FINDINGS = 1  # something was found, or would be changed
    USAGE = 2  # argparse's code for an invalid command line; also an internal error
    INTERRUPTED = 130  # the shells' code for Ctrl-C


def add_command(
    commands: Any, name: str, run: Callable[..., int], page: str | None, epilog: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a subcommand that calls `run(options, out=, err=)`, and return its parser.

    Its help has `page` above the options and `epilog` below; `options` go to argparse.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name, description=page, epilog=epilog, formatter_class=form, **options
    )
    parser.set_defaults(run=run)
    return parser


def command_of(options: argparse.Namespace, name: str) -> list[str]:
    """Return the command behind `--`; raise MisuseError if there is none, or no such program."""
    if not options.program:
        raise MisuseError(f"{name} needs a command: jax-dist {name} -- python train.py")
    if shutil.which(options.program[0]) is None:
        raise MisuseError(f"{options.program[0]} cannot be started: there is no such program")
    return list(options.program)


def flag(parser: Any, *names: str, help: str) -> None:
    """Add an option without a value."""
    parser.add_argument(*names, action="store_true", help=help)


def add_color(parser: Any) -> None:
    """Add `--color`."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="%(choices)s (auto: on a terminal; NO_COLOR and FORCE_COLOR count)",
        metavar="WHEN",
    )


def count(text: str) -> int:
    """Parse the value of an option: a whole number, at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def seconds(text: str) -> float:
    """Parse the value of an option: a time in seconds, more than 0."""
    number = float(text)
    if not 0 < number <= 2_000_000:  # the time limit of poll() has 31 bits, in milliseconds
        raise argparse.ArgumentTypeError(f"must be more than 0, at most 2000000, not {number}")
    return number


def wants_color(when: str, stream: TextIO) -> bool:
    """Return whether to write colors to a stream; `when` is the value of `--color`."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR"):
        return False
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal or bool(os.environ.get("FORCE_COLOR"))


def silence(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone to /dev/null, so that Python's exit can flush it."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def progress(stream: TextIO, text: str, *, is_quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show a text and the time on a terminal while the block runs; yield what replaces the text."""
    if is_quiet or not stream.isatty():
        yield lambda text: None
        return
    from rich import console  # only here: most runs have no terminal
    from rich import progress as bars

    columns = bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.TimeElapsedColumn()
    with bars.Progress(*columns, console=console.Console(file=stream), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda text: bar.update(task, description=text)
