"""How a process ended, in words and as an exit code."""

import signal
from collections.abc import Sequence


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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_in_words([3]), ranks_in_words([0, 2, 3, 4])
    ('rank 3', 'ranks 0, 2-4')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [_run_in_words(run) for run in runs]
    return f"rank {words[0]}" if len(ranks) == 1 else f"ranks {', '.join(words)}"


def _run_in_words(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}, {run[1]}" if len(run) == 2 else f"{run[0]}-{run[-1]}"
