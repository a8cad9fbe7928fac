"""Starts the probe, and waits no longer than asked."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from jax_dist.doctor import probe

_FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] (.*)")  # as C++ logs before it ends the process


@dataclasses.dataclass(frozen=True, slots=True)
class Probed:
    """What the probe found, stage by stage, and how it ended."""

    stages: Mapping[str, Mapping[str, Any]]
    failed: str | None = None  # the stage that did not come to its end
    hung: bool = False  # it was stopped
    words: str = ""  # its last line, where it failed by itself


def run_probe(environment: Mapping[str, str], timeout: float) -> Probed:
    """Runs all stages in a fresh process.

    Args:
      environment: of the process.
      timeout: in seconds, for all stages together.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", probe.__name__],
        env={**environment, "PYTHONPATH": _path(environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be stopped with it
    )
    try:
        out, err = child.communicate(timeout=timeout)
        hung = False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        hung = True
    except BaseException:  # an interrupt: nothing is left behind
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return _read(out, err, hung=hung)


def _path(environment: Mapping[str, str]) -> str:
    """The probe imports the same jax_dist, installed or not."""
    ours = str(pathlib.Path(__file__).parents[2])
    before = environment.get("PYTHONPATH")
    return os.pathsep.join([before, ours]) if before else ours


def _read(out: str, err: str, *, hung: bool) -> Probed:
    lines = (line.removeprefix(probe.MARK) for line in out.splitlines() if probe.MARK in line)
    stages = {line["stage"]: line["found"] for line in map(json.loads, lines)}
    failed = next((name for name in probe.STAGES if name not in stages), None)
    words = "" if hung or failed is None else _last_words(err)
    return Probed(stages, failed, hung, words)


def _last_words(text: str) -> str:
    """What a person needs: the line of C++ that ended it, or else the end of the traceback."""
    fatal = [match[1] for line in text.splitlines() if (match := _FATAL.match(line))]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (fatal or lines or [""])[-1]
