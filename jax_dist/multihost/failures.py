"""One rank that fails, or has left while others wait: all end, and it is named."""

import atexit
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable

from jax_dist import _compat
from jax_dist.multihost.channel import (
    Stalled,
    Status,
    Where,
)
from jax_dist.multihost.job import Job
from jax_dist.multihost.preemption import FAILED, STALLED, say, seen_waiting_in_jax, stack_of_main
from jax_dist.multihost.ranks import do

ANSWER = 3.0  # seconds in which a process that lives says where it stands
SILENT = "does not answer: it is stopped, or native code in it holds Python's lock"


def status_without_watchdog() -> Status:
    """Where this process stands."""
    return Status(
        step=0,
        inside=False,
        seconds=0.0,
        in_jax=seen_waiting_in_jax(),
        stack=stack_of_main(),
        watched=False,
    )


class Stalls:
    """What a process of a job does about watchdogs, its own and those of others.

    Attributes:
      status: says where this process stands.
    """

    def __init__(self, job: Job):
        self.status: Callable[[], Status] = status_without_watchdog
        self._job = job
        self._answers: dict[int, Status] | None = None  # in rank 0, while it asks
        self._seconds = 0.0  # of the watchdog that has asked first
        job.handle(Stalled, self._on_stalled)
        job.handle(Where, self._on_where)
        job.handle(Status, self._on_status)

    def report(self, seconds: float) -> None:
        """This process has not got on for so long: all shall say where they stand, and end."""
        self._job.tell(0, Stalled(seconds))

    def _on_stalled(self, rank: int, message: Stalled) -> None:
        """In rank 0: asks all, and judges when they have answered or had the time to."""
        del rank
        if self._answers is None:
            self._answers, self._seconds = {}, message.seconds
            self._job.tell_all(Where())
            judge = threading.Timer(ANSWER, self._judge)
            judge.daemon = True
            judge.start()

    def _on_where(self, rank: int, message: Where) -> None:
        del rank, message
        self._job.tell(0, self.status())

    def _on_status(self, rank: int, message: Status) -> None:
        if self._answers is not None:
            self._answers[rank] = message
            if len(self._answers) == self._job.processes:
                self._judge()

    def _judge(self) -> None:
        answers = dict(self._answers or {})
        culprits = _culprits(answers, self._job.processes)
        text = _verdict(self._seconds, answers, culprits, self._job.processes)
        self._job.end_all(culprits[0] if culprits else None, text, STALLED, stacks=True)


def _culprits(answers: dict[int, Status], processes: int) -> list[int]:
    """Who holds up the others: silent, behind them, or not waiting where they wait."""
    silent = [rank for rank in range(processes) if rank not in answers]
    if silent:
        return silent
    watched = {rank: status for rank, status in answers.items() if status.watched}
    behind = _lowest({rank: (status.step, status.inside) for rank, status in watched.items()})
    if len(behind) < len(watched):
        return behind
    busy = [rank for rank, status in answers.items() if not status.in_jax]
    return busy if len(busy) < len(answers) else []


def _lowest(positions: dict[int, tuple[int, bool]]) -> list[int]:
    if not positions:
        return []
    first = min(positions.values())
    return sorted(rank for rank, position in positions.items() if position == first)


def _verdict(
    seconds: float, answers: dict[int, Status], culprits: list[int], processes: int
) -> str:
    lines = [f"a step took more than {seconds:g} s."]
    if culprits:
        lines[0] += f" {do(culprits, 'holds', 'hold')} up the others."
    for rank in range(processes):
        status = answers.get(rank)
        lines.append(f"  * rank {rank} {'stands ' + str(status) if status else SILENT}")
    for rank in culprits:
        if rank in answers:
            lines.append(f"Rank {rank} stands at:\n{answers[rank].stack}")
    return "\n".join(lines)


# --- fail-fast: an exception in one process is the end of all, and the end of one is not the end


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
