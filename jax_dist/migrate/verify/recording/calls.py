"""Records each call of each mapped function: its arguments and results, as digests and values.

Each process has a folder. In it, `calls.jsonl` has one line for each call, and `NUMBER.npz` holds
its arrays, of those that are too large a corner.
"""

import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from . import replays
from .records import find_calls, read_call, to_numpy

_MOST_BYTES = 1 << 20  # of an array that is kept; of larger ones only a corner is
_CORNER = 16  # elements along each dimension
VENDORED = "_mapped"  # the name of the vendored module


class Recorder:
    """Makes functions of which each call is recorded, and writes the records of this process.

    The arguments are those of `start`; `folder` is its `records`, with a folder for each process.
    """

    def __init__(self, folder: str, tree: str, written: Mapping[str, Sequence[int]], replayed: str):
        self._folder, self._tree, self._written = folder, os.path.realpath(tree), written
        self._replayed = replayed
        self._old: list[tuple[Path, str]] = []  # the calls of the old program's process like this
        self._calls_at: dict[tuple[str, int], int] = {}  # number of calls, by path and line
        self._file: Any = None
        self._process = 0  # the process that opened the file: a forked one opens its own
        self._count = 0  # the number of all calls
        self._is_inside = False  # a recorded call is active: calls within it are not recorded

    def install(self, at_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
        """Replace jax.pmap, jax_dist.pmap, `mapped` and jax.jit when their modules are imported."""
        at_import("jax", lambda jax: self.replace(jax, "pmap"))
        if self._written:
            at_import("jax", lambda jax: self.replace(jax, "jit", only_written=True))
        at_import("jax_dist", lambda jax_dist: self.replace(jax_dist, "pmap"))
        at_import(VENDORED, lambda module: self.replace(module, "mapped"))

    def replace(self, module: Any, name: str, *, only_written: bool = False) -> None:
        """Replace a function such as jax.pmap by one whose results record their calls.

        `only_written`: record those alone that are made at the lines a migration wrote.
        """
        make = getattr(module, name, None)
        if make is None:
            return

        @functools.wraps(make)
        def mapping(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            place = self._place() if args and not self._is_inside else None
            if place is None or (only_written and place[1] not in self._written.get(place[0], ())):
                return result
            recorded = _Recorded(self, result, args[0], *place)
            if "in_shardings" in kwargs:
                recorded.__dict__["step"] = args[0], kwargs  # for `replays.replay`
            return recorded

        setattr(module, name, mapping)

    def _place(self) -> tuple[str, int] | None:
        """Return the path and line of the program that now map a function; None if none does.

        It is the innermost caller in the program's tree that is not the vendored module.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            path = os.path.realpath(frame.f_code.co_filename)
            is_vendored = os.path.basename(path) == f"{VENDORED}.py"
            if path.startswith(self._tree + os.sep) and not is_vendored:
                return os.path.relpath(path, self._tree), frame.f_lineno
            frame = frame.f_back
        return None

    def call(self, recorded: "_Recorded", args: Any, kwargs: Any) -> Any:
        """Call a recorded function, and write its arguments and results as one event.

        Calls in a trace have no values: they are not recorded. Arrays of the first calls of a place
        are kept whatever their size, as these calls are replayed.
        """
        import jax.core

        leaves = jax.tree.leaves((args, kwargs))
        if self._is_inside or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return recorded.fun(*args, **kwargs)
        number, self._count = self._count, self._count + 1
        place = recorded.path, recorded.line
        self._calls_at[place] = self._calls_at.get(place, 0) + 1
        is_replayed = self._calls_at[place] <= replays.CALLS
        most_bytes = math.inf if is_replayed else _MOST_BYTES
        values: dict[str, Any] = {}
        event: dict[str, Any] = {"path": recorded.path, "line": recorded.line}
        event |= {"call": number, "name": recorded.name}
        event["given"] = _describe((args, kwargs), "in", values, most_bytes)
        self._is_inside = True
        try:
            if is_replayed and self._replayed and "step" in recorded.__dict__:
                step, options = recorded.__dict__["step"]
                event["replay"] = self._replay(number, step, options, (args, kwargs))
            result = recorded.fun(*args, **kwargs)
        except BaseException as error:
            event["raised"] = f"{type(error).__name__}: {error}"[:500]
            self._write(event, {})
            raise
        finally:
            self._is_inside = False
        event["returned"] = _describe(result, "out", values, most_bytes)
        self._write(event, values)
        return result

    def _replay(self, number: int, step: Any, options: Any, arguments: Any) -> dict[str, Any]:
        """Replay a step on the old program's call of this number, as `Call.replay` describes it."""
        self._open()
        old = read_call(*self._old[number]) if number < len(self._old) else None
        if old is None or old.raised:
            return {"text": "pmap was not called at the same time", "reason": ""}
        try:
            epsilon, tolerances = replays.replay(step, options, arguments, old)
        except replays.Difference as difference:
            return {"text": difference.text, "reason": difference.reason}
        except Exception as error:  # noqa: BLE001 - any of the program's own
            text = f"it fails on its own: {type(error).__name__}: {error}"
            return {"text": text[:300], "reason": ""}
        return {"text": "", "epsilon": epsilon, "tolerances": tolerances}

    def _open(self) -> None:
        """Open the records of this process, and those of the old program, unless they are open."""
        import jax

        if self._file is not None and self._process == os.getpid():
            return
        self._process, index = os.getpid(), jax.process_index()
        if self._replayed:
            rank, olds = len(_processes(self._folder, index)), _processes(self._replayed, index)
            self._old = find_calls(Path(self._replayed, olds[rank])) if rank < len(olds) else []
        name = f"{index:05}-{time.time_ns()}-{os.getpid()}"
        self._folder_of_process = os.path.join(self._folder, name)
        os.makedirs(self._folder_of_process)
        path = os.path.join(self._folder_of_process, "calls.jsonl")
        self._file = open(path, "a")  # noqa: SIM115 - as long as the process lives

    def _write(self, event: dict[str, Any], values: dict[str, Any]) -> None:
        """Write one call, and the arrays of its leaves by their keys."""
        import numpy as np

        self._open()
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        if values:
            np.savez(os.path.join(self._folder_of_process, f"{event['call']}.npz"), **values)


def _processes(folder: str, index: int) -> list[str]:
    """Return the names of the folders of all processes of a JAX process index, in order of time."""
    return sorted(name for name in os.listdir(folder) if name.startswith(f"{index:05}-"))


class _Recorded:
    """A mapped function whose calls are recorded; it has the attributes of that function."""

    def __init__(self, recorder: Recorder, fun: Any, inner: Any, path: str, line: int):
        self.__dict__.update(recorder=recorder, fun=fun, path=path, line=line)
        self.__dict__["name"] = getattr(inner, "__name__", type(inner).__name__)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["fun"], name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _describe(
    tree: Any, side: str, values: dict[str, Any], most_bytes: float
) -> list[dict[str, Any]]:
    """Return a description of each leaf of the arguments (side "in") or the results ("out").

    It has a path and a dtype; an array has a shape, digests, and the key under which it goes into
    `values`, or a corner of it if it has more than `most_bytes`; any other object has a text.
    """
    import jax
    import numpy as np

    leaves: list[dict[str, Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        about: dict[str, Any] = {"path": jax.tree_util.keystr(path)}
        leaves.append(about)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex | bool):
            about["dtype"] = type(leaf).__name__
            text = repr(leaf)[:200]
            about["text"] = about["dtype"] if " at 0x" in text else text  # addresses change
            continue
        about["dtype"] = str(getattr(leaf, "dtype", type(leaf).__name__))
        array, copies = to_numpy(leaf)
        if side == "in" and not array.dtype.hasobject:  # as jit takes it
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
            about["dtype"] = str(array.dtype)
        about |= {"shape": list(array.shape), "digest": _digest(array)}
        if array.ndim and array.shape[0] <= 64:
            about["rows"] = [_digest(row) for row in array]
        if len(copies) > 1:
            about["copies"] = [_digest(copy) for copy in copies]
        if array.nbytes > most_bytes:
            array = array[(slice(_CORNER),) * array.ndim]
        about["key"] = key = f"{side}{len(leaves) - 1}"
        values[key] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return leaves


def _digest(array: Any) -> str:
    """Return a hash of the bytes of an array; "empty" if it has none."""
    import numpy as np

    if not array.nbytes:
        return "empty"
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]
