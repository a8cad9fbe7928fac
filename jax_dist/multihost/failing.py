"""Fail-fast: an exception in one process is the end of all, and the end of one is not the end."""

import atexit
import logging
import os
import sys
import threading
import traceback
import types

from jax_dist import _compat
from jax_dist.multihost.endings import FAILED, say
from jax_dist.multihost.job import Job

_INTERRUPTED = 130  # the exit code of who is ended by Ctrl-C, as shells have it


def install(job: Job) -> None:
    """Tells the job of exceptions that nobody catches, and of the end of this process.

    What was there before is called first: the hooks of a notebook or of a debugger stay in place.
    """
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, where: types.TracebackType | None
    ) -> None:
        if not (job.is_here() and job.is_ending):  # else the reason is on the screen already
            before(kind, error, where)
        if job.is_here() and not _goes_on():
            _fail(job, error, in_main=True)

    def hook_in_threads(args: threading.ExceptHookArgs) -> None:
        before_in_threads(args)
        if job.is_here() and args.exc_value is not None and args.exc_type is not SystemExit:
            _fail(job, args.exc_value, in_main=False)

    sys.excepthook, threading.excepthook = hook, hook_in_threads
    # Before the functions that were there: that of JAX would wait for processes that have failed.
    atexit.register(_at_exit, job)


def _fail(job: Job, error: BaseException, *, in_main: bool) -> None:
    what = "".join(traceback.format_exception_only(error)).strip()
    code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    job.fail(what, "".join(traceback.format_exception(error)), code, in_main=in_main)


def _goes_on() -> bool:
    """Whether an uncaught exception is not the end: at the prompt of a Python session."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _at_exit(job: Job) -> None:
    if not job.is_here():
        return
    if job.has_failed:
        code = job.wait_until_known()
        logging.shutdown()
        say("")
        os._exit(code)
    if not job.finish():
        # By `sys.exit`, perhaps, whose code only Python itself knows: so it goes on to its end.
        job.wait_until_known()
        _compat.leave_coordination()
