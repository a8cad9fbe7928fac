"""Ranks die at random; a supervisor starts the job again; the result is that of a quiet run."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from jobs import free_port

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = pathlib.Path(__file__).with_name("long_run_program.py")
_ENDS_WITHIN = 60.0  # seconds, after a rank was killed; a quiet machine needs five


class Job:
    """Two processes of two devices."""

    def __init__(self, folder: pathlib.Path, steps: int, every: int):
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": "2",
        }
        self.log = (folder / "log").open("a")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, _PROGRAM, folder, str(steps), str(every)],
                env={**environment, "JAX_PROCESS_ID": str(rank)},
                stdout=self.log,
                stderr=self.log,
            )
            for rank in range(2)
        ]

    def runs(self) -> bool:
        return all(rank.poll() is None for rank in self.ranks)

    def wait(self, timeout: float) -> list[int]:
        """The exit codes; whoever does not end in time is killed, and has -9."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            try:
                rank.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        self.log.close()
        return [rank.returncode for rank in self.ranks]


def newest(folder: pathlib.Path) -> int:
    found = (folder / "checkpoints").glob("*/jax_dist.json")
    return max((int(path.parent.name) for path in found), default=0)


def supervise(folder: pathlib.Path, steps: int, every: int, kills: int) -> list[tuple[int, int]]:
    """Runs it to its end. Each kill: the step of the checkpoint that was there, and the rank."""
    chance = random.Random(0)
    killed = []
    while True:
        job = Job(folder, steps, every)
        try:
            if len(killed) < kills:
                after = newest(folder) + every * chance.randint(1, 2)
                while job.runs() and newest(folder) < min(after, steps - every):
                    time.sleep(0.01)
                time.sleep(chance.uniform(0, 0.1))
                victim = chance.randrange(2)
                killed.append((newest(folder), victim))
                job.ranks[victim].send_signal(signal.SIGKILL)
                codes = job.wait(_ENDS_WITHIN)
                assert codes[victim] in (-9, 0)
                assert codes[1 - victim] != -9, "the other rank hung"
            else:
                assert job.wait(600) == [0, 0], (folder / "log").read_text()[-3000:]
                return killed
        finally:
            for rank in job.ranks:
                rank.kill()


def check(folder: pathlib.Path, steps: int, every: int, kills: int) -> None:
    expected = undisturbed(folder / "quiet", steps)

    killed = supervise(folder, steps, every, kills)

    assert len(killed) == kills
    assert killed[-1][0] > 0
    result = np.load(folder / "result.npy")
    assert np.abs(expected).max() > 0.01  # it went somewhere
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)  # the order of sums differs


def undisturbed(folder: pathlib.Path, steps: int) -> np.ndarray:
    """`[5]`, by a process of its own, with the four devices that the job has."""
    folder.mkdir()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment["PYTHONPATH"] = str(_ROOT)
    command = [sys.executable, _PROGRAM, folder, str(steps), str(steps)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return np.load(folder / "result.npy")


def test_a_job_goes_on_after_a_rank_was_killed(tmp_path):
    check(tmp_path, steps=120, every=20, kills=1)


@pytest.mark.slow
def test_two_thousand_steps_and_a_kill_now_and_then(tmp_path):
    check(tmp_path, steps=2000, every=50, kills=12)
