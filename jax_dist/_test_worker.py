"""What parent and child of `run_processes` tell each other, and what the child runs.

They share a folder. The parent writes `task` there. The child of rank `k` writes `k.joined` once it
has met the others and `k.report` once the function has ended; its output and errors go to
`k.output`. Then it stays until the parent closes its standard input, for a process that leaves
early takes others down with it.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.machinery
import io
import math
import operator
import os
import pathlib
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_dist.errors import refusal

_SCRIPT = "__jax_dist_main__"  # what a child calls the script that is __main__ in the parent

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_SPARE_SECONDS = 30.0  # what a child that lost its parent may live beyond its timeout


@dataclass(frozen=True)
class Function:
    """A function as one process names it to another."""

    module: str
    qualname: str
    script: str | None = None  # the path of the script that defines it; its module is __main__ then

    @classmethod
    def of(cls, fun: Callable) -> "Function":
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
        else:
            module = _load_script(self.script)
        return operator.attrgetter(self.qualname)(module)


@dataclass(frozen=True)
class Task:
    function: Function
    arguments: bytes  # a pickled tuple; apart, for it may need the script to be loaded
    processes: int
    address: str  # of rank 0: "127.0.0.1:port"
    timeout: float  # seconds
    parent: int  # process id


@dataclass(frozen=True)
class RemoteFailure:
    """An exception as one process tells it to another."""

    error: bytes | None  # pickled; None where it does not pickle
    summary: str  # "ValueError: its text"
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RemoteFailure":
        try:
            pickled = pickle.dumps(error)
        except Exception:  # noqa: BLE001  # pickle raises what the error's class raises
            pickled = None
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(pickled, summary, "".join(traceback.format_exception(error)))

    def revive(self, rank: int) -> Exception:
        """The exception itself, where it can be, with the traceback as a note."""
        error = None
        if self.error is not None:
            with contextlib.suppress(Exception):  # unpickling raises what the class raises
                error = load(self.error)
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
class WorkerReport:
    value: bytes | None  # what the function returned, pickled
    failure: RemoteFailure | None = None


def load(pickled: bytes) -> Any:
    """In the parent, reads what a child pickled."""
    return _Unpickler(io.BytesIO(pickled)).load()


def main() -> None:
    """The life of a child. `sys.argv` is `["-c", folder, rank]`."""
    folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    task: Task = pickle.loads((folder / "task").read_bytes())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # which the parent sends at its timeout
    faulthandler.dump_traceback_later(task.timeout + _SPARE_SECONDS, exit=True)
    if sys.platform == "linux":  # not to outlive the parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != task.parent:  # gone before the line above
        os._exit(1)
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
    os._exit(0 if report.failure is None else 1)


def _attempt(task: Task, folder: pathlib.Path, rank: int) -> WorkerReport:
    try:
        import jax  # here, so that a failure to import is reported like any other

        jax.distributed.initialize(
            coordinator_address=task.address,
            coordinator_bind_address=task.address,  # else it listens on all interfaces
            num_processes=task.processes,
            process_id=rank,
            initialization_timeout=max(1, math.ceil(task.timeout)),
            cluster_detection_method="deactivate",  # else SLURM's or Kubernetes' variables matter
        )
        (folder / f"{rank}.joined").touch()
        # Only now: a module that computes while it is imported starts JAX without the others.
        function = task.function.load()
        value = function(*pickle.loads(task.arguments))
    except BaseException as error:  # noqa: BLE001  # sys.exit too: it would leave without a word
        return WorkerReport(None, RemoteFailure.of(error))
    try:
        return WorkerReport(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001  # pickle raises what the value's class raises
        unpickled = refusal(
            TypeError,
            what=f"rank {rank} returned a value that does not pickle",
            which=[f"it is a {type(value).__name__}: {error}"],
            why="results travel between processes",
            do="Return plain data, such as lists of numbers.",
        )
        return WorkerReport(None, RemoteFailure.of(unpickled))


def _load_script(path: str) -> types.ModuleType:
    """Runs the script, except for what it guards by `if __name__ == "__main__"`."""
    loader = importlib.machinery.SourceFileLoader(_SCRIPT, path)
    module = types.ModuleType(_SCRIPT)
    module.__file__ = path
    # The first is what the arguments' pickle calls it, the second what the result's will.
    sys.modules["__main__"] = sys.modules[_SCRIPT] = module
    loader.exec_module(module)
    return module


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
