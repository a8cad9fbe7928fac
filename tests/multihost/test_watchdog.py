"""The watchdog: who holds up the others is named, and all end."""

import os
import pathlib
import subprocess
import sys

import pytest
from jobs import run_job

from jax_dist import multihost
from jax_dist.multihost.failures import (
    Status,
    _culprits,
    _verdict,
)


def _status(step: int, *, inside: bool = True, in_jax: bool = True, watched: bool = True) -> Status:
    return Status(step, inside, 7.0, in_jax, "  the stack", watched)


@pytest.mark.parametrize(
    ("answers", "culprits"),
    [
        ({0: _status(4), 1: _status(3), 2: _status(4)}, [1]),
        ({0: _status(4), 1: _status(3, inside=False), 2: _status(4)}, [1]),
        ({0: _status(4), 1: _status(4, inside=False), 2: _status(4)}, [1]),
        ({0: _status(4), 1: _status(4, in_jax=False), 2: _status(4)}, [1]),
        ({0: _status(4), 2: _status(3)}, [1]),
        ({0: _status(4), 1: _status(4), 2: _status(4)}, []),
        ({0: _status(4), 1: _status(0, in_jax=False, watched=False), 2: _status(4)}, [1]),
    ],
    ids=[
        "a step behind",
        "a step behind, between two",
        "between two steps",
        "in the step, and not waiting",
        "silent",
        "nobody",
        "without a watchdog",
    ],
)
def test_who_holds_up_the_others(answers, culprits):
    # A step that ended comes before one that has not begun: it waits for nobody.
    assert _culprits(answers, 3) == culprits


def test_the_verdict_says_where_each_stands():
    answers = {0: _status(4), 1: _status(3, inside=False, in_jax=False)}

    assert _verdict(6.0, answers, [1], 3).splitlines() == [
        "a step took more than 6 s. rank 1 holds up the others.",
        "  * rank 0 stands in step 4 for 7 s, waiting in JAX",
        "  * rank 1 stands after step 3 for 7 s, not waiting in JAX",
        "  * rank 2 does not answer: it is stopped, or native code in it holds Python's lock",
        "Rank 1 stands at:",
        "  the stack",
    ]


def _check_stalled(where: str, rank: int, line: str, ranks: int = 2) -> None:
    ended = run_job("stalling_program.py", str(rank), where, ranks=ranks)

    assert [each.code for each in ended] == [87] * ranks
    assert max(each.seconds for each in ended) < 20.0  # 3 by itself: the watchdog has 2
    for number, each in enumerate(ended):
        because = f"rank {number}: stopping because a step took more than 2 s. rank {rank} holds up"
        assert because in each.output
        assert f"  * rank {rank} stands {line}" in each.output
        assert "time.sleep(100)" in each.output  # where the culprit stands
        assert "(most recent call first)" in each.output  # the stacks of its own threads


@pytest.mark.thorough
def test_a_rank_that_sleeps_in_a_step_is_named():
    _check_stalled("inside", 1, "in step 3 for 2 s, not waiting in JAX")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sleeps_between_two_steps_is_named(rank):
    _check_stalled("between", rank, "after step 2 for 2 s, not waiting in JAX", ranks=3)


@pytest.mark.slow
def test_a_stopped_rank_is_named():
    ended = run_job("stalling_program.py", "1", "stopped", ranks=2, timeout=60)

    assert ended[0].code == 87
    assert "  * rank 1 does not answer: it is stopped" in ended[0].output


def test_alone_it_ends_the_process():
    code = "import time; from jax_dist import multihost\n"
    code += "with multihost.watchdog(0.5): time.sleep(100)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 87
    assert ran.stderr.startswith(
        "a step took more than 0.5 s: this process stands before its first"
    )


def test_steps_in_time_are_left_alone():
    with multihost.watchdog(60) as dog:
        assert [batch + 1 for batch in dog.steps([1, 2])] == [2, 3]
        dog.step()
        with dog.step():
            pass


def test_its_time_is_positive():
    with pytest.raises(ValueError, match="must be positive"):
        multihost.watchdog(0)
