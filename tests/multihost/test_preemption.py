"""A real SIGTERM: every process hears of it at the same step."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import preemption_jobs
import pytest

from jax_dist import multihost
from jax_dist.multihost import main_thread
from jax_dist.testing import run_processes

# Prints the steps as it goes; the last word is what ended the loop.
_ALONE = """\
import signal, sys, time
from jax_dist import multihost

{before}
for step in range(1, 3000):
    if multihost.preempted(step):
        print("left", multihost.preempted(step + 1), flush=True)
        {at_end}
        break
    print(step, flush=True)
    time.sleep(0.01)
"""


# Rank 0 alone gets it in the test after it.
@pytest.mark.parametrize(
    "victims",
    [pytest.param([0], marks=pytest.mark.slow), [1], pytest.param([0, 1], marks=pytest.mark.slow)],
    ids=["first", "last", "all"],
)
def test_every_rank_leaves_at_the_same_step(victims):
    outcomes = run_processes(preemption_jobs.steps_until_preempted, victims, timeout=120)

    assert [outcome.error for outcome in outcomes] == [None, None]
    first, last = (outcome.value for outcome in outcomes)
    assert first == last
    assert first["step"] > 20
    assert first["stays"]


def test_a_job_that_was_told_to_leave_goes_on_with_the_same_numbers(tmp_path):
    """Orbax saves at the step at which all leave; a job of one process reads it, too."""
    pytest.importorskip("orbax.checkpoint")
    folder = str(tmp_path / "checkpoints")
    first = run_processes(preemption_jobs.train, folder, 20, timeout=120)
    (left, same) = (outcome.value for outcome in first)
    (alone,) = run_processes(preemption_jobs.train, folder, None, processes=1, timeout=120)

    assert left == same
    assert 20 < left["end"] < 300
    assert left["sum"] == [sum(range(left["end"] + 1))] * 2
    assert alone.value == {"start": left["end"], "end": 300, "sum": [45150.0] * 2, "steps": 300}


def test_a_handler_that_is_set_after_jax_joined_hides_the_signal_from_it():
    outcomes = run_processes(preemption_jobs.steps_until_preempted, [1], "after", 100, timeout=120)

    assert [outcome.value for outcome in outcomes] == [
        {"step": None, "heard": []},
        {"step": None, "heard": [15]},
    ]


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_enable_preemption_service"), reason="it is always on in jax 0.7.2"
)
def test_a_service_that_is_switched_off_is_named(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")

    (outcome,) = run_processes(preemption_jobs.without_service, processes=1, timeout=120)

    assert "the 'jax_enable_preemption_service' config" in outcome.value  # as JAX says it


# ----------------------------------------------------------------------------------- one process


def run_alone(before: str = "", at_end: str = "pass", signals: int = 1) -> tuple[list[str], int]:
    """What a single process prints that gets SIGTERM at its fifth step, and its exit code."""
    program = _ALONE.format(before=before, at_end=at_end)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == "5" or (line.startswith("left") and signals > 1):
                process.send_signal(signal.SIGTERM)
        return lines, process.wait(timeout=60)


def test_alone_a_process_leaves_at_the_next_step_and_a_second_signal_ends_it():
    lines, code = run_alone(at_end="time.sleep(60)", signals=2)

    assert lines[:5] == ["1", "2", "3", "4", "5"]
    assert lines[-1] == "left True"
    assert len(lines) < 100
    assert code == -signal.SIGTERM


def test_alone_the_handler_that_was_there_is_called_too():
    before = 'signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))'

    lines, code = run_alone(before)

    assert code == 0
    assert "mine" in lines
    assert lines[-1] == "left True"


def test_alone_the_first_call_must_be_made_by_the_main_thread(monkeypatch):
    monkeypatch.setattr(main_thread, "_notice", main_thread._Notice())  # as in a new process
    handler = signal.getsignal(signal.SIGTERM)
    told = []

    def ask() -> None:
        try:
            multihost.preempted(1)
        except RuntimeError as error:
            told.append(str(error))

    def ask_in_a_thread() -> None:
        worker = threading.Thread(target=ask, name="loader")
        worker.start()
        worker.join()

    ask_in_a_thread()
    try:
        multihost.preempted(0)
        ask_in_a_thread()
    finally:
        signal.signal(signal.SIGTERM, handler)

    assert told == [
        textwrap.dedent("""\
            preempted: its first call is not made by the main thread:
              * it is made by the thread 'loader'
            Because Python lets only the main thread say what a signal does.
            Call `preempted(0)` once in the main thread, before this thread starts.""")
    ]
