"""The transformer that was written for pmap, with its state sharded: the same losses."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import jax
import matplotlib.image
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "fsdp_transformer.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return importlib.import_module("fsdp_transformer")


@pytest.mark.thorough
def test_both_ways_have_the_same_losses_and_the_state_is_an_eighth(example, tmp_path):
    size = example.SIZES["small"]

    runs = {
        "pmap": example.train_with_pmap(size, 0, 4),
        "global view": example.train_sharded(size, 0, 4),
    }

    one, other = runs.values()
    # Adam divides by a root: where XLA fuses otherwise, the last bit of a gradient shows.
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-6)
    assert other.losses[-1] < one.losses[0] - 0.1
    state = example.first_state(size, 0)
    assert one.kept == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.size < 1024)
    assert other.kept == (one.kept - small) // 8 + small
    assert other.peak < one.peak
    picture = example.picture(runs, tmp_path)
    assert matplotlib.image.imread(picture).shape[:2] == (420, 1080)


@pytest.mark.slow
def test_devices_may_share_a_layer(example):
    size = example.SIZES["small"]

    replicated = example.train_with_pmap(size, 0, 4)
    over_both = example.train_sharded(size, 0, 4, model_parallel=2)

    np.testing.assert_allclose(replicated.losses, over_both.losses, rtol=1e-6)
    assert over_both.kept < replicated.kept / 4


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path):
    command = [sys.executable, str(_EXAMPLE), "--size=small", "--steps=3"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
    launched = [sys.executable, "-m", "jax_dist", "launch", "-n", "2", "--cpu-devices", "4", "--"]

    alone = _losses([*command, "--devices=8", f"--out={tmp_path}"], environment)
    together = _losses([*launched, *command, f"--out={tmp_path}"], environment)

    assert len(alone) == 4
    assert alone == together


def _losses(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the first and the last of both ways, with four digits."""
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return re.findall(r"\d+\.\d{4}", ran.stdout)
