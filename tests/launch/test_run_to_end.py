"""One command by itself: its exit code, its output, and nothing of it that lives on."""

import os
import sys
import time

import pytest
from launching import is_alive

from jax_dist.launch.ranks import run_to_end

_LEAVES_SOMETHING = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"


@pytest.mark.parametrize(
    ("then", "timeout", "code"),
    [("raise SystemExit(3)", 60, 3), ("import time; time.sleep(60)", 3, None)],
    ids=["it ends", "it is stopped"],
)
def test_what_a_command_leaves_running_ends_with_it(tmp_path, then, timeout, code):
    output = tmp_path / "output"

    ended = run_to_end(
        [sys.executable, "-c", _LEAVES_SOMETHING + then], os.environ, output, timeout
    )

    assert ended == code
    left = int(output.read_text())
    latest = time.monotonic() + 10
    while is_alive(left) and time.monotonic() < latest:  # until somebody has buried it
        time.sleep(0.05)
    assert not is_alive(left)
