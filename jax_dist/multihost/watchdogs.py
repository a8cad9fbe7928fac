"""`watchdog`: a process that is alive and does not get on is named, and the job is ended."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from jax_dist.multihost.channel import Status
from jax_dist.multihost.failures import (
    ANSWER,
    SILENT,
    status_without_watchdog,
)
from jax_dist.multihost.initialization import current_stalls
from jax_dist.multihost.preemption import STALLED, end_now, seen_waiting_in_jax, stack_of_main

Item = TypeVar("Item")

_END = 4.0  # seconds that rank 0 may take to judge


class watchdog:  # in small letters, for it is used as a function
    """Ends the job when a step takes too long, and names the process that holds it up.

    A process that sleeps, reads from a disk that hangs or waits for a lock is alive: its heartbeats
    go on, and the others wait for it in their next collective, for ever. As a context manager it
    watches from its start to its end; inside, each `step` starts a new period of `seconds`. When
    the time is up in one process, all report where they are. The watchdog names the process that is
    behind the others, or is not waiting in JAX while they are, or does not answer. All processes
    print the stacks of their threads and exit with code 87, after `jax_dist.multihost.initialize`
    all together.

    It costs next to nothing: a step sets a number, and a thread reads it.

    Args:
      seconds: how long a step may take. The first one compiles.

    Raises:
      ValueError: `seconds` is not positive.

    >>> with watchdog(60) as dog:
    ...     for batch in dog.steps([1.0, 2.0]):
    ...         loss = batch**2
    """

    def __init__(self, seconds: float):
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, not {seconds}")
        self._seconds = seconds
        self._watch: _Watch | None = None

    def __enter__(self) -> "watchdog":
        self._watch = _Watch(self._seconds)
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def step(self) -> "_Step":
        """Says that a step begins, and with it that the one before has ended.

        Returns:
          A context, for those who want to say where the step ends: what comes between two steps,
          such as the loading of data, is told apart then.
        """
        if self._watch is not None:
            self._watch.begin()
        return _Step(self._watch)

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the work on each one is a step, and getting the next one comes between.

        Args:
          items: batches, or numbers.
        """
        for item in items:
            with self.step():
                yield item


class _Step(contextlib.AbstractContextManager[None]):
    def __init__(self, watch: "_Watch | None"):
        self._watch = watch

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.end()


class _Watch:
    """One watchdog at work."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._at = (0, False, time.monotonic())  # one object: the thread reads it whole
        self._stopped = threading.Event()

    def start(self) -> None:
        stalls = current_stalls()
        if stalls is not None:
            stalls.status = self._status
        threading.Thread(target=self._run, name="jax_dist watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        stalls = current_stalls()
        if stalls is not None:
            stalls.status = status_without_watchdog

    def begin(self) -> None:
        self._at = (self._at[0] + 1, True, time.monotonic())

    def end(self) -> None:
        self._at = (self._at[0], False, time.monotonic())

    def _status(self) -> Status:
        step, inside, since = self._at
        return Status(
            step, inside, time.monotonic() - since, seen_waiting_in_jax(), stack_of_main()
        )

    def _run(self) -> None:
        while not self._stopped.wait(max(0.01, self._left())):
            if self._left() <= 0:
                self._bark()
                return

    def _left(self) -> float:
        return self._at[2] + self._seconds - time.monotonic()

    def _bark(self) -> None:
        stalls, silence = current_stalls(), ""
        if stalls is not None:
            stalls.report(self._seconds)
            time.sleep(ANSWER + _END)  # the end comes from rank 0
            silence = f"\nRank 0 {SILENT}."
        status = self._status()
        text = f"a step took more than {self._seconds:g} s: this process stands {status}, at:"
        text = f"{text}\n{status.stack}{silence}"
        end_now(text, STALLED, stacks=True)
