"""The folder of checkpoints: who may write there, and what is never touched."""

import enum
import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import zlib
from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest

from jax_dist.errors import CheckpointError, CheckpointInUseError, CheckpointWarning
from jax_dist.multihost import Checkpoints, step_folders

# Where a read of Orbax's fails, TensorStore may still answer for the others, to a closed loop.
_NOISE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state_of(step: int) -> dict:
    return {"w": np.full(3, float(step)), "n": step}


def saved(folder: pathlib.Path, *steps: int, keep: int = 9) -> pathlib.Path:
    with Checkpoints(folder, every=1, keep=keep) as checkpoints:
        checkpoints.restore(state_of(0))
        for step in steps:
            checkpoints.save(step, state_of(step))
    return folder


def content(folder: pathlib.Path) -> dict[str, object]:
    """Everything in it; folders with the time of their last change."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        if path.is_dir()
        else path.read_bytes()
        for path in [folder, *folder.rglob("*")]
    }


def written_before_the_manager(folder: pathlib.Path, step: int) -> None:
    """As version 0.1 of this library left a step: the form must be read for ever."""
    here = folder / str(step)
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        state = {"['w']": np.full(3, float(step)), "['n']": np.asarray(step)}
        checkpointer.save(here / "default", args=orbax.args.StandardSave(state))
    files = {
        str(path.relative_to(here)): [path.stat().st_size, zlib.crc32(path.read_bytes())]
        for path in here.rglob("*")
        if path.is_file()
    }
    leaves = {"['n']": "int", "['w']": "float64[3]"}
    dumped = json.dumps([leaves, files], sort_keys=True).encode()
    manifest = {"leaves": leaves, "files": files, "digest": hashlib.sha256(dumped).hexdigest()}
    (here / "jax_dist.json").write_text(json.dumps(manifest))


class TestReading:
    def test_it_changes_nothing(self, tmp_path):
        folder = saved(tmp_path / "steps", 1, 2)
        for name in (".unfinished/3", "3.orbax-checkpoint-tmp", "notes", "0005"):
            (folder / name).mkdir(parents=True)
            (folder / name / "x").write_text("mine")
        (folder / "2" / "jax_dist.json").write_text("")
        before = content(folder)

        with Checkpoints(folder) as checkpoints, pytest.warns(CheckpointWarning):
            assert checkpoints.restore(state_of(0))[1] == 1

        assert content(folder) == before

    def test_nor_makes_a_folder(self, tmp_path):
        with Checkpoints(tmp_path / "steps") as checkpoints:
            assert checkpoints.restore({"n": 3}) == ({"n": 3}, 0)

        assert not (tmp_path / "steps").exists()

    def test_a_step_of_an_earlier_version(self, tmp_path):
        written_before_the_manager(tmp_path, 4)

        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            assert checkpoints.restore(state_of(0))[0]["w"].tolist() == [4, 4, 4]
            checkpoints.save(5, state_of(5))

        assert not (tmp_path / "4").exists()

    def test_orbax_alone_reads_what_is_written(self, tmp_path):
        saved(tmp_path, 1, 2)

        with orbax.CheckpointManager(tmp_path) as manager:
            assert manager.all_steps() == [1, 2]
            found = manager.restore(2, args=orbax.args.StandardRestore())
        assert found["['w']"].tolist() == [2, 2, 2]

    def test_what_it_may_not_read_is_no_damage(self, tmp_path, monkeypatch):
        """As of a job of another user: an older step, or none, would be silently wrong."""
        saved(tmp_path, 1, 2)

        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="file cannot be read:\n.*Not a directory"):
            Checkpoints(tmp_path / "file").restore(state_of(0))
        for name in ("jax_dist._notes.content", "jax_dist.multihost.step_folders._checksum"):
            with monkeypatch.context() as patched, Checkpoints(tmp_path) as checkpoints:
                patched.setattr(name, refuse)
                with pytest.raises(CheckpointError, match=" cannot be read:\n.*Permission denied"):
                    checkpoints.restore(state_of(0))

    def test_no_older_one_is_taken_where_nothing_is_damaged(self, tmp_path, monkeypatch):
        saved(tmp_path, 1, 2)

        def fail(*_, **__):
            raise MemoryError("no room for 1 TB\nand more")

        monkeypatch.setattr(orbax.StandardCheckpointHandler, "restore", fail)
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError) as raised:
            checkpoints.restore(state_of(0))

        assert f"{tmp_path / '2'} cannot be read:\n  * MemoryError: no room for 1 TB\n" in str(
            raised.value
        )

    @_NOISE
    def test_a_step_that_goes_meanwhile_is_no_damage(self, tmp_path, monkeypatch):
        saved(tmp_path, 1)
        restore = orbax.StandardCheckpointHandler.restore

        def save_first(*args, **options):
            monkeypatch.undo()
            saved(tmp_path, 2, keep=1)
            return restore(*args, **options)

        monkeypatch.setattr(orbax.StandardCheckpointHandler, "restore", save_first)
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore(state_of(0))[1] == 2

    def test_nor_is_one_that_goes_while_it_is_looked_at(self, tmp_path, monkeypatch):
        saved(tmp_path, 1)
        checksum = step_folders._checksum

        def save_first(path):
            monkeypatch.undo()
            saved(tmp_path, 2, keep=1)
            return checksum(path)

        monkeypatch.setattr(step_folders, "_checksum", save_first)
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore(state_of(0))[1] == 2

    def test_numbers_come_back_in_their_types(self, tmp_path):
        class Colour(enum.IntEnum):
            RED = 1

        state = {
            "enum": Colour.RED,
            "scalar": jnp.bfloat16(1.5),
            "small": np.arange(5).astype(jnp.int4),
            "nan": np.frombuffer(np.uint32(0x7FC00001).tobytes(), np.float32),
            "last": np.uint64(2**64 - 1),
            "zero": -0.0,
        }
        with Checkpoints(tmp_path, every=1) as checkpoints:
            checkpoints.save(1, state)
            found, _ = checkpoints.restore(state)

        assert {name: type(leaf) for name, leaf in found.items()} == {
            name: type(leaf) for name, leaf in state.items()
        }
        assert {name: np.asarray(leaf).tobytes() for name, leaf in found.items()} == {
            name: np.asarray(leaf).tobytes() for name, leaf in state.items()
        }


class TestWriting:
    @pytest.mark.parametrize("nth", range(12))
    def test_a_step_with_a_missing_file_is_not_committed(self, tmp_path, monkeypatch, nth):
        """Each file that Orbax has written goes in turn: the step is refused, or needs it not."""
        finalize, lost = orbax.StandardCheckpointHandler.finalize, []

        def lose(handler, item):
            finalize(handler, item)
            files = sorted(path for path in pathlib.Path(item).rglob("*") if path.is_file())
            if pathlib.Path(item).parent.name.startswith("2."):
                lost.append(files[nth % len(files)].name)
                files[nth % len(files)].unlink()

        monkeypatch.setattr(orbax.StandardCheckpointHandler, "finalize", lose)
        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            checkpoints.save(1, state_of(1))
            if lost_what_it_needs(checkpoints, 2):
                assert not (tmp_path / "2").exists()
                newest = 1
            else:
                newest = 2
            with Checkpoints(tmp_path) as reader:
                state, step = reader.restore(state_of(0))
            assert (step, state["n"], state["w"].tolist()) == (newest, newest, [newest] * 3)
            assert checkpoints.save(3, state_of(3))
        assert lost
        assert not (tmp_path / ".unfinished").exists()

    def test_half_of_the_files_gone(self, tmp_path, monkeypatch):
        saved(tmp_path, 1)
        missing = step_folders.missing

        def lose_half(item: pathlib.Path, *rest):
            files = sorted(path for path in item.rglob("*") if path.is_file())
            for path in files[: len(files) // 2]:
                path.unlink()
            return missing(item, *rest)

        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            checkpoints.restore(state_of(0))
            monkeypatch.setattr(step_folders, "missing", lose_half)
            with pytest.raises(CheckpointError, match="^step 2 is not saved"):
                checkpoints.save(2, state_of(2))
            assert checkpoints.restore(state_of(0))[1] == 1

    def test_what_is_not_ours_is_left_alone(self, tmp_path):
        others = ["0", "0005", "3", "20240101", "notes", "7.damaged"]
        others += ["0.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp"]
        for name in others:
            (tmp_path / name).mkdir()
            (tmp_path / name / "precious.txt").write_text(name)
        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            with pytest.warns(CheckpointWarning, match="another program made it"):
                assert checkpoints.restore(state_of(0))[1] == 0
            for step in (1, 2):
                checkpoints.save(step, state_of(step))
            with pytest.raises(CheckpointError, match=r"/3, which has no jax_dist.json"):
                checkpoints.save(3, state_of(3))
            checkpoints.save(4, state_of(4))

        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [*others, "4", ".jax_dist.lock"]
        )
        assert [(tmp_path / name / "precious.txt").read_text() for name in others] == others

    def test_a_step_of_orbax_alone_is_never_removed(self, tmp_path):
        with orbax.CheckpointManager(tmp_path) as manager:
            manager.save(0, args=orbax.args.StandardSave({"w": np.ones(3)}))
            manager.wait_until_finished()
        saved_before = content(tmp_path / "0")

        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state_of(step))

        assert content(tmp_path / "0") == saved_before

    def test_damage_to_a_step_twice_keeps_both(self, tmp_path):
        saved(tmp_path, 1)
        for generation in ("first", "second", "third"):
            expected = pytest.warns(CheckpointWarning) if generation != "first" else nullcontext()
            with expected:
                saved(tmp_path, 2)
            (tmp_path / "2" / "jax_dist.json").write_text(generation)

        kept = sorted(path / "jax_dist.json" for path in tmp_path.glob("2*"))
        assert {path.read_text() for path in kept} == {"first", "second", "third"}

    def test_no_thread_and_no_file_stay_open(self, tmp_path):
        saved(tmp_path, 1)
        threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")
        saved(tmp_path, 2)

        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) <= len(files)


def lost_what_it_needs(checkpoints: Checkpoints, step: int) -> bool:
    try:
        checkpoints.save(step, state_of(step))
    except CheckpointError as error:
        return str(error).startswith(f"step {step} is not saved:\n")
    return False


_HOLDS = """\
import sys, time
from jax_dist.multihost import Checkpoints
with Checkpoints(sys.argv[1], every=1) as checkpoints:
    checkpoints.save(1, {"n": 1})
    print("saved", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another job that has saved step 1, and goes on."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, tmp_path],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "saved\n"
        yield process
        process.kill()


class TestLock:
    def test_a_second_job_is_told_who_saves_there_until_that_is_killed(self, tmp_path, other):
        with pytest.raises(CheckpointInUseError) as raised:
            Checkpoints(tmp_path, every=1)

        lines = str(raised.value).splitlines()
        assert lines[0] == f"another job saves its checkpoints in {tmp_path}:"
        assert re.fullmatch(
            rf"  \* process {other.pid} on {os.uname().nodename}, since [-: \d]+ UTC", lines[1]
        )
        with Checkpoints(tmp_path) as reader:
            assert reader.restore({"n": 0}) == ({"n": 1}, 1)
            with pytest.raises(CheckpointInUseError):
                reader.save(2, {"n": 2}, force=True)

        # A kill leaves it free, and what the job had begun is removed.
        for name in ("7.orbax-checkpoint-tmp", ".unfinished/2.orbax-checkpoint-tmp"):
            (tmp_path / name).mkdir(parents=True)
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(CheckpointInUseError):  # it may go on
            Checkpoints(tmp_path, every=1)
        assert (tmp_path / ".unfinished" / "2.orbax-checkpoint-tmp").exists()
        other.kill()
        other.wait()

        with Checkpoints(tmp_path, every=1) as checkpoints:
            assert checkpoints.restore({"n": 0})[1] == 1
            assert not (tmp_path / ".unfinished").exists()
            assert checkpoints.save(2, {"n": 2})
        left = ["1", "2", "7.orbax-checkpoint-tmp"]  # nothing says that the last one was ours
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == left

    def test_a_child_does_not_keep_it(self, tmp_path):
        """As a worker that was forked, and lives on when its parent has been killed."""
        program = (
            "import os, sys, time, warnings\n"
            "warnings.simplefilter('ignore')\n"
            "from jax_dist.multihost import Checkpoints\n"
            "checkpoints = Checkpoints(sys.argv[1], every=1)\n"
            "hears, tells = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    os.write(tells, b'.')\n"
            "    time.sleep(600)\n"
            "os.read(hears, 1)\n"
            "print(child, flush=True)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        with open(tmp_path / "child", "w") as out:  # a pipe would wait for the child
            ran = subprocess.run(
                [sys.executable, "-c", program, tmp_path],
                cwd=pathlib.Path(__file__).parents[2],
                stdout=out,
                check=False,
            )
        assert ran.returncode == -signal.SIGKILL
        try:
            Checkpoints(tmp_path, every=1).__exit__()
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)

    def test_it_is_taken_again_where_it_was_removed(self, tmp_path):
        """As by a program that cleans up, or with the folder."""
        folder = tmp_path / "steps"
        with Checkpoints(folder, every=1) as checkpoints:
            checkpoints.save(1, {"n": 1})
            (folder / ".jax_dist.lock").unlink()
            checkpoints.save(2, {"n": 2})
            with pytest.raises(CheckpointInUseError):
                Checkpoints(folder, every=1)

            folder.rename(tmp_path / "old")
            with Checkpoints(folder, every=1) as other:
                other.save(1, {"n": 7})
                with pytest.raises(CheckpointInUseError):
                    checkpoints.save(3, {"n": 3})
                assert other.save(2, {"n": 8})
            assert sorted(path.name for path in folder.glob("[!.]*")) == ["1", "2"]

    def test_it_is_given_back(self, tmp_path):
        with Checkpoints(tmp_path, every=1), pytest.raises(CheckpointInUseError):
            Checkpoints(tmp_path, every=2)
        Checkpoints(tmp_path, every=2).__exit__()

    def test_a_disk_without_locks_is_written_to_with_a_warning(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", fail)
        with pytest.warns(CheckpointWarning, match=r"cannot be locked \(no locks\)"):
            saved(tmp_path, 1)
        assert (tmp_path / "1").exists()

    def test_without_a_way_to_write_it_may_still_be_read(self, tmp_path, monkeypatch):
        saved(tmp_path, 1)

        def fail(*_):
            raise OSError("read-only")

        monkeypatch.setattr("fcntl.flock", fail)
        with Checkpoints(tmp_path, every=1) as checkpoints:
            assert checkpoints.restore(state_of(0))[1] == 1
            with pytest.raises(CheckpointError, match="step 2 is not saved:\n  . read-only"):
                checkpoints.save(2, state_of(2))
