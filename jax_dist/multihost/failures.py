"""One rank that fails, has left while others wait, or stands still: all end, and it is named."""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import jax

from jax_dist import _compat
from jax_dist._exceptions import told
from jax_dist.multihost.channel import Message
from jax_dist.multihost.job import SAME_CALLS, Job
from jax_dist.multihost.main_thread import (
    BUSY,
    FAILED,
    STALLED,
    end_now,
    say,
    seen_waiting_in_jax,
    stack_of_main,
)
from jax_dist.multihost.ranks import do

_Item = TypeVar("_Item")

_END = 4.0  # seconds that rank 0 may take to judge
_LOOK = 0.1  # seconds between two looks at whether a process computes


@dataclass(frozen=True)
class _Stalled(Message):
    """To rank 0: a watchdog has waited in vain."""

    seconds: float


@dataclass(frozen=True)
class _Where(Message):
    """From rank 0: where do you stand?"""


@dataclass(frozen=True)
class Status(Message):
    """The answer: where a process stands."""

    step: int  # the number of the last one that began; 0 before the first
    inside: bool  # whether it has not ended
    seconds: float  # since then
    in_jax: bool
    stack: str
    watched: bool = True

    def __str__(self) -> str:
        if not self.watched:
            where = "without a watchdog"
        elif self.step == 0:
            where = f"before its first step for {self.seconds:.0f} s"
        elif self.inside:
            where = f"in step {self.step} for {self.seconds:.0f} s"
        else:
            where = f"after step {self.step} for {self.seconds:.0f} s"
        return f"{where}, {'waiting in JAX' if self.in_jax else 'not waiting in JAX'}"


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
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def step(self) -> contextlib.AbstractContextManager[object]:
        """Says that a step begins, and with it that the one before has ended.

        Returns:
          A context, for those who want to say where the step ends: what comes between two steps,
          such as the loading of data, is told apart then.
        """
        return contextlib.nullcontext() if self._watch is None else self._watch.begin()

    def steps(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items; the work on each one is a step, and getting the next one comes between.

        Args:
          items: batches, or numbers.
        """
        for item in items:
            with self.step():
                yield item


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """One watchdog at work; as a context, the step that it watches."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._at = (0, False, time.monotonic())  # one object: the thread reads it whole
        self._stopped = threading.Event()
        if stalls is not None:
            stalls.status = self._status
        threading.Thread(target=self._run, name="jax_dist watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if stalls is not None:
            stalls.status = _status_without_watchdog

    def begin(self) -> "_Watch":
        self._at = (self._at[0] + 1, True, time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        self._at = (self._at[0], False, time.monotonic())

    def _status(self) -> Status:
        step, inside, since = self._at
        return Status(
            step, inside, time.monotonic() - since, seen_waiting_in_jax(), stack_of_main()
        )

    def _run(self) -> None:
        while not self._stopped.wait(max(0.01, self._left())):
            if self._left() > 0:
                continue
            silence = ""
            if stalls is not None:
                stalls.report(self._seconds)
                time.sleep(_ANSWER + _END)  # the end comes from rank 0
                silence = f"\nRank 0 {_SILENT}."
            status = self._status()
            text = f"a step took more than {self._seconds:g} s: this process stands {status}, at:"
            end_now(f"{text}\n{status.stack}{silence}", STALLED, stacks=True)

    def _left(self) -> float:
        return self._at[2] + self._seconds - time.monotonic()


# --- where the ranks of a job stand, when a watchdog of one of them asks


_ANSWER = 3.0  # seconds in which a process that lives says where it stands
_SILENT = "does not answer: it is stopped, or native code in it holds Python's lock"


def _status_without_watchdog() -> Status:
    in_jax, stack = seen_waiting_in_jax(), stack_of_main()
    return Status(step=0, inside=False, seconds=0.0, in_jax=in_jax, stack=stack, watched=False)


class Stalls:
    """What a process of a job does about watchdogs, its own and those of others.

    Attributes:
      status: says where this process stands.
    """

    def __init__(self, job: Job):
        self.status: Callable[[], Status] = _status_without_watchdog
        self._job = job
        self._answers: dict[int, Status] | None = None  # in rank 0, while it asks
        self._seconds = 0.0  # of the watchdog that has asked first
        job.hear_else = self._hear

    def report(self, seconds: float) -> None:
        """This process has not got on for so long: all shall say where they stand, and end."""
        self._job.tell(0, _Stalled(seconds))

    def _hear(self, rank: int, message: Message) -> None:
        match message:
            case _Stalled() if self._answers is None:  # rank 0 asks all, and judges when they have
                self._answers, self._seconds = {}, message.seconds  # answered or had the time to
                self._job.tell_all(_Where())
                judge = threading.Timer(_ANSWER, self._judge)
                judge.daemon = True
                judge.start()
            case _Where():
                self._job.tell(0, self.status())
            case Status() if self._answers is not None:
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
    places = {rank: (each.step, each.inside) for rank, each in answers.items() if each.watched}
    behind = sorted(rank for rank, place in places.items() if place == min(places.values()))
    if len(behind) < len(places):
        return behind
    busy = [rank for rank, status in answers.items() if not status.in_jax]
    return busy if len(busy) < len(answers) else []


def _verdict(
    seconds: float, answers: dict[int, Status], culprits: list[int], processes: int
) -> str:
    lines = [f"a step took more than {seconds:g} s."]
    if culprits:
        lines[0] += f" {do(culprits, 'holds', 'hold')} up the others."
    for rank in range(processes):
        status = answers.get(rank)
        lines.append(f"  * rank {rank} {'stands ' + str(status) if status else _SILENT}")
    for rank in culprits:
        if rank in answers:
            lines.append(f"Rank {rank} stands at:\n{answers[rank].stack}")
    return "\n".join(lines)


stalls: Stalls | None = None
"""How to ask the other processes where they stand; `initialize` sets it."""


# --- fail-fast: an exception in one process is the end of all, and the end of one is not the end


_INTERRUPTED = 130  # the exit code of who is ended by Ctrl-C, as shells have it


def install(job: Job, early_exit_timeout: Callable[[], float]) -> None:
    """Tells the job of exceptions that nobody catches, and of the end of this process.

    What was there before is called first: the hooks of a notebook or of a debugger stay in place.

    Args:
      job: the job.
      early_exit_timeout: gives the seconds that a process may stand still, waiting in JAX.
    """
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, where: types.TracebackType | None
    ) -> None:
        at_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # there, it is not the end
        is_shown = job.is_here() and job.is_ending  # the reason is on the screen already
        show = contextlib.nullcontext if is_shown else functools.partial(before, kind, error, where)
        _fail(job, error if not at_prompt else None, show, in_main=True)

    def hook_in_threads(args: threading.ExceptHookArgs) -> None:
        error = None if args.exc_type is SystemExit else args.exc_value
        _fail(job, error, functools.partial(before_in_threads, args), in_main=False)

    sys.excepthook, threading.excepthook = hook, hook_in_threads
    # Before the functions that were there: that of JAX would wait for processes that have failed.
    atexit.register(_at_exit, job, early_exit_timeout)


def _fail(
    job: Job, error: BaseException | None, show: Callable[[], object], *, in_main: bool
) -> None:
    """Shows an error, and tells the job of it; a text that never comes must hold neither."""
    if error is None or not job.is_here():
        show()
        return
    said = told(error)
    if said.is_whole:
        show()
    else:
        say(said.traceback)
    code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    job.fail(said.what, said.traceback, code, in_main=in_main)


def _at_exit(job: Job, early_exit_timeout: Callable[[], float]) -> None:
    if not job.is_here():
        return
    if job.has_failed:
        code = job.wait_until_known()
        logging.shutdown()
        say("")
        os._exit(code)
    has_results = _has_results(early_exit_timeout())
    if not job.finish():
        # By `sys.exit`, perhaps, whose code only Python itself knows: so it goes on to its end.
        job.wait_until_known()
        _compat.leave_coordination()
    elif not has_results:
        with contextlib.suppress(RuntimeError):  # not by jax.distributed, or left before
            jax.distributed.shutdown()  # the others wait there
        text = (
            "all have finished, and a result of this one never comes: its last step was its alone"
        )
        end_now(f"rank {job.rank}: stopping because {text}.\n{SAME_CALLS}", FAILED)


def _has_results(seconds: float) -> bool:
    """Whether what was dispatched and not read is there: it may wait for others, in vain.

    The destructor of JAX's client would wait for it for ever, where no code of Python runs any
    more.

    Args:
      seconds: how long this process may stand still meanwhile.
    """
    waiter = threading.Thread(target=_wait_for_results, name="jax_dist results", daemon=True)
    waiter.start()
    since, cpu = time.monotonic(), time.process_time()
    while waiter.is_alive():
        waiter.join(_LOOK)
        if time.process_time() - cpu > BUSY * _LOOK:  # it computes
            since = time.monotonic()
        elif time.monotonic() - since > seconds:
            return False
        cpu = time.process_time()
    return True


def _wait_for_results() -> None:
    for array in jax.live_arrays() if _compat.backend_started() else ():
        with contextlib.suppress(Exception):  # deleted, or its program failed: nobody has asked
            array.block_until_ready()
