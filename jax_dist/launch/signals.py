"""Signals that the launcher gets, and passes on."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def received() -> Iterator[list[int]]:
    """A list that grows by each signal that comes in the block; none of them ends the process.

    What was ignored before stays so: a shell lets a job in the background ignore Ctrl-C. Outside
    the main thread, Python hands out no signals, and the list stays empty.
    """
    numbers: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        numbers.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _PASSED_ON}
    # None is a handler that Python did not install, and cannot put back.
    changed = {k: old for k, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in changed:
            signal.signal(number, note)
        yield numbers
    finally:
        for number, old in changed.items():
            signal.signal(number, old)
