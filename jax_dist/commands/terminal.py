"""What depends on whether a person is watching: colours, and how far a long run is."""

import os
import time
from typing import Literal, TextIO, TypeAlias

When: TypeAlias = Literal["auto", "always", "never"]

_PATIENCE = 1.0  # seconds before anything is said
_PAUSE = 0.1  # seconds between two lines


def wants_colour(when: When, stream: TextIO) -> bool:
    """Whether to write colours; NO_COLOR and FORCE_COLOR decide where `when` does not."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def nowhere() -> TextIO:
    """In place of a stream that is closed."""
    return open(os.devnull, "w", encoding="utf-8")


def silence(stream: TextIO) -> None:
    """What is written there, now or when Python flushes it at its end, goes nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # not a file of the system
        return


class Progress:
    """One line on a terminal that says how far a run is, once it takes long; else silence.

    Args:
      stream: where it is written.
      what: of what there are so many: "files checked".
    """

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._what = what
        self._watched = stream.isatty()
        self._next = time.monotonic() + _PATIENCE
        self._written = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._watched or now < self._next:
            return
        self._next = now + _PAUSE
        self._written = True
        self._stream.write(f"\r{done}/{total} {self._what}\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """Takes the line away."""
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
