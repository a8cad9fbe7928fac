"""`--restarts`: the job starts again after a failure, for as long as it gets on."""

import pathlib
import signal
import statistics
import subprocess
import time

import killing
import numpy as np
import pytest
from launching import PATIENCE, PYTHON, environment, launch, launched, lines, notices

_START = """\
import os, pathlib, struct, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["JAX_DIST_RESTART"])
def say(restored, reached):
    file = pathlib.Path(os.environ["JAX_DIST_PROGRESS"], str(rank))
    file.write_bytes(struct.pack("<qq", restored, reached))
"""
_TWICE = ("--restarts", "2", "--min-interval", "0")


def _starts(ended) -> list[str]:
    return sorted(text for _, text in lines(ended.stdout))


def _about_restarts(ended) -> list[str]:
    return [
        text for text in notices(ended.stderr) if "start" in text.split(",")[0] or "again" in text
    ]


def test_a_job_that_fails_twice_is_started_three_times():
    program = _START + (
        "print('start', start)\n"
        "if start < 2 and rank == 1: sys.exit(3)\n"
        "if start < 2: time.sleep(600)"
    )
    ended = launch("-n", "2", "--grace", "0.1", *_TWICE, "--", *PYTHON, program)

    assert ended.returncode == 0
    assert _starts(ended) == sorted(2 * ["start 0", "start 1", "start 2"])
    assert _about_restarts(ended) == [
        "start 2, after rank 1 failed; 1 more is left before it saves a checkpoint",
        "start 3, after rank 1 failed; 0 more are left before it saves a checkpoint",
    ]
    assert notices(ended.stderr).count("    ") == 0
    assert sum("rank 1 failed first: exit code 3" in text for text in notices(ended.stderr)) == 2


def test_a_rank_that_fails_again_and_again_in_one_step_ends_it():
    program = _START + (
        "say(100, 104 if rank == 1 else 103)\n"
        "print('start', start)\n"
        "if rank == 1: sys.exit('the loss is NaN')\n"
        "time.sleep(600)"
    )
    ended = launch("-n", "2", "--grace", "0.1", *_TWICE, "--", *PYTHON, program)

    assert ended.returncode == 1
    assert "start 3" not in _starts(ended)
    assert _about_restarts(ended)[-1] == (
        "rank 1 failed in step 105, 3 times since the checkpoint of step 100: "
        "it is not started again"
    )
    assert "    the loss is NaN" in ended.stderr  # the reason, at the end


def test_failures_before_the_last_checkpoint_do_not_count():
    program = _START + (
        "say(10 * start, 10 * start + 3)\n"  # each start goes on from a newer checkpoint
        "if start < 5: sys.exit(3)\n"
    )
    ended = launch("-n", "1", "--restarts", "1", "--min-interval", "0", "--", *PYTHON, program)

    assert ended.returncode == 0
    assert _about_restarts(ended)[-1] == (
        "start 6, after rank 0 failed in step 44; 0 more are left before it saves a checkpoint"
    )


def test_failures_in_several_places_are_told_one_by_one():
    program = _START + "say(0, start)\nsys.exit(3)\n"
    ended = launch("-n", "1", "--restarts", "1", "--min-interval", "0", "--", *PYTHON, program)

    assert ended.returncode == 3
    assert _about_restarts(ended)[-1] == (
        "the job failed 2 times (rank 0 in step 1, rank 0 in step 2): it is not started again"
    )


def test_starts_are_apart_and_within_the_time(tmp_path):
    program = _START + "pathlib.Path(sys.argv[1], str(start)).touch(); sys.exit(3)"
    launch(
        *("-n", "1", "--restarts", "2", "--min-interval", "1.5"),
        *("--", *PYTHON, program, str(tmp_path)),
    )

    at = [(tmp_path / name).stat().st_mtime for name in ("0", "1", "2")]
    assert at[1] - at[0] > 1.2
    assert at[2] - at[1] > 1.2


