"""What is said of a job at its end."""

import signal
from collections.abc import Iterator, Sequence

from jax_dist.launch.outcome import Ended, Outcome, Reason, ending, signal_name
from jax_dist.multihost.ranks import do, name_ranks

_SHOWN = 4  # ranks whose last lines are shown
_SHOWN_LINES = 5  # of each
_SHOWN_LENGTH = 1000  # characters of a line


def causes(outcome: Outcome) -> Iterator[str]:
    """Who failed first, or was still running, with the last lines of its output."""
    if outcome.reason is Reason.TIMED_OUT:
        yield from _timed_out(outcome)
    elif outcome.first is not None:
        yield _failed(outcome, outcome.first)
        if outcome.first.exit_code == -signal.SIGABRT:  # as JAX does when it loses another rank
            yield from _raised_before(outcome)


def summary(outcome: Outcome) -> str:
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


def _failed(outcome: Outcome, first: Ended) -> str:
    if outcome.waited_for:
        how = f"{_way(first)}, and the others waited for it"
    else:
        how = ending(first.exit_code) + (", which was passed on to it" if first.was_ended else "")
    return (
        f"rank {first.rank} failed first: {how}, "
        f"after {first.seconds:.1f} s; the end of its output:\n{_indented(first.tail)}"
    )


def _raised_before(outcome: Outcome) -> Iterator[str]:
    assert outcome.first is not None
    for each in outcome.ended:
        if each.rank != outcome.first.rank and each.exit_code and each.traceback:
            yield f"before that, rank {each.rank} raised:\n{_indented(each.traceback)}"


def _timed_out(outcome: Outcome) -> Iterator[str]:
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
        return f"stopped by {signal_name(each.sent)}"
    return f"{ending(each.exit_code)} after {signal_name(each.sent)}"
