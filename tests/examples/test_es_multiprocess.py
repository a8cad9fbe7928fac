"""The quickstart in several processes: the same curve, also when it is told to leave half-way."""

import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from types import ModuleType

import es_quickstart
import jax
import matplotlib.image
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "es_multiprocess.py"
_GENERATIONS = 12


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return importlib.import_module("es_multiprocess")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> np.ndarray:
    """Return `[generations, 3]`, in this one process, on its 8 devices."""
    out = tmp_path_factory.mktemp("alone")
    result = es_quickstart.train(0, jax.devices(), _GENERATIONS, out=out)
    assert (len(result.curve), result.left) == (_GENERATIONS, False)
    return read_curve(out)


def read_curve(out: pathlib.Path) -> np.ndarray:
    return np.loadtxt(out / "curve.csv", delimiter=",", skiprows=1)


def start(out: pathlib.Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jax_dist", "launch", "-n", "2", "--cpu-devices", "4", "--"]
    command += [sys.executable, _EXAMPLE, f"--out={out}", f"--generations={_GENERATIONS}", *flags]
    paths = {"PYTHONPATH": str(_ROOT), "JAX_DIST_CACHE_DIR": str(out.parent / "cache")}
    return subprocess.Popen(
        command, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(job: subprocess.Popen) -> list[str]:
    """Return what each rank wrote; both ended well."""
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    lines = output.splitlines()
    prefixes = ("[0] ", "[1] ")
    return ["".join(f"{x[4:]}\n" for x in lines if x.startswith(start)) for start in prefixes]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[pathlib.Path, list[str], list[str]]:
    """Where it ran, and what was written before and after a real SIGTERM."""
    out = tmp_path_factory.mktemp("several") / "out"
    job = start(out)
    while not (out / "checkpoints").exists() and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # passed on; they compile now, and will hear of it later
    first = finish(job)
    return out, first, finish(start(out, "--bytes"))


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    """Where two processes ran to their end, and what they wrote."""
    out = tmp_path_factory.mktemp("together") / "out"
    return out, finish(start(out, "--generations=4", "--bytes"))


@pytest.mark.thorough
def test_two_processes_have_the_curve_of_one(together, undisturbed):
    out, outputs = together
    curve = read_curve(out)

    assert "generations   4\n" in outputs[0]
    assert "generations" not in outputs[1]  # rank 0 speaks for all
    assert curve.shape == (4, 3)
    # An episode is chaotic: its return changes with the last bit. Their means do not.
    np.testing.assert_allclose(curve[:, 1:], undisturbed[:4, 1:], rtol=0.1)
    assert undisturbed[-1, 1] > 2 * undisturbed[0, 1]  # it learns
    assert matplotlib.image.imread(out / "learning_curve.png").shape[:2] == (540, 840)


@pytest.mark.thorough
def test_nothing_but_scores_goes_between_devices(together, example):
    _, outputs = together

    assert example.bytes_exchanged() == {"all-gather": 1024}  # 256 scores of 4 bytes
    assert "\nall-gather    1024 bytes in a generation\n" in outputs[0]


@pytest.mark.slow
def test_sigterm_ends_all_ranks_after_the_same_generation(interrupted):
    out, outputs, _ = interrupted
    left = int(re.search(r"told to leave after generation (\d+); start it again", outputs[0])[1])

    assert 1 <= left < _GENERATIONS
    assert "generations" not in outputs[1]  # rank 0 speaks for all
    assert "generation:" not in outputs[1]
    assert (out / "checkpoints").is_dir()


@pytest.mark.slow
def test_the_resumed_curve_is_that_of_an_undisturbed_run_in_one_process(interrupted, undisturbed):
    out, _, outputs = interrupted
    curve = read_curve(out)

    assert "generations   12\n" in outputs[0]
    assert curve.shape == (_GENERATIONS, 3)
    np.testing.assert_allclose(curve[:, 1:], undisturbed[:, 1:], rtol=0.1)
