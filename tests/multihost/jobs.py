"""Starts the ranks of a job, each a program of its own, and waits for how they end."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_ROOT = pathlib.Path(__file__).parents[2]
_HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    output: str
    seconds: float  # after the moment that the job's trouble began, or after the start


def say(text: str) -> None:
    """For the programs: a line at once, whatever comes next."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def after_rank_0(rank: int, is_through: pathlib.Path) -> Iterator[None]:
    """For the ranks: all others enter the block when rank 0 has left it."""
    while rank > 0 and not is_through.exists():
        time.sleep(0.02)
    try:
        yield
    finally:
        is_through.touch()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_job(
    program: str,
    *arguments: str,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> list[Ended]:
    """Runs `python PROGRAM ARGUMENTS` of this folder as every rank of a job."""
    address = f"127.0.0.1:{free_port()}"
    started = time.time()
    command = [str(_HERE / program), *arguments]
    files = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115  # `_read` closes
    processes = [
        _start(command, address, rank, ranks, environment or {}, files[rank])
        for rank in range(ranks)
    ]
    codes, ends = _wait(processes, timeout)
    outputs = [_read(output) for output in files]
    trouble = [_trouble(output) for output in outputs]
    since = min((moment for moment in trouble if moment), default=started)
    return [
        Ended(code, output, end - since)
        for code, output, end in zip(codes, outputs, ends, strict=True)
    ]


def _start(
    command: Sequence[str],
    address: str,
    rank: int,
    ranks: int,
    more: Mapping[str, str],
    output: IO[str],
) -> subprocess.Popen:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(ranks),
        "JAX_PROCESS_ID": str(rank),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        **more,
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _wait(processes: Sequence[subprocess.Popen], timeout: float) -> tuple[list[int], list[float]]:
    """The exit code of each, and when; what hangs is killed, and has SIGALRM for its code."""
    deadline = time.time() + timeout
    ends: dict[int, float] = {}
    while len(ends) < len(processes) and time.time() < deadline:
        for number, process in enumerate(processes):
            if number not in ends and process.poll() is not None:
                ends[number] = time.time()
        time.sleep(0.02)
    codes = []
    for number, process in enumerate(processes):
        hangs = number not in ends
        if hangs:
            process.kill()
        process.wait()
        codes.append(-signal.SIGALRM if hangs else process.returncode)
    return codes, [ends.get(number, deadline) for number in range(len(processes))]


def _read(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


def _trouble(output: str) -> float | None:
    """When a program said that its trouble begins: a line `trouble at 1700000000.0`."""
    for line in output.splitlines():
        if line.startswith("trouble at "):
            return float(line.removeprefix("trouble at "))
    return None
