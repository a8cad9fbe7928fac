"""How a process is ended from another of its threads, while the main one may wait for ever."""

import contextlib
import faulthandler
import os
import sys
from typing import NoReturn

FAILED = 1
STALLED = 87  # of a job that the watchdog has ended
_SECONDS = 3.0  # that the last words may take


def end_now(text: str, code: int, *, stacks: bool = False) -> NoReturn:
    """Says a last word and ends this process, without `finally`, `atexit` or destructors.

    Those of JAX would wait for the other processes.

    Args:
      text: for standard error.
      code: the exit code.
      stacks: whether to show what each thread was doing.
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
