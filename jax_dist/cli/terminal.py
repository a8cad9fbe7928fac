"""Shared parts of the subcommands: exit codes, option types, colour, progress."""

import argparse
import contextlib
import enum
import os
from collections.abc import Callable
from typing import Any, TextIO


class Exit(enum.IntEnum):
    """Exit codes, as `--help` lists them."""

    OK = 0
    FINDINGS = 1  # something was found, or would be changed
    USAGE = 2  # as argparse has it for unknown options; also an internal error
    INTERRUPTED = 130  # as shells have it


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, at most 100 columns; descriptions keep their line breaks."""

    def __init__(self, prog: str) -> None:
        # argparse would import shutil for the width, in every run.
        try:
            columns = int(os.environ["COLUMNS"])
        except (KeyError, ValueError):
            try:
                columns = os.get_terminal_size().columns
            except (OSError, ValueError):  # a pipe
                columns = 80
        super().__init__(prog, width=min(columns - 2, 100))


def add_command(
    commands: Any, name: str, run: Callable[..., int], page: str | None, epilog: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a subcommand; `page` stands above its options and `epilog` below.

    `options` go to its parser, such as `help`; without that, `jax-dist --help` does not list it.
    """
    options = {"formatter_class": Help, **options}
    parser = commands.add_parser(name, description=page, epilog=epilog, **options)
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Any, name: str, page: str | None, epilog: str, **options: Any) -> Any:
    """Add a command that has subcommands only, and return what these are added to."""

    def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
        parser.print_help(file=err)
        return Exit.USAGE

    parser = add_command(commands, name, run, page, epilog, **options)
    return parser.add_subparsers(dest="subcommand", metavar="COMMAND")


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


MOST_DEVICES = 4096  # simulated in one process
MOST_PROCESSES = 1024  # on one machine
MOST_COPIES = 64


def count(most: int, *, least: int = 1) -> Callable[[str], int]:
    """Return an option type: a whole number between two limits."""

    def read(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {most}, not {text[:30]!r}"
        )

    return read


def seconds(text: str) -> float:
    """Read a time in seconds, more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 2_000_000:  # poll() takes milliseconds as a number of 31 bits
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds, more than 0 and at most 2000000, not {text[:30]!r}"
        )
    return number


def wants_colour(when: str, stream: TextIO) -> bool:
    """Return whether to write colours, by `--color`, NO_COLOR, FORCE_COLOR and the stream."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def silence(stream: TextIO) -> None:
    """Send what is still written to a stream, also by Python at its end, to nowhere."""
    with contextlib.suppress(OSError, ValueError):  # not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ProgressLine:
    """A line on a terminal that shows how far a run is and its time; else nothing.

    Args:
      stream: where it is written.
      what: the unit or the task: "files checked".
    """

    def __init__(self, stream: TextIO, what: str = "") -> None:
        self._progress: Any = None
        if stream.isatty():
            from rich import console, progress  # only here: most runs have no terminal

            self._progress = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=console.Console(file=stream),
                transient=True,
            )
            self._task = self._progress.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done."""
        if self._progress:
            self._progress.update(self._task, completed=done, total=total)

    def print(self, text: str) -> None:
        """Print a line that stays, above the progress."""
        if self._progress:
            self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> "ProgressLine":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line."""
        if self._progress:
            self._progress.stop()


def write_bytes(out: TextIO, data: bytes) -> None:
    """Write bytes unchanged if the stream takes them."""
    out.flush()
    binary = getattr(out, "buffer", None)
    if binary is None:
        out.write(data.decode("utf-8", "replace"))
    else:
        binary.write(data)
        binary.flush()
