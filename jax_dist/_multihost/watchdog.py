"""`watchdog`: end this process when a step takes too long, and print what it was doing."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import TypeVar

from jax_dist import _compat, launch
from jax_dist.errors import ArgumentError

_Item = TypeVar("_Item")

_SPARE_SECONDS = 2.0  # for the Python thread to print, before the C thread ends the process
_STDERR = 2  # file descriptor: sys.stderr may be replaced, or locked by a thread that hangs


class watchdog:  # a context manager with a function's name, like contextlib.suppress
    """A limit on the time of each step: a step that takes too long ends this process.

    A process that waits for a lock or a slow disk keeps its heartbeats, and the others wait for it
    in their next collective, without a limit. An exception whose clean-up (`__exit__`, `finally`)
    runs a collective waits there as well, and is never printed. Inside the context, each `step`
    starts a new period of `seconds`. When it is over, the process prints the exceptions that are
    being handled and the stacks of all threads, and exits with code 1. Enter it before other
    context managers, so that their exits are timed, too. It uses the only timer of `faulthandler`.

    Args:
      seconds: how long a step may take; the first one compiles.

    Raises:
      ArgumentError: `seconds` is not positive and finite.
      RuntimeError: on entry, if another watchdog is active; by `steps`, outside of the block.

    >>> with watchdog(60) as dog:
    ...     for batch in dog.steps([1.0, 2.0]):
    ...         loss = batch**2
    """

    _is_free = threading.Lock()

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"watchdog(seconds={seconds}): it must be positive and finite.")
        self._seconds = seconds
        self._deadline = 0.0
        self._stopped = threading.Event()
        self._stopped.set()

    def __enter__(self) -> "watchdog":
        if not watchdog._is_free.acquire(blocking=False):
            raise RuntimeError("Another watchdog is active: enter one, around both blocks.")
        self._stopped = threading.Event()
        self._start_period()
        threading.Thread(target=self._watch, name="jax_dist watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        watchdog._is_free.release()

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Start a new period; as a context manager, also at the end of the block."""
        if not self._stopped.is_set():
            self._start_period()
        return self._restart_after()

    def steps(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, such as batches or step numbers, and start a new period with each."""
        if self._stopped.is_set():
            raise RuntimeError("steps() needs its block: `with watchdog(60) as dog:`.")
        for item in items:
            self.step()
            yield item

    @contextlib.contextmanager
    def _restart_after(self) -> Iterator[None]:
        yield
        self.step()

    def _start_period(self) -> None:
        """Start the time of a step in both timers: a Python thread's, and faulthandler's."""
        self._deadline = time.monotonic() + self._seconds
        # A C thread: it ends the process even if native code holds the interpreter's lock.
        faulthandler.dump_traceback_later(self._seconds + _SPARE_SECONDS, exit=True, file=_STDERR)

    def _watch(self) -> None:
        """Wait in a thread of its own, and end the process when the time of a step is over."""
        stopped = self._stopped  # a later `with` replaces it
        while not stopped.wait(max(0.01, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._end()

    def _end(self) -> None:
        joined = _compat.find_joined_process()
        prefix = ""
        if joined is not None:
            launch.note("failed", joined.rank)
            prefix = f"rank {joined.rank}: "
        text = f"{prefix}a step took more than {self._seconds:g} s\n{_format_exceptions()}"
        os.write(_STDERR, f"{text}Stacks of all threads:\n".encode(errors="replace"))
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        os._exit(1)


def _format_exceptions() -> str:
    """Return the tracebacks of the exceptions that threads are handling at this moment."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, error in sys._current_exceptions().items():
        if isinstance(error, tuple):  # Python 3.11
            error = error[1]
        if error is not None:
            lines = "".join(traceback.format_exception(error))
            texts.append(f"Exception being handled in {names.get(ident, ident)}:\n{lines}")
    return "".join(texts)
