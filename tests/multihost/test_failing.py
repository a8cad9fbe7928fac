"""Fail-fast: how all ranks end when one of them has a trouble, with real signals and exits.

With plain JAX the others hang for up to 300 seconds after an exception or an early exit, and are
ended by SIGABRT after a kill. `benchmarks/failures.py` measures that.
"""

import pytest
from jobs import run_job

from jax_dist.multihost import job
from jax_dist.multihost.messages import Failed

_SECONDS = 15.0  # on a loaded machine; a fraction of one by itself, and 3 more after an early exit


def _run(rank: int, trouble: str, **options):
    return run_job("troubled_program.py", str(rank), trouble, **options)


def _check_raised(rank: int, ranks: int) -> None:
    ended = _run(rank, "raises", ranks=ranks)

    assert [each.code for each in ended] == [1] * ranks
    assert max(each.seconds for each in ended) < _SECONDS
    for other, each in enumerate(ended):
        assert each.output.count("ValueError: the learning rate is negative") >= 1
        assert ", in _have\n" in each.output  # of the traceback
        because = f"rank {other}: stopping because rank {rank} failed with ValueError: the learning"
        assert (because in each.output) == (other != rank)
        assert "got through" not in each.output


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


def test_an_exception_in_the_last_rank_is_shown_by_all_and_ends_all():
    _check_raised(1, 2)


def test_an_exception_in_rank_0_is_too():
    _check_raised(0, 2)


def test_a_killed_rank_is_named_at_once_and_not_by_a_heartbeat():
    _check_gone(1, "is killed", -9)


def test_an_early_exit_is_told_to_those_who_wait_and_keeps_its_exit_code():
    _check_exited(1, "exits with 3", code=3)


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
@pytest.mark.parametrize(("trouble", "code"), [("exits", 0), ("exits with 3", 3)])
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
