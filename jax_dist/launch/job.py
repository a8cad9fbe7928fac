"""Starts the ranks of a job, watches them, passes signals on, and ends them together.

A job that fails is started again, for as long as it gets on.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import secrets
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_dist.launch.outcome import Ended, JobOutcome, Output, Printer, Reason, ending
from jax_dist.launch.ranks import Orphanage, Rank, rank_environment, reserved_port
from jax_dist.multihost import ranks

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def _received() -> Iterator[list[int]]:
    """A list that grows by each signal that comes in the block; none of them ends the process.

    What was ignored before stays so: a shell lets a job in the background ignore Ctrl-C. Outside
    the main thread, Python hands out no signals, and the list stays empty.
    """
    numbers: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _PASSED_ON}
    # None is a handler that Python did not install, and cannot put back.
    changed = {k: old for k, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in changed:
            signal.signal(number, lambda received, _: numbers.append(received))
        yield numbers
    finally:
        for number, old in changed.items():
            signal.signal(number, old)


# --- starts the ranks of a job, watches them, and ends them together


_POLL_SECONDS = 0.02
_LAST_LINES_SECONDS = 1.0  # for what a rank started to write the last lines of its output
_AFTER_TERM_SECONDS = 2.0  # where the ranks had their grace before


@dataclass(frozen=True)
class JobSettings:
    """What is asked of a job."""

    ranks: int
    cpu_devices: int | None = None  # simulated ones, in each; None: real ones
    gpus: int = 1  # of each
    timeout: float | None = None  # seconds
    grace: float = 5.0  # seconds that the others have to end by themselves


def run(
    command: Sequence[str],
    settings: JobSettings,
    printer: Printer,
    environment: Mapping[str, str] | None = None,
) -> JobOutcome:
    """Runs a command several times in parallel, as the ranks of one job.

    None of them, and nothing that they start in their process groups, is left when it returns, when
    it raises, or when this process is killed. A Ctrl-C or SIGTERM is passed on to them, if this is
    the main thread. They inherit `environment`, by default that of this process.

    Raises:
      StartError: the command cannot be started.
    """
    inherited = os.environ if environment is None else environment
    token = secrets.token_hex(16)
    ranks: list[Rank] = []
    with _received() as signals, reserved_port() as port, Orphanage() as orphanage:
        try:
            for number in range(settings.ranks):
                variables = rank_environment(
                    inherited,
                    rank=number,
                    ranks=settings.ranks,
                    port=port,
                    launcher=os.getpid(),
                    token=token,
                    cpu_devices=settings.cpu_devices,
                    gpus=settings.gpus,
                )
                ranks.append(Rank(number, command, variables, orphanage))
            return _Job(ranks, settings, printer, signals).watch()
        finally:
            for rank in ranks:
                rank.bury()


class _Job:
    def __init__(
        self, ranks: Sequence[Rank], settings: JobSettings, printer: Printer, signals: list[int]
    ):
        self._ranks = ranks
        self._settings = settings
        self._printer = printer
        self._signals = signals  # grows meanwhile
        self._start = time.monotonic()
        self._reason = Reason.FINISHED
        self._first: Rank | None = None
        self._unfinished: tuple[int, ...] = ()
        self._was_terminated = False
        self._raised: list[Rank] = []
        self._steps: collections.deque[tuple[float, int]] = collections.deque()  # when, signal
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            for output in rank.outputs:
                self._selector.register(output, selectors.EVENT_READ, (rank, output))

    def watch(self) -> JobOutcome:
        """Until no rank is left."""
        with self._selector:
            while any(not rank.is_buried for rank in self._ranks):
                self._read()
                self._see_who_ended()
                self._see_who_raised()
                self._pass_signals_on()
                self._see_whether_time_is_up()
                while self._steps and time.monotonic() >= self._steps[0][0]:
                    self._send(self._steps.popleft()[1])
        first = seen = self._first
        if seen is not None:  # the rank that it has ended for: it says so, or JAX has aborted it
            stopped = [rank for rank in self._ranks if rank.was_stopped]
            if stopped and (seen.could_not_join or seen.exit_code() == -signal.SIGABRT):
                first = stopped[0]
            elif seen.blames is not None and seen.blames < len(self._ranks):
                first = self._ranks[seen.blames]
        return JobOutcome(
            reason=self._reason,
            seconds=time.monotonic() - self._start,
            ended=tuple(self._ended(rank) for rank in self._ranks),
            first=None if first is None else self._ended(first),
            seen=None if seen is None else self._ended(seen),
            unfinished=self._unfinished,
            was_terminated=self._was_terminated,
        )

    def _read(self) -> None:
        ready = {key.fd for key, _ in self._selector.select(_POLL_SECONDS)}
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            rank, output = key.data
            lines = output.read(now) if key.fd in ready else output.overdue(now)
            if not output.is_open:
                self._selector.unregister(key.fd)
            self._tell(rank, output, lines)

    def _tell(self, rank: Rank, output: Output, lines: Sequence[str]) -> None:
        if lines:
            rank.heard(output.stream, lines, time.monotonic())
            self._printer.lines(rank.number, output.stream, lines)

    def _see_who_ended(self) -> None:
        now = time.monotonic()
        ended = [rank for rank in self._running() if rank.exit_code() is not None]
        for rank in ended:
            rank.ended_at = now
        failed = [rank for rank in ended if rank.exit_code() != 0]
        if failed and self._first is None and not self._is_stopping():
            # Seen to end together. JAX aborts a process when it loses another one.
            others = [rank for rank in failed if rank.exit_code() != -signal.SIGABRT]
            self._fail((others or failed)[0])
        for rank in self._ranks:
            if rank.ended_at is None or rank.is_buried:
                continue
            # `tee` in its group may have the last lines still.
            is_over = now >= rank.ended_at + _LAST_LINES_SECONDS
            if is_over or not any(output.is_open for output in rank.outputs):
                rank.bury()
                for output in rank.outputs:
                    if output.is_open:
                        self._selector.unregister(output)
                        self._tell(rank, output, output.drain(time.monotonic()))

    def _see_who_raised(self) -> None:
        """A rank that raised may wait at its exit for the others, who wait for it."""
        now = time.monotonic()
        for rank in self._running():
            if rank not in self._raised and rank.is_silent_after_raising(now):
                self._raised.append(rank)
                self._printer.notice(
                    f"rank {rank.number} wrote a traceback and has not ended; at its exit, "
                    "jax.distributed may wait for the other ranks, for up to 300 s"
                )

    def _fail(self, culprit: Rank) -> None:
        self._first = culprit
        for rank in self._running():
            rank.was_stopped = rank.is_stopped()
        grace = self._settings.grace
        how = ending(culprit.exit_code() or 0)
        if self._running():
            self._printer.notice(
                f"rank {culprit.number} ended with {how}; the others have {grace:g} s to end"
            )
        steps = [(grace, signal.SIGTERM), (_AFTER_TERM_SECONDS, signal.SIGKILL)]
        self._stop(Reason.FAILED, steps)

    def _pass_signals_on(self) -> None:
        grace = self._settings.grace
        while self._signals:
            match self._signals.pop(0):
                case signal.SIGINT if self._is_stopping():  # a second Ctrl-C: immediately
                    self._steps = collections.deque([(0.0, signal.SIGKILL)])
                case signal.SIGINT:
                    steps = [(0.0, signal.SIGINT), (grace, signal.SIGTERM)]
                    steps.append((_AFTER_TERM_SECONDS, signal.SIGKILL))
                    self._stop(Reason.INTERRUPTED, steps)
                case signal.SIGTERM:
                    # The first time, the ranks may save what they have, and take the time that they
                    # need. Those with JAX's preemption service live on, perhaps for ever; hence the
                    # second time.
                    if self._was_terminated and not self._is_stopping():
                        self._stop(Reason.TERMINATED, [(grace, signal.SIGKILL)])
                    self._was_terminated = True
                    self._send(signal.SIGTERM)
                case number:
                    self._send(number)

    def _see_whether_time_is_up(self) -> None:
        timeout = self._settings.timeout
        if timeout is None or self._is_stopping() or time.monotonic() < self._start + timeout:
            return
        if self._running():
            steps = [(0.0, signal.SIGTERM), (self._settings.grace, signal.SIGKILL)]
            self._stop(Reason.TIMED_OUT, steps)

    def _is_stopping(self) -> bool:
        return self._reason is not Reason.FINISHED

    def _stop(self, reason: Reason, steps: Sequence[tuple[float, int]]) -> None:
        """`steps`: the seconds from the one before, and the signal that is sent then."""
        self._reason = reason
        self._unfinished = tuple(rank.number for rank in self._running())
        at = time.monotonic()
        for seconds, number in steps:
            at += seconds
            self._steps.append((at, number))

    def _send(self, number: int) -> None:
        for rank in self._running():
            rank.send(number)

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.ended_at is None]

    def _ended(self, rank: Rank) -> Ended:
        exit_code = rank.exit_code()
        assert exit_code is not None  # it is buried
        assert rank.ended_at is not None
        seconds = rank.ended_at - self._start
        return Ended(
            rank.number,
            exit_code,
            rank.sent,
            seconds,
            tuple(rank.tail),
            rank.traceback.lines,
            rank.was_stopped,
        )


# --- starts a job again when it fails, for as long as it gets on


@dataclass(frozen=True)
class _JobFailure:
    """How far the job was when it failed."""

    rank: int  # that failed first
    began: int  # after which step; -1: it has not said
    reached: int  # the last step that this rank had done; -1: it has not said

    def __str__(self) -> str:
        step = "" if self.reached < 0 else f" in step {self.reached + 1}"
        return f"rank {self.rank} failed{step}"


def supervise(
    command: Sequence[str],
    settings: JobSettings,
    printer: Printer,
    *,
    restarts: int,
    min_interval: float,
) -> JobOutcome:
    """As `run`, again and again until it ends well, or gets on no more; how the last run ended.

    The time limit is that of all runs together; `restarts` says how often the job may start again
    without a newer checkpoint in between, and `min_interval` the least seconds between two starts.

    Raises:
      StartError: the command cannot be started.
    """
    until = None if settings.timeout is None else time.monotonic() + settings.timeout
    failures: list[_JobFailure] = []  # since the last checkpoint
    with tempfile.TemporaryDirectory(prefix="jax-dist-launch-") as name:
        folder = pathlib.Path(name)
        for count in itertools.count(1):
            start = time.monotonic()
            timeout = None if until is None else max(0.1, until - start)
            variables = {**os.environ, ranks.PROGRESS_FOLDER: name, ranks.RESTART: str(count - 1)}
            outcome = run(
                command, dataclasses.replace(settings, timeout=timeout), printer, variables
            )
            if outcome.reason is not Reason.FAILED or outcome.was_terminated:
                return outcome
            assert outcome.first is not None  # it failed
            said = [ranks.read_progress(folder, each.rank) for each in outcome.ended]
            first, newest = outcome.first.rank, max(each.began for each in said)
            failure = _JobFailure(first, newest, said[first].reached)
            if failures and failure.began > failures[-1].began:
                failures.clear()
            failures.append(failure)
            if len(failures) > restarts:
                printer.notice(_given_up(failures))
                return outcome
            for text in outcome.causes():
                printer.notice(text)
            left = restarts - len(failures)
            more = f"{left} more {'is' if left == 1 else 'are'} left"
            printer.notice(
                f"start {count + 1}, after {failure}; {more} before it saves a checkpoint"
            )
            time.sleep(max(0.0, start + min_interval - time.monotonic()))
            for path in folder.iterdir():
                path.unlink()
    raise AssertionError  # there is no last number


def _given_up(failures: Sequence[_JobFailure]) -> str:
    """One line: who failed, how often, and where."""
    times = f"{len(failures)} {'time' if len(failures) == 1 else 'times'}"
    last = failures[-1]
    since = f" since the checkpoint of step {last.began}" if last.began > 0 else ""
    if all(each == last for each in failures):
        return f"{last}, {times}{since}: it is not started again"
    told = ", ".join(dict.fromkeys(str(each).replace(" failed", "") for each in failures))
    return f"the job failed {times}{since} ({told}): it is not started again"
