"""How a process and a job ended: data, exit codes and words."""

import enum
import signal
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a job ended."""

    FINISHED = enum.auto()  # all ranks ended with exit code 0
    FAILED = enum.auto()
    TIMED_OUT = enum.auto()
    INTERRUPTED = enum.auto()  # by Ctrl-C
    TERMINATED = enum.auto()  # by a second SIGTERM


def ending(exit_code: int) -> str:
    """In words; a negative code is the signal that ended the process.

    >>> ending(3), ending(-9)
    ('exit code 3', 'signal SIGKILL')
    """
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    """Such as SIGTERM; the number where it has no name, as most real-time signals.

    >>> signal_name(15), signal_name(40)
    ('SIGTERM', '40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def as_shell(exit_code: int) -> int:
    """The exit code by which a shell tells it.

    >>> as_shell(3), as_shell(-9)
    (3, 137)
    """
    return exit_code if exit_code >= 0 else 128 - exit_code


_EXIT_CODES = {
    Reason.TIMED_OUT: 124,  # as timeout(1) has it
    Reason.INTERRUPTED: as_shell(-signal.SIGINT),
    Reason.TERMINATED: as_shell(-signal.SIGTERM),
}


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    sent: int | None  # the signal that it had got from the launcher before
    seconds: float  # since the start of the job
    tail: tuple[str, ...]  # the last lines of its output
    traceback: tuple[str, ...] = ()  # the last one that it wrote
    stopped: bool = False  # by SIGSTOP, when the others could not go on without it

    @property
    def was_ended(self) -> bool:
        """Whether the launcher has ended it."""
        return self.sent is not None and self.exit_code == -self.sent

    @property
    def code(self) -> int:
        """As a shell tells it."""
        return as_shell(-signal.SIGSTOP if self.stopped else self.exit_code)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    reason: Reason
    seconds: float
    ended: tuple[Ended, ...]  # by rank
    first: Ended | None = None  # the rank that failed first
    seen: Ended | None = None  # the one that was seen first to fail, for it or by itself
    unfinished: tuple[int, ...] = ()  # the ranks that were running when it was to stop
    was_terminated: bool = False  # the ranks were told to save and leave

    @property
    def waited_for(self) -> bool:
        """Whether the rank that failed first did not fail by itself: it did not come, or left."""
        if self.first is None or self.seen is None or self.first.rank == self.seen.rank:
            return False
        return self.first.stopped or self.first.was_ended or self.first.exit_code == 0

    @property
    def exit_code(self) -> int:
        """What the launcher itself leaves with."""
        if self.reason in _EXIT_CODES:
            return _EXIT_CODES[self.reason]
        if self.first is None or self.seen is None:
            return 0
        return (self.first if self.first.stopped or not self.waited_for else self.seen).code
