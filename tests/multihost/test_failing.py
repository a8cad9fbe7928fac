"""Fail-fast: how all ranks end when one of them has a trouble, with real signals and exits.

With plain JAX the others hang for up to 300 seconds after an exception or an early exit, and are
ended by SIGABRT after a kill. `benchmarks/failures.py` measures that.
"""

import os
import signal
import subprocess
import time

import pytest
from jobs import run_job

from jax_dist.multihost import job, ranks
from jax_dist.multihost.job import Failed
from jax_dist.multihost.rendezvous import Peer

_SECONDS = 15.0  # on a loaded machine; a fraction of one by itself, and 3 more after an early exit


def _run(rank: int, trouble: str, **options):
    return run_job("troubled_program.py", str(rank), trouble, **options)


def _check_raised(rank: int, ranks: int, trouble: str = "raises", says: str = "the learning"):
    ended = _run(rank, trouble, ranks=ranks)

    assert [each.code for each in ended] == [1] * ranks
    assert max(each.seconds for each in ended) < _SECONDS
    for other, each in enumerate(ended):
        assert each.output.count(f"ValueError: {says}") >= 1
        assert ", in _have\n" in each.output  # of the traceback
        because = f"rank {other}: stopping because rank {rank} failed with ValueError: {says}"
        assert (because in each.output) == (other != rank)
        assert "got through" not in each.output
    return ended


def _check_gone(rank: int, trouble: str, code: int) -> None:
    ended = _run(rank, trouble)

    other = 1 - rank
    assert ended[rank].code == code
    assert max(each.seconds for each in ended) < _SECONDS
    says = f"rank {other}: stopping because rank {rank} is gone" in ended[other].output
    if rank == 0 and not says:  # its service is gone too, and JAX may be the first to see it
        assert ended[other].code in (1, -6)
        assert "JAX distributed service detected fatal errors" in ended[other].output
    else:
        assert (ended[other].code, says) == (1, True)


def _check_exited(rank: int, trouble: str, code: int = 0) -> None:
    ended = _run(rank, trouble)

    other = 1 - rank
    assert (ended[rank].code, ended[other].code) == (code, 1)
    assert max(each.seconds for each in ended) < _SECONDS
    for number, each in enumerate(ended):
        because = (
            f"rank {number}: stopping because rank {rank} has finished, and rank {other} still"
        )
        assert because in each.output
        assert "summed(x)" in each.output  # where the other one stands
        assert "got through" not in each.output


def _check_fine(rank: int, trouble: str) -> None:
    ended = _run(rank, trouble)

    assert [each.code for each in ended] == [0, 0]
    for each in ended:
        assert "end of the program" in each.output
        assert "stopping" not in each.output


def test_an_exception_in_the_last_rank_ends_all_and_its_start_and_end_are_shown_by_all():
    ended = _check_raised(1, 2, "raises at length", "xxxx")

    assert "characters left out" in ended[0].output
    assert "xxx is too long\n" in ended[0].output
    assert len(ended[0].output) < 500_000


def test_an_exception_in_rank_0_is_too():
    _check_raised(0, 2)


@pytest.mark.thorough
def test_an_exception_whose_text_never_comes_holds_nobody():
    ended = _run(1, "raises without a text")

    assert [each.code for each in ended] == [1, 1]
    assert max(each.seconds for each in ended) < _SECONDS
    for each in ended:
        assert ", in _have\n" in each.output
        assert "_MuteError: <its text does not come>" in each.output
    assert "rank 0: stopping because rank 1 failed with _MuteError" in ended[0].output


def test_a_killed_rank_is_named_at_once_and_not_by_a_heartbeat():
    _check_gone(1, "is killed", -9)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_jax_has_joined_them_is_named_within_seconds(rank):
    ranks = 2 + rank  # where rank 1 dies, rank 0 sees it, and rank 2 has to be told
    ended = _run(rank, "dies before JAX joins", ranks=ranks)

    assert [each.code for each in ended] == [7 if other == rank else 1 for other in range(ranks)]
    assert max(each.seconds for each in ended) < 2 * _SECONDS  # after the start; JAX waits for 60
    for other in {*range(ranks)} - {rank}:
        assert f"rank {other}: stopping because rank {rank} is gone" in ended[other].output


@pytest.mark.thorough
def test_an_early_exit_is_told_to_those_who_wait_and_keeps_its_exit_code():
    _check_exited(1, "exits with 3", code=3)


@pytest.mark.thorough
def test_a_rank_whose_last_step_nobody_shares_ends_though_it_reads_no_result():
    # With several devices, the call comes back before the program has run.
    ended = _run(1, "has a step more", environment={"JAX_NUM_CPU_DEVICES": "4"})

    assert [each.code for each in ended] == [0, 1]
    assert max(each.seconds for each in ended) < _SECONDS
    assert all("end of the program" in each.output for each in ended)
    assert "rank 1: stopping because all have finished, and a result of this" in ended[1].output
    assert "stopping" not in ended[0].output


