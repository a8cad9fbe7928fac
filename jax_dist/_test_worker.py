"""What each process of `run_processes` runs: join the others, call the function, tell the parent.

Parent and child share a folder. The parent writes `task` there. The child of rank `k` writes
`k.joined` once it has met the others and `k.report` once the function has ended; its standard
output and error go to `k.output`. Then it stays, for a process that leaves early takes others
down with it, until the parent closes its standard input.
"""

import ctypes
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import math
import operator
import os
import pathlib
import pickle
import signal
import sys
import traceback
import types
from dataclasses import dataclass

STACKS_SIGNAL = signal.SIGUSR1  # the child answers with the stacks of all its threads, and goes on

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_SPARE_SECONDS = 30.0  # what a child that lost its parent may live beyond its timeout


@dataclass(frozen=True)
class Function:
    """A function as one process names it to another."""

    module: str  # "__main__" for one that a script defines
    qualname: str
    script: str | None  # the script's path, where module is "__main__"


@dataclass(frozen=True)
class Task:
    function: Function
    arguments: bytes  # a pickled tuple; apart, for it may need the script to be loaded
    processes: int
    address: str  # of rank 0: "127.0.0.1:port"
    timeout: float  # seconds
    parent: int  # process id


@dataclass(frozen=True)
class Failure:
    error: bytes | None  # the pickled exception; None where it does not pickle
    summary: str  # "ValueError: its text"
    traceback: str


@dataclass(frozen=True)
class Report:
    value: bytes | None  # what the function returned, pickled
    failure: Failure | None = None


def main() -> None:
    """The life of a child. `sys.argv` is `["-c", folder, rank]`."""
    folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    task: Task = pickle.loads((folder / "task").read_bytes())
    _die_in_time(task)
    report = _attempt(task, folder, rank)
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.replace(folder / f"{rank}.report")  # at once: the parent never reads half of it
    sys.stdin.buffer.read()  # ends when the parent closes it, or is gone
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: at exit, JAX waits up to 300 s for processes that may be gone already.
    os._exit(0 if report.failure is None else 1)


def _die_in_time(task: Task) -> None:
    """Lets this process show its stacks when asked, and not outlive its parent."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    faulthandler.dump_traceback_later(task.timeout + _SPARE_SECONDS, exit=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != task.parent:  # gone before the line above
        os._exit(1)


def _attempt(task: Task, folder: pathlib.Path, rank: int) -> Report:
    try:
        _join(task, rank)
        (folder / f"{rank}.joined").touch()
        # Only now: a module that computes while it is imported starts JAX without the others.
        function = _load(task.function)
        value = function(*pickle.loads(task.arguments))
    except BaseException as error:  # noqa: B036  # sys.exit too: the parent raises nothing else
        return Report(None, _describe(error))
    try:
        return Report(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001  # pickle raises what the value's class raises
        return Report(None, _describe(error))


def _join(task: Task, rank: int) -> None:
    import jax  # here, so that a failure to import is reported like any other

    jax.distributed.initialize(
        coordinator_address=task.address,
        coordinator_bind_address=task.address,  # else it listens on all interfaces
        num_processes=task.processes,
        process_id=rank,
        initialization_timeout=max(1, math.ceil(task.timeout)),
        cluster_detection_method="deactivate",  # else SLURM's or Kubernetes' variables have a say
    )


def _load(function: Function) -> types.FunctionType:
    if function.script is None:
        module = importlib.import_module(function.module)
    else:
        module = _load_script(function.script)
    return operator.attrgetter(function.qualname)(module)


def _load_script(path: str) -> types.ModuleType:
    """Runs the script, except for what it guards by `if __name__ == "__main__"`."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    spec = importlib.util.spec_from_loader("__main__", loader)
    assert spec is not None  # it is None only for loaders that do not know their file
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__jax_dist_main__"
    # Both names, so that pickles find the script's classes in here, and its own in the parent.
    sys.modules["__main__"] = sys.modules["__jax_dist_main__"] = module
    exec(loader.get_code("__main__"), module.__dict__)
    return module


def _describe(error: BaseException) -> Failure:
    try:
        pickled = pickle.dumps(error)
    except Exception:  # noqa: BLE001  # pickle raises what the error's class raises
        pickled = None
    return Failure(
        error=pickled,
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(error)),
    )
