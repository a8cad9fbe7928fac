"""A process that saves each step is killed at random moments, and starts again."""

import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

_SAVES = """\
import sys
import numpy as np
from jax_dist.multihost import Checkpoints
with Checkpoints(sys.argv[1], every=1, keep=int(sys.argv[2])) as checkpoints:
    state, start = checkpoints.restore({"w": np.zeros(300_000)})
    print(start, int(state["w"][-1]), flush=True)
    for step in range(start + 1, 100_000):
        checkpoints.save(step, {"w": np.full(300_000, float(step))})
        print("saved", step, flush=True)
"""


class Start(NamedTuple):
    saved: int  # the last step that was said to be saved before
    restored: int
    value: int  # what the state says


def killed_again_and_again(folder: pathlib.Path, *, keep: int, times: int) -> list[Start]:
    """What each start finds; a warning is an error there."""
    chance, saved, found = random.Random(keep), 0, []
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", "-c", _SAVES, folder, str(keep)],
            cwd=pathlib.Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            restored, value = map(int, process.stdout.readline().split())
            found.append(Start(saved, restored, value))
            saved = restored
            for _ in range(chance.randrange(1, 8)):
                saved = int(process.stdout.readline().split()[1])
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
            for line in process.stdout:
                saved = int(line.split()[1])
    return found


def lost(found: Sequence[Start]) -> list[Start]:
    """The starts that did not go on from the last step, or from one more than was said."""
    return [
        each
        for each in found
        if each.value != each.restored or each.restored - each.saved not in (0, 1)
    ]