@pytest.mark.thorough
def test_a_rank_that_works_on_alone_is_no_failure():
    _check_fine(1, "slow end")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_among_three(rank):
    _check_raised(rank, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "trouble", "code"), [(0, "is killed", -9), (0, "crashes", -11), (1, "crashes", -11)]
)
def test_a_death(rank, trouble, code):
    _check_gone(rank, trouble, code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code"), [("exits", 0), ("exits with 3", 3), ("exits with 3 slowly", 3)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exit(rank, trouble, code):
    _check_exited(rank, trouble, code)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["none", "slow end", "parts early", "computes on"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_that_is_fine(rank, trouble):
    _check_fine(rank, trouble)


@pytest.mark.slow
def test_an_exception_in_a_thread_ends_all():
    ended = _run(1, "raises in a thread")

    assert [each.code for each in ended] == [1, 1]
    for number, each in enumerate(ended):
        assert f"rank {number}: stopping because rank 1 failed with ValueError" in each.output


@pytest.mark.slow
def test_an_interrupt_has_its_own_exit_code():
    ended = _run(1, "is interrupted")

    assert [each.code for each in ended] == [130, 130]
    assert "rank 0: stopping because rank 1 failed with KeyboardInterrupt" in ended[0].output


@pytest.mark.slow
def test_fifty_crashes_in_a_row_never_hang():
    for number in range(50):
        rank = number % 2
        if number % 5 == 4:
            _check_gone(rank, "is killed", -9)
        else:
            _check_raised(rank, 2)


class _Deaf:
    """A channel to a process that does not read."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)
        return True


def _job(
    monkeypatch, *, rank: int, pid: int, on: str | None = None, fail_fast: bool = True
) -> tuple[job.Job, list]:
    """One that is not started, beside a process `pid`; and what it ends with."""
    ends: list[str] = []
    peer = Peer(_Deaf(), on or ranks.machine_name(), pid)
    found = job.Job(
        rank,
        3,
        {1 - rank: peer},
        fail_fast=fail_fast,
        early_exit_timeout=lambda: 3.0,
        heartbeat_timeout=10.0,
        shutdown_timeout=300.0,
    )
    found.has_joined = True
    monkeypatch.setattr(job, "end_now", lambda text, code: ends.append(text))
    monkeypatch.setattr(
        found, "end_all", lambda culprit, text, code: ends.append(f"{culprit}: {text}")
    )
    return found, ends


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (0, "1: rank 1 has been stopped for 4 s"),
        (1, "rank 1: stopping because rank 0 has been stopped for 4 s"),
    ],
)
def test_a_stopped_process_is_named_before_jax_ends_the_others(monkeypatch, rank, told):
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        elsewhere, silent = _job(monkeypatch, rank=rank, pid=sleeper.pid, on="another machine")
        slow, nothing = _job(monkeypatch, rank=rank, pid=sleeper.pid, fail_fast=False)
        found, ends = _job(monkeypatch, rank=rank, pid=sleeper.pid)
        found._look_who_is_stopped(100.0)
        sleeper.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(sleeper.pid, os.WUNTRACED)  # it is, by now
        for now in (101.0, 104.0):
            found._look_who_is_stopped(now)
            elsewhere._look_who_is_stopped(now)
            slow._look_who_is_stopped(now)
        assert (os.WIFSTOPPED(status), ends) == (True, [])
        sleeper.send_signal(signal.SIGCONT)
        os.waitpid(sleeper.pid, os.WCONTINUED)
        found._look_who_is_stopped(104.5)  # it goes on, and the time begins anew
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        for now in (105.0, 108.0, 109.0):
            found._look_who_is_stopped(now)
        sleeper.kill()

    assert [each.partition(": by ")[0] for each in ends] == [told]
    assert silent == nothing == []


def test_who_has_been_silent_for_long_is_named_and_not_who_jax_ended_for_it(monkeypatch):
    found, ends = _job(monkeypatch, rank=0, pid=0, on="another machine")
    found._peers[2] = Peer(_Deaf(), "a third machine", 0)
    found._heard[2] = time.monotonic()
    found._heard[1] = time.monotonic() - 8.0
    del found._peers[2]
    found._on_silence(2, ended=True)
    found._heard[1] = time.monotonic()
    found._on_silence(2, ended=True)

    assert [each.partition(":")[2][:45] for each in ends] == [
        " rank 1 has not answered for 8 s: its machine",
        " rank 2 is gone: it ended without a word, kil",
    ]
    assert ends[0].startswith("1: ")
    assert ends[0].endswith("and rank 2 was the first to go.")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(rank):
    ended = _run(rank, "is stopped", timeout=30)

    assert ended[rank].code == -signal.SIGALRM  # it stands there to the end
    assert ended[1 - rank].code == 1
    assert ended[1 - rank].seconds < _SECONDS
    assert f"stopping because rank {rank} has been stopped for" in ended[1 - rank].output


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("ValueError: the learning rate is negative", 0.2),
        ("ValueError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer [::1]:1", 1.5),
        ("JaxRuntimeError: INTERNAL: Connection reset by peer", 1.5),
    ],
)
def test_who_loses_a_peer_is_not_blamed_before_the_peer_can_be(what, seconds):
    assert job._doubt(Failed(what, traceback="", code=1)) == seconds
