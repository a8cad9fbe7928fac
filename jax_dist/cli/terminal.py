"""What all subcommands share: exit codes, help, arguments, output, and how far a long run is."""

import argparse
import contextlib
import enum
import os
import time
from collections.abc import Callable
from typing import Any, TextIO


class Exit(enum.IntEnum):
    """Exit codes, as `--help` lists them."""

    OK = 0
    FINDINGS = 1  # something was found, or would be changed
    USAGE = 2  # misuse, as argparse has it for unknown options; or a fault of jax-dist itself
    INTERRUPTED = 130  # as a shell has it


def add_command(
    commands: Any, name: str, run: Callable[..., int], page: str | None, epilog: str, **more: Any
) -> argparse.ArgumentParser:
    """A subcommand, whose options are listed between its page and the epilog.

    `more` is for its parser, such as `help`; without that, `jax-dist --help` does not list it.
    """
    more = {"formatter_class": Help, **more}
    parser = commands.add_parser(name, description=page, epilog=epilog, **more)
    parser.set_defaults(run=run)
    return parser


def flag(parser: Any, *names: str, help: str) -> None:
    """Adds an option that is there or not to a parser, or to a group of its arguments."""
    parser.add_argument(*names, action="store_true", help=help)


def add_color(parser: Any) -> None:
    """Adds `--color` to a parser, or to a group of its arguments."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="%(choices)s (auto: on a terminal; NO_COLOR and FORCE_COLOR count)",
        metavar="WHEN",
    )


def add_group(commands: Any, name: str, page: str | None, epilog: str, **more: Any) -> Any:
    """A command that is nothing without one of its subcommands, which are added to the result."""

    def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
        parser.print_help(file=err)
        return Exit.USAGE

    parser = add_command(commands, name, run, page, epilog, **more)
    return parser.add_subparsers(dest="subcommand", metavar="COMMAND")


MOST_DEVICES = 4096  # that are simulated in one process
MOST_COPIES = 64  # devices that each have a copy of the state, in the memory of this machine
MOST_PROCESSES = 1024  # on one machine
_LONGEST = 2_000_000.0  # seconds; a system call takes milliseconds, as a number of 31 bits


def count(most: int, *, least: int = 1) -> Callable[[str], int]:
    """Reads a whole number of something, between two limits."""

    def read(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {most}, not {_short(text)}"
        )

    return read


def seconds(text: str) -> float:
    """A time that passes."""
    number = seconds_or_none(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def seconds_or_none(text: str) -> float:
    """A time that may be none at all."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _LONGEST:  # neither is nan
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds from 0 to {_LONGEST:.0f} (23 days), not {_short(text)}"
        )
    return number


def _short(text: str) -> str:
    return repr(text if len(text) <= 30 else f"{text[:30]}...")


_WIDEST = 100  # columns; longer lines are hard to read


class Help(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to a limit; descriptions stay as they are written."""

    def __init__(self, prog: str) -> None:
        # argparse would load shutil for the width, in every run: as much as a small check costs.
        try:
            columns = int(os.environ["COLUMNS"])
        except (KeyError, ValueError):
            try:
                columns = os.get_terminal_size().columns
            except (OSError, ValueError):  # a pipe
                columns = 80
        super().__init__(prog, width=min(columns - 2, _WIDEST))


_PATIENCE = 1.0  # seconds before anything is said
_PAUSE = 0.1  # seconds between two lines
_TICK = 0.5  # seconds between two looks at the clock


def wants_colour(when: str, stream: TextIO) -> bool:
    """Whether to write colours: as `--color` says, or else NO_COLOR and FORCE_COLOR."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def silence(stream: TextIO) -> None:
    """What is written there, now or when Python flushes it at its end, goes nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # not a file of the system
        return


def write_bytes(out: TextIO, data: bytes) -> None:
    """The very bytes, where the stream takes them."""
    out.flush()
    binary = getattr(out, "buffer", None)
    if binary is None:
        out.write(data.decode("utf-8", "replace"))
    else:
        binary.write(data)
        binary.flush()


class ProgressLine:
    """One line on a terminal: how far a run is, and since when, once it takes long; else silence.

    Args:
      stream: where it is written.
      what: of what there are so many: "files checked".
    """

    def __init__(self, stream: TextIO, what: str = "") -> None:
        self._stream = stream
        self._what = what
        self._start = time.monotonic()
        self._next = self._start + _PATIENCE
        self._said = f"{what}, " if what else ""
        self._written = False
        self._watched = stream.isatty()
        self._end: Callable[[], object] = lambda: None
        self._lock: Any = contextlib.nullcontext()
        if self._watched:
            import threading  # only here: most runs have no terminal to write to

            self._lock, closed = threading.Lock(), threading.Event()
            clock = threading.Thread(target=self._run, args=(closed.wait,), daemon=True)
            clock.start()
            self._end = lambda: (closed.set(), clock.join())

    def __call__(self, done: int, total: int) -> None:
        self._said = f"{done}/{total} {self._what}, "
        self._tick()

    def print(self, text: str) -> None:
        """A line that stays, above this one, which is taken away for a while."""
        with self._lock:
            self._next = time.monotonic() + _PATIENCE
            self._clear()
        self._stream.write(f"{text}\n")

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the line away."""
        self._end()
        with self._lock:
            self._clear()

    def _tick(self) -> None:
        """Writes the line, where it is time."""
        with self._lock:
            now = time.monotonic()
            if not self._watched or now < self._next:
                return
            self._next = now + _PAUSE
            self._written = True
            self._stream.write(f"\r{self._said}{now - self._start:.0f} s\x1b[K")
            self._stream.flush()

    def _run(self, wait: Callable[[float], bool]) -> None:
        while not wait(_TICK):  # what takes a minute says nothing meanwhile
            self._tick()

    def _clear(self) -> None:
        if self._written:
            self._written = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()
