"""`preempted`: one step at which all processes save and leave, after a SIGTERM to any of them."""

import signal
import threading
import types

from jax.experimental import multihost_utils

from jax_dist import _compat


class _Notice:
    """The state of preemption of this process."""

    def __init__(self) -> None:
        self.is_preempted = False
        self.last_step: int | None = None  # the last step with which `preempted` was called
        self._got_signal = False
        self._previous_handler: signal._HANDLER | None = None  # None: ours is not installed

    def check_signal(self) -> bool:
        """Return whether SIGTERM has come; the first call installs a handler for it."""
        if self._previous_handler is None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError(
                    "The first call of preempted installs a signal handler, which only the main "
                    "thread may: call preempted(0) there, before this thread starts."
                )
            # None is a handler that was set in C, which Python can neither call nor restore.
            previous = signal.signal(signal.SIGTERM, self._handle)
            self._previous_handler = previous or signal.SIG_DFL
        return self._got_signal

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        """Remember the signal, and call the previous handler; SIG_DFL at the second signal."""
        if callable(self._previous_handler):
            self._previous_handler(number, frame)
        elif self._got_signal:  # the program hangs, or does not call `preempted` any more
            signal.signal(number, self._previous_handler)
            signal.raise_signal(number)
        self._got_signal = True


_notice = _Notice()


def preempted(step: int) -> bool:
    """Return whether to save the state and leave at this step: the same step in every process.

    Call it once in each step, in every process, with the same numbers. After a SIGTERM to any
    process, all get True at the same step, some steps later, and from then on. With several
    processes this is `jax.experimental.multihost_utils.reached_preemption_sync_point`; in one
    process, the first call installs a handler for SIGTERM, which calls the previous one.

    Args:
      step: number of this step.

    Raises:
      RuntimeError: JAX's preemption service is turned off; or, in one process, the first call is
        not made by the main thread.

    >>> preempted(step=1)
    False
    """
    if not _notice.is_preempted and step != _notice.last_step:  # JAX answers once for each step
        _notice.last_step = step
        if _compat.find_joined_process() is None:
            _notice.is_preempted = _notice.check_signal()
        else:
            _notice.is_preempted = multihost_utils.reached_preemption_sync_point(step)
    return _notice.is_preempted
