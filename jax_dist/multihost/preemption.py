"""Whether this job is being told to leave: the same answer, at the same step, in every process."""

import signal
import threading
import types
from collections.abc import Callable
from typing import Any

from jax.experimental import multihost_utils

from jax_dist import _compat
from jax_dist.errors import message
from jax_dist.multihost import ranks

_NOT_STARTED = "has not been initialized"  # what JAX says of its service


def preempted(step: int) -> bool:
    """Whether to save and leave now: one of the processes got SIGTERM.

    All processes get True at the same step, a few steps after the signal: a process that did not
    get it may already be ahead. Call it once in each step, in every process, with the same numbers,
    each larger than the one before.

    With `jax.distributed`, JAX's preemption service catches the signal, and the process no longer
    ends by SIGTERM. Without it, the first call installs a handler, which records the signal and
    then calls the previous Python handler; only a second SIGTERM ends the process.

    Args:
      step: the number of this step.

    Returns:
      Whether this is the step to leave at. It stays so for the steps after it.

    Raises:
      RuntimeError: JAX's preemption service is turned off, or, in one process, the first call is
        not made by the main thread, so that no handler can be installed.

    >>> preempted(step=1)
    False
    """
    return _notice.at(step)


def reached_preemption_sync_point(step: int) -> bool:
    """The same as `preempted`, under the name that it has in `jax.experimental.multihost_utils`.

    Args:
      step: the number of this step.

    Returns:
      Whether to save and leave now.

    Raises:
      RuntimeError: as `preempted` does.

    >>> reached_preemption_sync_point(step=2)
    False
    """
    return preempted(step)


class _Notice:
    """What this process knows of its preemption."""

    def __init__(self):
        self._since: int | None = None  # step
        self._asked: int | None = None  # the last step
        self._got_signal = False
        self._handles_signal = False

    def at(self, step: int) -> bool:
        if self._since is None and step != self._asked:  # the service answers once for each step
            self._asked = step
            ranks.reached(step)
            if self._is_last(step):
                self._since = step
        return self._since is not None

    def watch(self) -> None:
        """Handles the signal from now on, where JAX does not."""
        if _compat.coordination_client() is None and not self._handles_signal:
            self._before = _set_handler(self._handle)
            self._handles_signal = True

    def _is_last(self, step: int) -> bool:
        if _compat.coordination_client() is None:
            self.watch()
            return self._got_signal
        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            if _NOT_STARTED not in str(error):
                raise
            raise _no_service() from None

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        """Runs in the main thread, between two instructions of the program."""
        if callable(self._before):
            self._before(number, frame)
        elif self._got_signal:  # somebody is impatient, or nobody asks `preempted` any more
            signal.signal(number, self._before)
            signal.raise_signal(number)
        self._got_signal = True


_notice = _Notice()


def watch() -> None:
    """Notices SIGTERM from now on, before the first step is asked about."""
    _notice.watch()


def _set_handler(handle: Callable[[int, Any], None]) -> Any:
    """The handler that was there."""
    if threading.current_thread() is not threading.main_thread():
        raise _not_main_thread()
    # None: a handler that was not set from Python. It cannot be set again.
    return signal.signal(signal.SIGTERM, handle) or signal.SIG_DFL


def _no_service() -> RuntimeError:
    return RuntimeError(
        message(
            what="preempted: JAX's preemption service does not run",
            which=["jax_enable_preemption_service is False"],
            why="only this service lets all processes leave at the same step",
            do="Set JAX_ENABLE_PREEMPTION_SERVICE=1, or leave it out, before "
            "jax.distributed.initialize is called.",
        )
    )


def _not_main_thread() -> RuntimeError:
    return RuntimeError(
        message(
            what="preempted: its first call is not made by the main thread",
            which=[f"it is made by the thread {threading.current_thread().name!r}"],
            why="Python lets only the main thread say what a signal does",
            do="Call `preempted(0)` once in the main thread, before this thread starts.",
        )
    )
