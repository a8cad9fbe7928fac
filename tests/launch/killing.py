"""Kills ranks of a job that is started again each time, at moments drawn at random."""

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

from launching import command, environment, is_alive, quick_to_compile

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
        env=environment(JAX_DIST_CACHE_DIR=str(folder / "cache"), **quick_to_compile()),
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


# ---- one death

BY_ITSELF = (
    *("an exception", "a long exception", "an exception in a thread", "sys.exit(3)"),
    *("sys.exit(0)", "os._exit(5)", "os.abort()", "a crash"),
)
BY_SIGNAL = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT")
_CODES = {  # of the launcher, where another one than 1 is right
    "sys.exit(3)": {3},
    "os._exit(5)": {5},
    "os.abort()": {134},
    "a crash": {139},
    "SIGKILL": {137},
    "SIGSTOP": {147},
    "SIGTERM": {0, 143},  # 0: JAX's preemption service takes it
    "SIGINT": {0, 130},  # 0: it was ignored, as in a job of a shell in the background
}
_NAMED = re.compile(r"rank (\d+) failed first|stopping because rank (\d+)")


@dataclasses.dataclass(frozen=True)
class Death:
    """How a job of several ranks ended after one of them had died."""

    rank: int  # that died
    how: str
    code: int  # of the launcher
    seconds: float  # from then to the end of the launcher
    named: frozenset[int]  # ranks that were blamed
    is_wrong: bool  # whether a sum was
    left: tuple[int, ...]  # processes that still run

    def faults(self) -> list[str]:
        """What should not be; nothing, if all is well."""
        found = []
        if self.seconds > 30 and self.how != "SIGSTOP":
            found.append(f"it took {self.seconds:.0f} s")
        if self.code not in _CODES.get(self.how, {1}):
            found.append(f"exit code {self.code}")
        if self.code and self.named != {self.rank}:
            found.append(f"named {sorted(self.named)}")
        if self.is_wrong:
            found.append("a wrong sum")
        if self.left:
            found.append(f"{len(self.left)} processes are left")
        return found


def one_death(*, ranks: int, rank: int, how: str, delay: float) -> Death:
    """Starts a job, has a rank die, and waits for the end.

    Args:
      ranks: how many there are.
      rank: which one dies.
      how: one of `BY_ITSELF` or `BY_SIGNAL`.
      delay: the seconds after the start of the rank.
    """
    program = (sys.executable, str(_PROGRAM.with_name("dying_program.py")))
    arguments = ("-n", str(ranks), "--cpu-devices", "2", "--timeout", "150")
    pids: dict[int, int] = {}
    died: list[float] = []
    text: list[str] = []
    with subprocess.Popen(
        command(*arguments, "--", *program, str(rank), how, str(delay)),
        env=environment(**quick_to_compile()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        killer = None
        for line in process.stdout:
            text.append(line)
            told = _LINE.match(line)
            if told is not None and told[2] == "pid":
                pids[int(told[1])] = int(told[3])
            if rank in pids and killer is None and how in BY_SIGNAL:
                killer = threading.Timer(delay, _send, (pids[rank], how, died))
                killer.start()
            if line.endswith("] dies\n"):
                died.append(time.monotonic())
        process.wait()
        ended_at = time.monotonic()
    if killer is not None:
        killer.cancel()
        killer.join()
    output = "".join(text)
    named = {int(one or other) for one, other in _NAMED.findall(output)}
    left = tuple(pid for pid in pids.values() if is_alive(pid))
    return Death(
        rank,
        how,
        process.returncode,
        ended_at - (died[0] if died else ended_at),
        frozenset(named),
        "] wrong\n" in output,
        left,
    )


def _send(pid: int, how: str, died: list[float]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[how])
        died.append(time.monotonic())
