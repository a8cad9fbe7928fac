"""Checkpoints of a pmap program, read on other numbers of devices by the recipe of the docs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "processes.md"


def _run(script: str, folder: pathlib.Path, devices: int) -> str:
    block = re.search(rf"^```python file={script}\n(.*?)^```$", _PAGE.read_text(), re.M | re.S)
    ran = subprocess.run(
        [sys.executable, "-c", block[1]],
        cwd=folder,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_checkpoint_of_8_devices_is_read_on_fewer(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    _run("old.py", tmp_path, 8)

    for devices in (1, 2, 4):
        expected = f"{devices} devices: w [1.0, 1.0, 1.0], step 5\n"
        assert _run("restore.py", tmp_path, devices) == expected