def test_the_time_is_that_of_all_starts():
    program = _START + "time.sleep(600 if start else 1); sys.exit(3)"
    start = time.monotonic()
    ended = launch(
        *("-n", "1", "--restarts", "9", "--timeout", "3", "--grace", "0.1"),
        *("--", *PYTHON, program),
    )

    assert ended.returncode == 124
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 3)])
def test_who_is_told_to_end_is_not_started_again(sent, code):
    program = _START + (
        "import signal\n"
        "signal.signal(15, lambda *_: sys.exit(3)); signal.signal(2, lambda *_: sys.exit(3))\n"
        "print('ready'); time.sleep(600)"
    )
    with launched("-n", "1", "--restarts", "9", "--", *PYTHON, program) as process:
        assert process.stdout.readline().endswith("ready\n")
        process.send_signal(sent)
        out, _ = process.communicate(timeout=PATIENCE)

    assert (process.returncode, out) == (code, "")


def test_logs_of_all_starts_are_kept(tmp_path):
    program = _START + "print('start', start); sys.exit(0 if start else 3)"
    launch("-n", "1", "--restarts", "1", "--log-dir", str(tmp_path), "--", *PYTHON, program)

    told = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in told] == ["start 0", "start 1"]


_TRAINS = """\
import sys, time
import jax, numpy as np, orbax.checkpoint as ocp
from jax_dist import cache, multihost
multihost.initialize()
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
with ocp.CheckpointManager(sys.argv[1]) as manager, cache.stats() as seen:
    state, start = {"sum": 0.0}, manager.latest_step() or 0
    if start:
        state = manager.restore(start, args=ocp.args.StandardRestore(state))
    for step in range(start + 1, 8):
        state["sum"] += float(total(np.full(jax.local_device_count(), step, np.float32))[0])
        if multihost.preempted(step) or step % 2 == 0:
            manager.save(step, args=ocp.args.StandardSave(state), force=True)
        if step == 5 and start == 0 and jax.process_index() == 1:
            raise ValueError("the disk of the data is gone")
print("from", start, "to", state["sum"], "compiled", seen.misses)
"""


@pytest.mark.thorough
def test_a_job_goes_on_from_its_checkpoint_with_its_compiled_programs(tmp_path):
    ran = subprocess.run(
        [
            *("python", "-m", "jax_dist", "launch", "-n", "2", "--cpu-devices", "1"),
            *("--restarts", "1", "--", "python", "-c", _TRAINS, str(tmp_path / "checkpoints")),
        ],
        env=environment(
            PATH=f"{pathlib.Path(PYTHON[0]).parent}:/usr/bin:/bin",
            JAX_DIST_CACHE_DIR=str(tmp_path / "cache"),
        ),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    told = [text for _, text in lines(ran.stdout) if text.startswith("from")]
    assert told == 2 * ["from 4 to 56.0 compiled 0"]  # 2 * (1 + ... + 7)
    assert "after rank 1 failed in step 6; 0 more are left" in ran.stderr


def _check_kills(folder: pathlib.Path, *, steps: int, kills: int) -> killing.Survived:
    """The killed job ends with the numbers of one that nobody has disturbed, bit by bit."""
    killed = killing.run(folder, steps=steps, every=5, kills=kills, seed=1, timeout=1500)

    assert killed.code == 0, killed.output[-3000:]
    assert (killed.kills, killed.lost) == (kills, 0)
    undisturbed, result = np.load(folder / "result.npy")
    assert np.abs(undisturbed).max() > 0.01  # it went somewhere
    assert result.tobytes() == undisturbed.tobytes()
    return killed


@pytest.mark.thorough
def test_a_job_goes_on_after_a_rank_was_killed(tmp_path):
    _check_kills(tmp_path, steps=30, kills=1)


@pytest.mark.slow
def test_fifty_kills_in_three_hundred_steps(tmp_path):
    killed = _check_kills(tmp_path, steps=300, kills=50)

    assert statistics.median(killed.seconds) < 10
