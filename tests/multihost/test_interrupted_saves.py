"""A save that ends in the middle: a kill at any moment, a full disk, a read-only one."""

import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from saving import killed_again_and_again, lost

from jax_dist.multihost import Checkpoints


def _state(step: int) -> dict:
    return {"w": np.full(3, float(step)), "n": step}


_CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


@pytest.mark.parametrize(("keep", "wait"), [(1, True), (1, False), (2, True), (3, False)])
def test_whenever_a_process_dies_the_newest_whole_step_is_restored(tmp_path, keep, wait):
    """What would be left is copied at each change that a save makes to the disk, in any thread."""
    folder, left, copying = tmp_path / "saved", tmp_path / "left", threading.RLock()
    seen: list[str] = []
    watching: list[bool] = []

    def watch(event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if not watching or not (writes or event in _CHANGES) or str(folder) not in str(args[0]):
            return
        with copying:
            watching.clear()  # what is done to copy is no change
            shutil.copytree(folder, left / str(len(seen)))
            seen.append(event)
            watching.append(True)

    sys.addaudithook(watch)  # for good; it only looks while `watching` holds something
    with Checkpoints(folder, every=1, keep=keep) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, _state(step))
        watching.append(True)
        checkpoints.save(5, _state(5), wait=wait)
    watching.clear()

    restored = []
    for number in range(len(seen)):
        with Checkpoints(left / str(number), every=1, keep=keep) as checkpoints:
            state, step = checkpoints.restore(_state(0))
            whole = [path.name for path in (left / str(number)).iterdir() if path.name.isdecimal()]
        assert state["n"] == step
        assert state["w"].tolist() == [step] * 3
        assert len(whole) >= keep
        assert not list((left / str(number)).glob("*tmp*"))  # whoever saves next has cleaned up
        assert not (left / str(number) / ".unfinished").exists()
        restored.append(step)
    assert restored == sorted(restored)
    assert set(restored) == {4, 5}
    assert seen.count("os.rename") >= 2  # of the new one, and of the oldest


def test_a_process_killed_while_it_saves_loses_no_step(tmp_path):
    found = killed_again_and_again(tmp_path, keep=1, times=2)

    assert lost(found) == []
    assert found[-1].restored > 0


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_fifty_kills_lose_no_step(tmp_path, keep):
    found = killed_again_and_again(tmp_path, keep=keep, times=51)

    assert lost(found) == []
    assert found[-1].restored > 50


_ON_A_SMALL_DISK = """\
import subprocess, sys
import numpy as np
from jax_dist.errors import CheckpointError
from jax_dist.multihost import Checkpoints
def mount(*arguments):
    subprocess.run(["mount", *arguments, sys.argv[1]], check=True)
def save_some():
    with Checkpoints(sys.argv[1] + "/steps", every=1, keep=2) as checkpoints:
        state, start = checkpoints.restore({"w": np.zeros(100_000)})
        print(start, int(state["w"][-1]))
        try:
            for step in range(start + 1, start + 4):
                checkpoints.save(step, {"w": np.random.default_rng(step).random(100_000) + step})
                print("saved", step)
        except CheckpointError as error:
            print(str(error).splitlines()[0])
            print(str(error).splitlines()[-1])
mount("-t", "tmpfs", "-o", "size=2000k", "none")
save_some()
mount("-o", "remount,ro")
save_some()
mount("-o", "remount,rw,size=20m")
save_some()
"""


def test_a_full_and_a_read_only_disk_take_nothing_away(tmp_path):
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("needs user namespaces, to mount without being root")
    python = [sys.executable, "-W", "error::UserWarning", "-c", _ON_A_SMALL_DISK]
    ran = subprocess.run(
        ["unshare", "-rm", *python, tmp_path],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=180,
    )

    left = (
        "Make room there, or let it be written to. The checkpoints that are there are as they were."
    )
    assert ran.stdout.splitlines() == [
        *("0 0", "saved 1", "saved 2", "step 3 is not saved:", left),
        *("2 2", "step 3 is not saved:", left),
        *("2 2", "saved 3", "saved 4", "saved 5"),
    ]
