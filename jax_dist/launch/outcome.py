"""How a process and a job ended: data, exit codes, and the same in words."""

import enum
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_dist.multihost.ranks import do, name_ranks


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
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {_signal_name(-exit_code)}"


def _signal_name(number: int) -> str:
    """Such as SIGTERM; the number where it has no name, as most real-time signals.

    >>> _signal_name(15), _signal_name(40)
    ('SIGTERM', '40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _as_shell(exit_code: int) -> int:
    """The exit code by which a shell tells it.

    >>> _as_shell(3), _as_shell(-9)
    (3, 137)
    """
    return exit_code if exit_code >= 0 else 128 - exit_code


_EXIT_CODES = {
    Reason.TIMED_OUT: 124,  # as timeout(1) has it
    Reason.INTERRUPTED: _as_shell(-signal.SIGINT),
    Reason.TERMINATED: _as_shell(-signal.SIGTERM),
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
        return _as_shell(-signal.SIGSTOP if self.stopped else self.exit_code)


@dataclass(frozen=True)
class JobOutcome:
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


# --- what is said of a job at its end


_SHOWN = 4  # ranks whose last lines are shown
_SHOWN_LINES = 5  # of each
_SHOWN_LENGTH = 1000  # characters of a line


def causes(outcome: JobOutcome) -> Iterator[str]:
    """Who failed first, or was still running, with the last lines of its output."""
    if outcome.reason is Reason.TIMED_OUT:
        yield from _timed_out(outcome)
    elif outcome.first is not None:
        yield _failed(outcome, outcome.first)
        if outcome.first.exit_code == -signal.SIGABRT:  # as JAX does when it loses another rank
            yield from _raised_before(outcome)


def summary(outcome: JobOutcome) -> str:
    """One line: ranks, seconds, exit code, and how each rank ended."""
    count = len(outcome.ended)
    noun = "rank" if count == 1 else "ranks"
    total = f"{count} {noun}, {outcome.seconds:.1f} s, exit code {outcome.exit_code}"
    if all(each.exit_code == 0 for each in outcome.ended):
        return total
    ways: dict[str, list[int]] = {}
    if outcome.first is not None:
        ways[_way(outcome.first)] = []  # it comes first
    for each in outcome.ended:
        ways.setdefault(_way(each), []).append(each.rank)
    told = "; ".join(f"{name_ranks(ranks)}: {way}" for way, ranks in ways.items())
    return f"{total} ({told})"


def _failed(outcome: JobOutcome, first: Ended) -> str:
    if outcome.waited_for:
        how = f"{_way(first)}, and the others waited for it"
    else:
        how = ending(first.exit_code) + (", which was passed on to it" if first.was_ended else "")
    return (
        f"rank {first.rank} failed first: {how}, "
        f"after {first.seconds:.1f} s; the end of its output:\n{_indented(first.tail)}"
    )


def _raised_before(outcome: JobOutcome) -> Iterator[str]:
    assert outcome.first is not None
    for each in outcome.ended:
        if each.rank != outcome.first.rank and each.exit_code and each.traceback:
            yield f"before that, rank {each.rank} raised:\n{_indented(each.traceback)}"


def _timed_out(outcome: JobOutcome) -> Iterator[str]:
    running = do(outcome.unfinished, "was running", "were running")
    yield f"the time is up (--timeout), and {running}"
    for each in outcome.ended:
        if each.rank in outcome.unfinished[:_SHOWN]:
            tail = _indented(each.tail[-_SHOWN_LINES:])
            yield f"the end of the output of rank {each.rank}:\n{tail}"


def _indented(tail: Sequence[str]) -> str:
    return "\n".join(f"    {line[:_SHOWN_LENGTH]}" for line in tail or ["(it wrote nothing)"])


def _way(each: Ended) -> str:
    if each.stopped:
        return "stopped (SIGSTOP)"
    if each.sent is None or each.exit_code == 0:
        return ending(each.exit_code)
    if each.was_ended:
        return f"stopped by {_signal_name(each.sent)}"
    return f"{ending(each.exit_code)} after {_signal_name(each.sent)}"
