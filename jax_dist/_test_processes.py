"""`run_processes`: starts the processes of one test, watches them, and ends them, come what may.

Parent and children share a folder. The parent writes `task` there. The child of rank `k` writes
`k.joined` once it has met the others and `k.report` once the function has ended; its output and
errors go to `k.output`. Then it stays until the parent closes its standard input, for a process
that leaves early takes others down with it.
"""

import contextlib
import faulthandler
import importlib
import importlib.machinery
import io
import json
import math
import operator
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_dist._exceptions import text_of, told
from jax_dist.errors import refusal
from jax_dist.launch.outcome import ending
from jax_dist.launch.ranks import cpu_environment, die_with, reserved_port

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 2.0  # how long the others may go on after one failed
_LEAVE_SECONDS = 5.0  # how long a process may take to leave when told to
_SPARE_SECONDS = 30.0  # what a child that lost its parent may live beyond its timeout
_TAIL_LINES = 30  # of a process's output, in a message

# The child finds modules where this process finds them, so sys.path comes before everything else.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from jax_dist._test_processes import _main; _main()"
)
_SCRIPT = "__jax_dist_main__"  # what a child calls the script that is __main__ in the parent
# Which devices this process has, and its place among others, if it is part of a job itself.
_NOT_INHERITED = ("JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX")


@dataclass(frozen=True)
class _Function:
    """A function as one process names it to another."""

    module: str
    qualname: str
    script: str | None = None  # the path of the script that defines it; its module is __main__ then

    @classmethod
    def of(cls, fun: Callable) -> "_Function":
        """Raises a TypeError where another process could not find it."""
        name = getattr(fun, "__qualname__", repr(fun))
        module = sys.modules.get(getattr(fun, "__module__", None) or "")
        if "<lambda>" in name or "<locals>" in name:
            raise _not_findable(name, "it is a lambda, or is defined inside another function")
        try:
            known = operator.attrgetter(name)(module)
        except AttributeError:
            known = None
        if module is None or known is not fun:
            raise _not_findable(name, "its module knows it by another name, or by none")
        if module.__name__ != "__main__":
            return cls(module.__name__, name)
        if module.__spec__ is not None:  # python -m package.module
            return cls(module.__spec__.name, name)
        script = getattr(module, "__file__", None)
        if script is None:
            raise _not_findable(name, "it is defined in an interactive session")
        return cls("__main__", name, os.path.abspath(script))

    def load(self) -> Callable:
        if self.script is None:
            module = importlib.import_module(self.module)
        else:  # runs the script, except for what it guards by `if __name__ == "__main__"`
            module = types.ModuleType(_SCRIPT)
            module.__file__ = self.script
            # The first is what the arguments' pickle calls it, the second what the result's will.
            sys.modules["__main__"] = sys.modules[_SCRIPT] = module
            importlib.machinery.SourceFileLoader(_SCRIPT, self.script).exec_module(module)
        return operator.attrgetter(self.qualname)(module)


@dataclass(frozen=True)
class _Task:
    function: _Function
    arguments: bytes  # a pickled tuple; apart, for it may need the script to be loaded
    processes: int
    address: str  # of rank 0: "127.0.0.1:port"
    timeout: float  # seconds
    parent: int  # process id


@dataclass(frozen=True)
class _Report:
    """What a function returned or raised, as one process tells it to another."""

    value: bytes | None = None  # pickled; None where it raised
    error: bytes | None = None  # pickled; None where it does not pickle
    summary: str = ""  # "ValueError: its text"
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "_Report":
        try:
            pickled = pickle.dumps(error)
        except Exception:  # noqa: BLE001  # pickle raises what the error's class raises
            pickled = None
        said = told(error)
        return cls(None, pickled, said.what, said.traceback)

    def revive(self, rank: int) -> Exception:
        """The exception itself, where it can be, with the traceback as a note."""
        error = None
        if self.error is not None:
            with contextlib.suppress(Exception):  # unpickling raises what the class raises
                error = _load(self.error)
        if not isinstance(error, Exception):
            error = refusal(
                RuntimeError,
                what=f"rank {rank} raised what cannot be raised here",
                which=[self.summary],
                why="only what pickles and derives from Exception travels between processes",
                do="See its traceback below.",
            )
        error.add_note(f"Raised in rank {rank}:\n{self.traceback.rstrip()}")
        return error


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
    function = _Function.of(fun)
    deadline = time.monotonic() + timeout
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        task = _Task(function, pickle.dumps(args), processes, address, timeout, os.getpid())
        with _children(task, cpu_devices) as children:
            first = _wait(children, deadline)
            _end(children, timed_out=first is None)
            return [_outcome(child, first, timeout) for child in children]


