"""Starts the processes of one test, watches them, and ends them, whatever happens."""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_dist._test_worker import Function, RemoteFailure, Task, WorkerReport, load
from jax_dist.errors import refusal
from jax_dist.launch.outcome import ending
from jax_dist.launch.ranks import cpu_environment

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 2.0  # how long the others may go on after one failed
_LEAVE_SECONDS = 5.0  # how long a process may take to leave when told to
_PORTS = 3  # how many to try
_PORT_TAKEN = ("Failed to start RPC server", "Failed to add port", "already in use")
_TAIL_LINES = 30  # of a process's output, in a message

# The child finds modules where this process finds them, so sys.path comes before everything else.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from jax_dist._test_worker import main; main()"
)
# Which devices this process has, and its place among others, if it is part of a job itself.
_NOT_INHERITED = ("JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX")


@dataclass(frozen=True)
class Outcome:
    """How one process of `run_processes` ended."""

    rank: int  # its jax.process_index()
    value: Any  # what the function returned there; None where it did not return
    error: Exception | None  # what it raised, or why it did not return
    exit_code: int  # negative: the signal that ended it
    output: str  # its standard output and error


def run_processes(
    fun: Callable, *args: Any, processes: int = 2, cpu_devices: int = 2, timeout: float = 120.0
) -> list[Outcome]:
    """Runs a function in several processes at the same time, joined by `jax.distributed`.

    Each process is a fresh Python with simulated CPU devices of its own. They talk over the
    loopback interface, with gloo collectives. No process outlives the call: when one fails, the
    others, which may wait for it in a collective, are stopped two seconds later.

    Args:
      fun: the function that each process calls; it must be found by its name at the top of a module
        or script. JAX has been joined, and the module is imported, before it is called.
      *args: its arguments, the same in each process; they must pickle, and so must what it returns.
        Return plain data, such as lists of numbers.
      processes: how many processes to start.
      cpu_devices: how many devices each process has.
      timeout: the seconds after which processes that still run are stopped, start-up included.

    Returns:
      One outcome for each process, in the order of the ranks. The error is what the function
      raised, with the traceback as a note, or a RuntimeError where the process died, was stopped
      because another one failed first, or raised what does not pickle, or a TimeoutError.

    Raises:
      TypeError: another process cannot find `fun` by its name.

    >>> import jax
    >>> [outcome.value for outcome in run_processes(jax.process_index, processes=2)]
    [0, 1]

    Environment variables are inherited, except those that choose devices. What `jax.config.update`
    changed here is not; change it in `fun`.
    """
    function = Function.of(fun)
    deadline = time.monotonic() + timeout
    for attempt in range(1, _PORTS + 1):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        task = Task(
            function=function,
            arguments=pickle.dumps(args),
            processes=processes,
            address=f"127.0.0.1:{port}",
            timeout=timeout,
            parent=os.getpid(),
        )
        with _children(task, cpu_devices) as children:
            first = _wait(children, deadline)
            if attempt < _PORTS and first is not None and first.found_port_taken():
                continue
            _end(children, timed_out=first is None)
            return [_outcome(child, first, timeout) for child in children]
    raise AssertionError("the last attempt returns")


@contextlib.contextmanager
def _children(task: Task, cpu_devices: int) -> "Iterator[list[_Child]]":
    """Starts them; afterwards none is left, and neither are their files."""
    children: list[_Child] = []
    inherited = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    environment = inherited | cpu_environment(inherited, cpu_devices)
    environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    with tempfile.TemporaryDirectory(prefix="jax_dist_") as name:
        folder = pathlib.Path(name)
        (folder / "task").write_bytes(pickle.dumps(task))
        try:
            for rank in range(task.processes):
                children.append(_Child(rank, folder, environment))
            yield children
        finally:
            for child in children:
                child.kill()


