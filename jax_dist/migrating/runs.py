"""Runs the user's program on simulated devices, with its mapped functions recorded."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_dist.migrating import records

_RECORDING = Path(__file__).with_name("recording")
_GRACE_SECONDS = 2.0  # to leave in, when told to


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended, and what it mapped."""

    exit_code: int | None  # negative: the signal that ended it; None: it was stopped, being late
    output: str  # standard output and error
    record: records.Record


def run(
    command: Sequence[str],
    folder: Path,
    *,
    files: Iterable[Path],
    devices: int,
    calls: int,
    timeout: float | None,
) -> Run:
    """Runs a command to its end.

    Args:
      command: the program and its arguments.
      folder: an empty one, for the records; it must outlive the result.
      files: that are being migrated, whose jitted functions are recorded too.
      devices: how many CPU devices to simulate.
      calls: of how many calls of each mapped function to keep the arrays.
      timeout: the seconds after which it is stopped; None for never.

    Raises:
      OSError: the command cannot be started.
    """
    (folder / "records").mkdir()
    (folder / "path").mkdir()
    shutil.copy(_RECORDING / "bootstrap.py", folder / "path" / "sitecustomize.py")
    wanted = {
        "package": str(_RECORDING),
        "folder": str(folder / "records"),
        "calls": calls,
        "files": [str(file) for file in files],
    }
    environment = _environment(devices) | {
        "JAX_DIST_RECORD": json.dumps(wanted),
        "PYTHONPATH": os.pathsep.join(_path(folder / "path")),
        # Of its own, for a file that changes twice within a second may keep its old bytecode.
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    output = folder / "output"
    exit_code = _to_the_end(command, environment, output, timeout)
    return Run(exit_code, output.read_text(errors="replace"), records.read(folder / "records"))


def _to_the_end(
    command: Sequence[str], environment: dict[str, str], output: Path, timeout: float | None
) -> int | None:
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(devices: int) -> dict[str, str]:
    """This process's, with simulated devices, and with one order of sets for both runs."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    flags = [
        flag
        for flag in inherited.pop("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {
        "PYTHONHASHSEED": "0",
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
    }


def _path(first: Path) -> list[str]:
    inherited = os.environ.get("PYTHONPATH", "")
    return [str(first), *filter(None, inherited.split(os.pathsep))]
