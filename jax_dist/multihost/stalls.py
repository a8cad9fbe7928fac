"""Which of the processes of a job holds up the others, when one finds that it does not get on."""

import threading
from collections.abc import Callable

from jax_dist.multihost.endings import STALLED
from jax_dist.multihost.job import Job
from jax_dist.multihost.messages import Stalled, Status, Where
from jax_dist.multihost.ranks import do
from jax_dist.multihost.standing import seen_waiting_in_jax, stack_of_main

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
