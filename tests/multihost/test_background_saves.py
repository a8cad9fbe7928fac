"""`save(..., wait=False)`: the values are those of the call; what goes wrong is raised later."""

import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dist.errors import CheckpointError, CheckpointWarning
from jax_dist.multihost import Checkpoints, step_folders


def state_of(step: int) -> dict:
    return {"w": np.full(3, float(step)), "n": step}


def steps_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


@pytest.fixture
def held(monkeypatch):
    """No step gets its name until this is set."""
    free, missing = threading.Event(), step_folders.missing

    def wait(item: pathlib.Path) -> list[str]:
        assert free.wait(60)
        return missing(item)

    monkeypatch.setattr(step_folders, "missing", wait)
    return free


@pytest.fixture
def full(monkeypatch):
    """A disk on which nothing more can be finished."""

    def fail(*_: object):
        raise OSError("No space left on device")

    monkeypatch.setattr(step_folders, "sync_tree", fail)


def test_the_values_are_those_of_the_call(tmp_path, held):
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    host, device = np.ones(500_000), {"large": jnp.ones(500_000), "small": jnp.ones(3)}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.save(1, {"host": host, "device": device}, wait=False)
        assert steps_in(tmp_path) == []
        host += 1
        for _ in range(3):
            device = add(device)
        jax.block_until_ready(device)
        held.set()

    with Checkpoints(tmp_path) as checkpoints:
        found, step = checkpoints.restore({"host": host, "device": device})
    assert step == 1
    assert [float(np.asarray(leaf).max()) for leaf in jax.tree.leaves(found)] == [1, 1, 1]


def test_the_next_save_and_restore_wait_for_it(tmp_path, held):
    with Checkpoints(tmp_path, every=1, keep=2) as checkpoints:
        checkpoints.save(1, state_of(1), wait=False)
        assert not checkpoints.save(1, state_of(1), wait=False)  # it is being saved
        threading.Timer(0.1, held.set).start()
        checkpoints.save(2, state_of(2), wait=False)
        assert "1" in steps_in(tmp_path)
        assert checkpoints.restore(state_of(0))[1] == 2
        assert checkpoints.save(3, state_of(3))
        assert steps_in(tmp_path) == ["2", "3"]


def test_a_job_that_must_leave_waits(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, every=2) as checkpoints:
        monkeypatch.setattr(checkpoints, "preempted", lambda step: step >= 4)
        for step in range(1, 5):
            checkpoints.save(step, state_of(step), wait=False)
        assert steps_in(tmp_path) == ["2", "4"]


def test_what_goes_wrong_is_raised_by_the_next_save(tmp_path, monkeypatch, full):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, state_of(1), wait=False)
        with pytest.raises(CheckpointError, match="^step 1 is not saved:\n  . No space left"):
            checkpoints.save(2, state_of(2), wait=False)
        assert list(tmp_path.iterdir()) == [tmp_path / ".jax_dist.lock"]
        monkeypatch.undo()
        assert checkpoints.save(2, state_of(2), wait=False)
    assert steps_in(tmp_path) == ["2"]


def test_without_a_with_block_nobody_would_wait(tmp_path):
    checkpoints = Checkpoints(tmp_path, every=1)
    assert checkpoints.save(1, state_of(1), wait=False)
    assert steps_in(tmp_path) == ["1"]
    checkpoints.__exit__()


def save_one(folder: pathlib.Path, then: Exception | None = None) -> None:
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, state_of(1), wait=False)
        if then is not None:
            raise then


def test_or_at_the_end(tmp_path, full):
    with pytest.raises(CheckpointError, match="^step 1 is not saved"):
        save_one(tmp_path)
    with Checkpoints(tmp_path, every=1) as checkpoints:  # the lock is given back
        assert checkpoints.restore(state_of(0))[1] == 0


def test_an_error_of_the_program_is_not_replaced(tmp_path, full):
    warned = pytest.warns(CheckpointWarning, match="^step 1 is not saved:\n  . No space left")
    with warned, pytest.raises(ZeroDivisionError):
        save_one(tmp_path, ZeroDivisionError())


def test_nor_does_it_lose_the_step(tmp_path):
    with pytest.raises(ZeroDivisionError):
        save_one(tmp_path, ZeroDivisionError())
    assert steps_in(tmp_path) == ["1"]
