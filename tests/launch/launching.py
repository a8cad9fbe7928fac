"""Starts the launcher as a user does, and looks at what it leaves."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

_ROOT = pathlib.Path(__file__).parents[2]
PYTHON = (sys.executable, "-S", "-c")  # -S: most ranks here import little, and are to be quick
PATIENCE = 240.0  # seconds; the machine may be busy


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "jax_dist", "launch", *arguments]


def environment(**variables: str) -> dict[str, str]:
    ours = ("JAX_", "XLA_", "SLURM_", "OMPI_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(_ROOT), "COLUMNS": "100", **variables}


def quick_to_compile() -> dict[str, str]:
    """For programs that compile something: the flags of `conftest.py`."""
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def launch(*arguments: str, timeout: float = PATIENCE, **variables: str):
    """Runs it to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def launched(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Runs it while the block runs; then it is killed."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(text: str) -> list[tuple[int, str]]:
    """`[1 12:34:56.789] text` as (1, "text")."""
    found = []
    for line in text.splitlines():
        prefix, _, rest = line.partition("] ")
        found.append((int(prefix.removeprefix("[").split()[0]), rest))
    return found


def notices(text: str) -> list[str]:
    """What the launcher itself has to say."""
    start = "jax-dist launch: "
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    until = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return done


def is_alive(process: int) -> bool:
    """Whether it runs. Nobody may have waited yet for one that has ended."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