class _Child:
    """One process, as its parent sees it."""

    def __init__(self, rank: int, folder: pathlib.Path, environment: dict[str, str]):
        self.rank = rank
        self._folder = folder
        self._report: WorkerReport | None = None
        with open(folder / f"{rank}.output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path), str(folder), str(rank)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the parent, which then ends them all
            )
        self._input: Any = self._process.stdin

    def died(self) -> bool:
        """Whether it ended without a report. Asked in this order: it reports, then ends."""
        return self._process.poll() is not None and self.report() is None

    def ended(self) -> bool:
        return self.died() or self.report() is not None

    def failure(self) -> RemoteFailure | None:
        report = self.report()
        return None if report is None else report.failure

    def report(self) -> WorkerReport | None:
        path = self._folder / f"{self.rank}.report"
        if self._report is None and path.exists():
            self._report = pickle.loads(path.read_bytes())
        return self._report

    def output(self) -> str:
        return (self._folder / f"{self.rank}.output").read_text(errors="replace")

    def joined(self) -> bool:
        return (self._folder / f"{self.rank}.joined").exists()

    def found_port_taken(self) -> bool:
        """Whether rank 0 could not listen: it raises or crashes, with various texts."""
        if self.rank != 0 or self.joined():
            return False
        failure = self.failure()
        text = self.output() + (failure.summary if failure is not None else "")
        return any(sign in text for sign in _PORT_TAKEN)

    def exit_code(self) -> int:
        return self._process.wait()

    def show_stacks(self) -> None:
        """Has the process write its stacks to its output; waits for that a second at most."""
        if self._process.poll() is not None:
            return
        before = latest = self.output()
        self._process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            previous, latest = latest, self.output()
            if before != latest == previous:  # it wrote, and is done
                return

    def leave(self) -> None:
        """Lets a process go that has reported."""
        self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)

    def kill(self) -> None:
        """Ends the process and all that it started. JAX holds back SIGTERM, so by SIGKILL."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._input.close()


def _wait(children: Sequence[_Child], deadline: float) -> _Child | None:
    """Until all ended, time is up, or one failed and the others had their grace.

    Returns:
      The child that failed first.
    """
    first = None
    while any(not child.ended() for child in children) and time.monotonic() < deadline:
        if first is None:
            first = _failed(children)
            if first is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return first or _failed(children)


def _failed(children: Sequence[_Child]) -> _Child | None:
    """The one to blame: a death makes others raise, and that of rank 0 makes them die."""
    dead = [child for child in children if child.died()]
    raised = [child for child in children if child.failure() is not None]
    return next(iter(dead + raised), None)


def _end(children: Sequence[_Child], *, timed_out: bool) -> None:
    unfinished = [child for child in children if not child.ended()]
    for child in unfinished if timed_out else ():
        child.show_stacks()
    for child in unfinished:
        child.kill()
    for child in reversed(children):  # rank 0 last: without it, JAX aborts the others
        if child not in unfinished:
            child.leave()
            child.kill()


def _outcome(child: _Child, first: _Child | None, timeout: float) -> Outcome:
    report = child.report()
    value = error = None
    if report is not None and report.value is not None:
        value = load(report.value)
    elif report is not None and report.failure is not None:
        error = report.failure.revive(child.rank)
    elif first is None:
        joined = child.joined()
        error = refusal(
            TimeoutError,
            what=f"rank {child.rank} was stopped after {timeout:g} seconds",
            which=["its function was running" if joined else "it had not joined the others yet"],
            why=f"run_processes was given timeout={timeout:g}",
            do=f"Give it more time, or see where it was:\n{_tail(child.output())}",
        )
    elif child is first:
        error = refusal(
            RuntimeError,
            what=f"rank {child.rank} died before its function ended",
            which=[ending(child.exit_code())],
            why="it crashed, left by os._exit, or was killed from outside",
            do=f"See how its output ended:\n{_tail(child.output())}",
        )
    else:
        which = [f"rank {first.rank} failed first"]
        if child.exit_code() != -signal.SIGKILL:  # not by us, then, but by JAX as it lost the other
            which.append(f"rank {child.rank} ended by {ending(child.exit_code())}")
        error = refusal(
            RuntimeError,
            what=f"rank {child.rank} was stopped before its function ended",
            which=which,
            why="a rank may wait for ever in a collective that another one never enters",
            do=f"See the error of rank {first.rank}.",
        )
    return Outcome(child.rank, value, error, child.exit_code(), child.output())


def _tail(output: str) -> str:
    lines = output.splitlines()[-_TAIL_LINES:] or ["(it wrote nothing)"]
    return "\n".join(f"    {line}" for line in lines)
