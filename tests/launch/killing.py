"""Kills ranks of a job that is started again each time, at moments drawn at random."""

import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

from launching import command, environment

_PROGRAM = pathlib.Path(__file__).with_name("steps_program.py")
_LINE = re.compile(r"\[(\d) [^\]]*\] (pid|step|from) (\d+)")


@dataclasses.dataclass
class Survived:
    """How a job went whose ranks were killed."""

    code: int  # of the launcher
    output: str
    kills: int = 0
    lost: int = 0  # times that a rank began from an older step than was saved before
    seconds: list[float] = dataclasses.field(default_factory=list)  # from a kill to the next step


def run(
    folder: pathlib.Path, *, steps: int, every: int, kills: int, seed: int, timeout: float
) -> Survived:
    """Runs `steps_program.py` in two processes to its end.

    Args:
      folder: for the checkpoints, the cache and the result.
      steps: how many.
      every: a checkpoint each so many steps.
      kills: how many ranks are killed on the way.
      seed: of the moments.
      timeout: the seconds for all of it.
    """
    arguments = ("-n", "2", "--cpu-devices", "2", "--restarts", "20", "--timeout", f"{timeout}")
    program = (sys.executable, str(_PROGRAM), str(folder), str(steps), str(every))
    with subprocess.Popen(
        command(*arguments, "--min-interval", "0", "--", *program),
        env=environment(JAX_DIST_CACHE_DIR=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        survived = _watch(process, random.Random(seed), kills, every)
    survived.code = process.returncode
    return survived


def _watch(process: subprocess.Popen, chance: random.Random, kills: int, every: int) -> Survived:
    found, output = Survived(0, ""), []
    pids: dict[int, int] = {}
    killed_at, newest, has_begun = None, 0, False
    kill_in_step = chance.randint(1, 2 * every)
    for line in process.stdout:
        output.append(line)
        told = _LINE.match(line)
        if told is None:
            continue
        rank, what, number = int(told[1]), told[2], int(told[3])
        if what == "pid":
            pids[rank] = number
            if len(pids) == 2 and chance.random() < 0.1 and found.kills < kills:
                kill_in_step = -1  # before its first step
            has_begun = False
        elif what == "from":
            has_begun = True
            found.lost += number < newest - newest % every - every
            kill_in_step = number + chance.randint(1, 2 * every)
        elif killed_at is not None and has_begun:
            found.seconds.append(time.monotonic() - killed_at)
            killed_at = None
        newest = max(newest, number) if what == "step" else newest
        is_time = kill_in_step == -1 or (what == "step" and number >= kill_in_step)
        if is_time and len(pids) == 2 and found.kills < kills:
            time.sleep(chance.uniform(0, 0.05))
            os.kill(pids[chance.randrange(2)], signal.SIGKILL)
            killed_at = killed_at or time.monotonic()
            found.kills += 1
            pids, kill_in_step, has_begun = {}, 1 << 62, False
    process.wait()
    found.output = "".join(output)
    return found
