"""Where the main thread of this process stands, what SIGTERM tells it, and how the process ends.

Another thread looks at it: the one that hears from the other ranks, or a watchdog's. It must never
wait for the main thread, which may be stuck in a collective.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Iterator
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from jax_dist import _compat
from jax_dist.errors import refusal
from jax_dist.multihost import ranks

FAILED = 1
STALLED = 87  # of a job that the watchdog has ended
_SECONDS = 3.0  # that the last words may take


def end_now(text: str, code: int, *, stacks: bool = False) -> NoReturn:
    """Says a last word and ends this process, without `finally`, `atexit` or destructors.

    Those of JAX would wait for the other processes. `stacks`: whether to show what each thread
    does.
    """
    # Somebody may hold the lock of a stream, and the interpreter's too: this one needs neither.
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no file to write to
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
    say(text, stacks=stacks)
    os._exit(code)


def say(text: str, *, stacks: bool = False) -> None:
    """On standard error, after all that was printed so far."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # closed, or none
        sys.stdout.flush()
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if text:
            sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
        if stacks:
            sys.stderr.write("The stacks of all threads of this process:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)


# --- where the main thread of this process stands, and whether it gets on


BUSY = 0.1  # of the time that goes by: who uses more of the CPUs computes
_SHORTEST = 0.05  # seconds between two looks at it; the look itself uses a CPU
_LOOKS, _BETWEEN_LOOKS = 5, 0.02  # a number, and seconds
_FUTEX_CALLS = ("202", "98")  # numbers of the system call on x86-64 and on arm64
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
_SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_OURS = str(pathlib.Path(__file__).parents[1])


def _main_frames() -> Iterator[types.FrameType]:
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_of_main() -> str:
    """As a traceback shows it."""
    frame = next(_main_frames(), None)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def _waits_in_jax() -> bool:
    """Whether the main thread is blocked in JAX, as far as can be seen from outside.

    JAX waits in Python functions of its own, or, for an array or in the call of a compiled program,
    in native code right below the user's function. Then only the kernel knows that the thread
    waits, and not what for: a thread that sleeps, reads or writes waits otherwise (a futex is what
    native code waits on for other threads); Python's own locks are taken in its library.
    """
    frame = next(_main_frames(), None)
    if frame is None:
        return False
    path = frame.f_code.co_filename
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in ("jax", "jaxlib")]
    if path.startswith((_OURS, *[os.path.dirname(file) for file in loaded if file is not None])):
        return True
    if path.startswith(_STDLIB) and not path.startswith(_SITE):
        return False
    task = pathlib.Path(f"/proc/self/task/{threading.main_thread().native_id}")
    try:
        if "futex" in (task / "wchan").read_text():
            return True
        return (task / "syscall").read_text().split()[0] in _FUTEX_CALLS
    except OSError:  # not Linux, or not permitted
        return False


def seen_waiting_in_jax() -> bool:
    """The same, in several looks: one may find the thread awake for a moment."""
    for _ in range(_LOOKS):
        if _waits_in_jax():
            return True
        time.sleep(_BETWEEN_LOOKS)
    return False


def is_leaving_jax() -> bool:
    """Whether the main thread is in `jax.distributed.shutdown`, where JAX's processes part."""
    shutdown = jax.distributed.shutdown.__code__
    return any(frame.f_code is shutdown for frame in _main_frames())


class Stall:
    """Since when the main thread has stood still, waiting in JAX."""

    def __init__(self):
        self._since = self._last = time.monotonic()
        self._cpu = time.process_time()
        self._position = _position()

    def blocked_for(self) -> float:
        """Seconds. To be asked a few times a second."""
        now, cpu = time.monotonic(), time.process_time()
        if now - self._last < _SHORTEST:
            return self._last - self._since
        busy = cpu - self._cpu > BUSY * (now - self._last)
        position = _position()
        moved = position != self._position
        self._last, self._cpu, self._position = now, cpu, position
        if busy or moved or not _waits_in_jax():
            self._since = now
        return now - self._since


def _position() -> tuple:
    """Of the main thread: the code and the instruction in each of its frames."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in _main_frames())


# --- whether this job is being told to leave: the same answer, at the same step, in every process


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
            if not self._asked:  # `preempted(0)` may only install the handler
                ranks.progress.say(began=step - 1)
            self._asked = step
            ranks.progress.say(reached=step)
            if self._is_last(step):
                self._since = step
        return self._since is not None

    def _watch(self) -> None:
        """Handles the signal from now on, where JAX does not."""
        if self._handles_signal:
            return
        if threading.current_thread() is not threading.main_thread():
            raise refusal(
                RuntimeError,
                what="preempted: its first call is not made by the main thread",
                which=[f"it is made by the thread {threading.current_thread().name!r}"],
                why="Python lets only the main thread say what a signal does",
                do="Call `preempted(0)` once in the main thread, before this thread starts.",
            )
        # None: a handler that was not set from Python. It cannot be set again.
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
        self._handles_signal = True

    def _is_last(self, step: int) -> bool:
        if _compat.coordination_client() is None:
            self._watch()
            return self._got_signal
        return multihost_utils.reached_preemption_sync_point(step)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        """Runs in the main thread, between two instructions of the program."""
        if callable(self._before):
            self._before(number, frame)
        elif self._got_signal:  # somebody is impatient, or nobody asks `preempted` any more
            signal.signal(number, self._before)
            signal.raise_signal(number)
        self._got_signal = True


_notice = _Notice()
