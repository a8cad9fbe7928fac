"""The quickstart in several processes: the same curve, also when it is told to leave half-way."""

import importlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from types import ModuleType

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
def undisturbed(example, tmp_path_factory) -> np.ndarray:
    """`[generations, 3]`, in this one process, on its 8 devices."""
    out = tmp_path_factory.mktemp("alone")
    outcome = example.train(seed=0, generations=_GENERATIONS, out=out, save_every=5, keep=2)
    assert (outcome.done, outcome.preempted) == (_GENERATIONS, False)
    return read_curve(out)


def read_curve(out: pathlib.Path) -> np.ndarray:
    return np.loadtxt(out / "curve.csv", delimiter=",", skiprows=1)


def start(out: pathlib.Path, *flags: str) -> list[subprocess.Popen]:
    """Two processes of 4 devices each, as `jax-dist launch -n 2 --cpu-devices 4` starts them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_DIST_CACHE_DIR": str(out.parent / "cache"),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    return [
        subprocess.Popen(
            [sys.executable, _EXAMPLE, f"--out={out}", f"--generations={_GENERATIONS}", *flags],
            env={**environment, "JAX_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def finish(ranks: list[subprocess.Popen]) -> list[str]:
    """What each wrote; all ended well."""
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[pathlib.Path, list[str], list[str]]:
    """Where it ran, and what was written before and after a real SIGTERM of rank 1."""
    out = tmp_path_factory.mktemp("several") / "out"
    ranks = start(out)
    while not (out / "checkpoints").exists() and all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGTERM)  # it compiles now; it will hear of it later
    first = finish(ranks)
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


def test_help_shows_the_flags(tmp_path):
    shown = subprocess.run(
        [sys.executable, _EXAMPLE, "--help"],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    ).stdout

    for flag in ("--generations", "--seed", "--out", "--save_every", "--keep", "--[no]bytes"):
        assert f"\n  {flag}: " in shown
    assert "jax-dist launch -n 2 --cpu-devices 4" in shown
