"""How a process ended, in words and as an exit code."""

import signal


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

