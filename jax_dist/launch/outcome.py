"""How a job ended: data."""

import enum
import signal
from dataclasses import dataclass

from jax_dist.launch.endings import as_shell


class Reason(enum.Enum):
    """Why a job ended."""

    FINISHED = enum.auto()  # all ranks ended with exit code 0
    FAILED = enum.auto()
    TIMED_OUT = enum.auto()
    INTERRUPTED = enum.auto()  # by Ctrl-C
    TERMINATED = enum.auto()  # by a second SIGTERM


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


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    reason: Reason
    seconds: float
    ended: tuple[Ended, ...]  # by rank
    first: Ended | None = None  # the rank that failed first
    unfinished: tuple[int, ...] = ()  # the ranks that were running when it was to stop

    @property
    def exit_code(self) -> int:
        """What the launcher itself leaves with."""
        if self.reason in _EXIT_CODES:
            return _EXIT_CODES[self.reason]
        return 0 if self.first is None else as_shell(self.first.exit_code)
