"""The recipes of docs/processes.md for checkpoints: save after SIGTERM, and read those of pmap."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("orbax.checkpoint")

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "processes.md"
_SAVE_STACKED = """
import pathlib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

step = jax.pmap(lambda state: {"w": state["w"] + 1, "step": state["step"] + 1})
state = step({"w": jnp.zeros((8, 3)), "step": jnp.full(8, 4)})
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(pathlib.Path("old").absolute(), state)
"""


def _program(name: str) -> str:
    """Return the program that the page writes to the file `name`."""
    return re.search(rf"^```python file={name}\n(.*?)^```$", _PAGE.read_text(), re.M | re.S)[1]


def _run(program: str, folder: pathlib.Path, devices: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_checkpoint_of_8_devices_is_read_on_fewer(tmp_path):
    assert _run(_SAVE_STACKED, tmp_path, 8).returncode == 0

    for devices in (1, 2, 4):
        ran = _run(_program("restore.py"), tmp_path, devices)
        assert ran.stdout == f"{devices} devices: w [1.0, 1.0, 1.0], step 5\n", ran.stderr


def test_a_program_that_gets_sigterm_saves_and_continues(tmp_path):
    line = "        leaves = multihost.preempted(number)\n"
    kill = "        if number == 50:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
    program = _program("resumed.py")
    assert line in program
    program = "import os\nimport signal\n" + program.replace(line, kill + line)

    first, second = _run(program, tmp_path, 2), _run(program, tmp_path, 2)

    assert (first.returncode, first.stdout) == (1, "from step 0\n"), first.stderr
    assert "told to leave" in first.stderr
    assert re.fullmatch(r"from step 5\d\nmean 10.0\n", second.stdout), second.stderr
