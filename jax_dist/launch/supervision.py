"""Starts a job again when it fails, for as long as it gets on."""

import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from jax_dist.launch import job
from jax_dist.launch.job import JobSettings, Listener
from jax_dist.launch.outcome import JobOutcome, Reason, causes
from jax_dist.multihost import ranks

_RESTART = (
    "JAX_DIST_RESTART"  # the variable that tells the ranks how often they were started before
)


@dataclasses.dataclass(frozen=True)
class JobFailure:
    """How far the job was when it failed."""

    rank: int  # that failed first
    restored: int  # the step of the checkpoint that it began from; -1: it has not said
    reached: int  # the last step that this rank had done; -1: it has not said


def supervise(
    command: Sequence[str],
    settings: JobSettings,
    listener: Listener,
    *,
    restarts: int,
    min_interval: float,
    environment: Mapping[str, str] | None = None,
) -> JobOutcome:
    """As `running.run`, again and again until it ends well, or gets on no more.

    Args:
      command: the command and its arguments.
      settings: how many, and how long: the time is that of all runs together.
      listener: is told each line of output, and what is done to the ranks.
      restarts: how often the job may start again without a newer checkpoint in between.
      min_interval: the seconds between two starts, at least.
      environment: what the ranks inherit; by default the environment of this process.

    Returns:
      How the last run ended.

    Raises:
      StartError: the command cannot be started.
    """
    inherited = os.environ if environment is None else environment
    until = None if settings.timeout is None else time.monotonic() + settings.timeout
    failures: list[JobFailure] = []  # since the last checkpoint
    with tempfile.TemporaryDirectory(prefix="jax-dist-launch-") as name:
        for count in range(1 << 62):
            start = time.monotonic()
            timeout = None if until is None else max(0.1, until - start)
            variables = {**inherited, ranks.PROGRESS_FOLDER: name, _RESTART: str(count)}
            outcome = job.run(
                command, dataclasses.replace(settings, timeout=timeout), listener, variables
            )
            if outcome.reason is not Reason.FAILED or outcome.was_terminated:
                return outcome
            failure = _failure(pathlib.Path(name), outcome)
            if failures and failure.restored > failures[-1].restored:
                failures.clear()
            failures.append(failure)
            if len(failures) > restarts:
                listener.notice(_given_up(failures))
                return outcome
            for text in causes(outcome):
                listener.notice(text)
            listener.notice(_starts_again(count + 1, failures, restarts))
            time.sleep(max(0.0, start + min_interval - time.monotonic()))
            _forget(pathlib.Path(name))
    raise AssertionError  # there is no last number


def _failure(folder: pathlib.Path, outcome: JobOutcome) -> JobFailure:
    assert outcome.first is not None  # it failed
    said = [ranks.read_progress(folder, each.rank) for each in outcome.ended]
    restored = max(each.restored for each in said)
    return JobFailure(outcome.first.rank, restored, said[outcome.first.rank].reached)


def _forget(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _starts_again(count: int, failures: Sequence[JobFailure], restarts: int) -> str:
    left = restarts - len(failures)
    more = f"{left} more {'is' if left == 1 else 'are'} left"
    return f"start {count + 1}, after {_where(failures[-1])}; {more} before it saves a checkpoint"


def _where(failure: JobFailure) -> str:
    if failure.reached < 0:
        return f"rank {failure.rank} failed"
    return f"rank {failure.rank} failed in step {failure.reached + 1}"


def _given_up(failures: Sequence[JobFailure]) -> str:
    """One line: who failed, how often, and where."""
    times = f"{len(failures)} {'time' if len(failures) == 1 else 'times'}"
    last = failures[-1]
    since = f" since the checkpoint of step {last.restored}" if last.restored > 0 else ""
    if all(each == last for each in failures):
        return f"{_where(last)}, {times}{since}: it is not started again"
    told = ", ".join(dict.fromkeys(_short(failures)))
    return f"the job failed {times}{since} ({told}): it is not started again"


def _short(failures: Sequence[JobFailure]) -> Iterator[str]:
    for each in failures:
        yield _where(each).replace(" failed", "")