@contextlib.contextmanager
def _children(task: _Task, cpu_devices: int) -> "Iterator[list[_Child]]":
    """Starts them; afterwards none is left, and neither are their files."""
    children: list[_Child] = []
    inherited = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    environment = {
        **inherited,
        **cpu_environment(inherited, cpu_devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
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
        self._report: _Report | None = None
        with open(folder / f"{rank}.output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path), str(folder), str(rank)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the parent, which then ends them all
            )

    def died(self) -> bool:
        """Whether it ended without a report. Asked in this order: it reports, then ends."""
        return self._process.poll() is not None and self.report() is None

    def ended(self) -> bool:
        return self.died() or self.report() is not None

    def report(self) -> _Report | None:
        path = self._folder / f"{self.rank}.report"
        if self._report is None and path.exists():
            self._report = pickle.loads(path.read_bytes())
        return self._report

    def output(self) -> str:
        return (self._folder / f"{self.rank}.output").read_text(errors="replace")

    def joined(self) -> bool:
        return (self._folder / f"{self.rank}.joined").exists()

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
        self._close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)

    def kill(self) -> None:
        """Ends the process and all that it started. JAX holds back SIGTERM, so by SIGKILL."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close_input()

    def _close_input(self) -> None:
        assert self._process.stdin is not None  # it was asked for
        self._process.stdin.close()


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
    raised = [child for child in children if (report := child.report()) and report.value is None]
    return next(iter(dead + raised), None)


def _end(children: Sequence[_Child], *, timed_out: bool) -> None:
    unfinished = [child for child in children if not child.ended()]
    if timed_out:
        for child in unfinished:
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
        value = _load(report.value)
    elif report is not None:
        error = report.revive(child.rank)
    else:
        error = _no_report(child, first, timeout)
    return Outcome(child.rank, value, error, child.exit_code(), child.output())


def _no_report(child: _Child, first: _Child | None, timeout: float) -> Exception:
    """Why it has not reported, where `first` is who failed first."""
    if first is None:
        where = "its function was running" if child.joined() else "it had not joined the others yet"
        return refusal(
            TimeoutError,
            what=f"rank {child.rank} was stopped after {timeout:g} seconds",
            which=[where],
            why=f"run_processes was given timeout={timeout:g}",
            do=f"Give it more time, or see where it was:\n{_tail(child.output())}",
        )
    if child is first:
        return refusal(
            RuntimeError,
            what=f"rank {child.rank} died before its function ended",
            which=[ending(child.exit_code())],
            why="it crashed, left by os._exit, or was killed from outside",
            do=f"See how its output ended:\n{_tail(child.output())}",
        )
    which = [f"rank {first.rank} failed first"]
    if child.exit_code() != -signal.SIGKILL:  # not by us, then, but by JAX as it lost the other
        which.append(f"rank {child.rank} ended by {ending(child.exit_code())}")
    return refusal(
        RuntimeError,
        what=f"rank {child.rank} was stopped before its function ended",
        which=which,
        why="a rank may wait for ever in a collective that another one never enters",
        do=f"See the error of rank {first.rank}.",
    )


def _tail(output: str) -> str:
    lines = output.splitlines()[-_TAIL_LINES:] or ["(it wrote nothing)"]
    return "\n".join(f"    {line}" for line in lines)


# --- what parent and child tell each other, and what the child runs


def _load(pickled: bytes) -> Any:
    """In the parent, reads what a child pickled."""
    return _Unpickler(io.BytesIO(pickled)).load()


def _main() -> None:
    """The life of a child. `sys.argv` is `["-c", folder, rank]`."""
    folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    task: _Task = pickle.loads((folder / "task").read_bytes())
    die_with(task.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # which the parent sends at its timeout
    faulthandler.dump_traceback_later(task.timeout + _SPARE_SECONDS, exit=True)
    report = _attempt(task, folder, rank)
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.replace(folder / f"{rank}.report")  # at once: the parent never reads half of it
    sys.stdin.buffer.read()  # ends when the parent closes it, or is gone
    sys.stdout.flush()
    sys.stderr.flush()
    multihost = sys.modules.get("jax_dist.multihost.initialization")
    if multihost is not None:
        multihost.part()
    # Not sys.exit: at exit, JAX waits up to 300 s for processes that may be gone already.
    os._exit(1 if report.value is None else 0)


def _attempt(task: _Task, folder: pathlib.Path, rank: int) -> _Report:
    try:
        import jax  # here, so that a failure to import is reported like any other

        jax.distributed.initialize(
            coordinator_address=task.address,
            coordinator_bind_address=task.address,  # else it listens on all interfaces
            num_processes=task.processes,
            process_id=rank,
            initialization_timeout=max(1, math.ceil(task.timeout)),
            cluster_detection_method="deactivate",  # else SLURM's or Kubernetes' have a say
        )
        (folder / f"{rank}.joined").touch()
        # Only now: a module that computes while it is imported starts JAX without the others.
        function = task.function.load()
        value = function(*pickle.loads(task.arguments))
    except BaseException as error:  # noqa: BLE001  # sys.exit too: it would leave without a word
        return _Report.of(error)
    try:
        return _Report(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001  # pickle raises what the value's class raises
        unpicklable = refusal(
            TypeError,
            what=f"rank {rank} returned a value that does not pickle",
            which=[f"it is a {type(value).__name__}: {text_of(error)}"],
            why="results travel between processes",
            do="Return plain data, such as lists of numbers.",
        )
        return _Report.of(unpicklable)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module_name = "__main__" if module_name == _SCRIPT else module_name
        return super().find_class(module_name, global_name)


def _not_findable(name: str, why_not: str) -> TypeError:
    return refusal(
        TypeError,
        what=f"run_processes cannot send {name!r} to another process",
        which=[why_not],
        why="each process imports the module again, and finds the function by its name",
        do="Define it at the top of a module, and pass what it needs as arguments.",
    )
