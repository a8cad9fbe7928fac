"""Records each call of each mapped function: its arguments and results, as digests and values."""

import collections
import functools
import os
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import replays
from .records import RecordedCall, RecordWriter, read_calls

VENDORED = "_mapped"  # the name of the vendored module


class Recorder:
    """Makes functions of which each call is recorded, and writes the records of this process.

    Args:
      folder: gets a folder for each process.
      tree: the program's folder; calls are named by the files in it.
      written: by path in the tree, the lines that a migration wrote.
      replayed: the `folder` of the old program, for replays of written steps; "": there are none.
    """

    def __init__(
        self,
        folder: str,
        tree: str,
        written: Mapping[str, Sequence[int]] = types.MappingProxyType({}),
        replayed: str = "",
    ):
        self._folder, self._tree, self._written = folder, os.path.realpath(tree), written
        self._replayed = replayed
        self._old: Sequence[RecordedCall] = []  # the calls of the old program's process like this
        self._calls_at: collections.Counter[tuple[str, int]] = collections.Counter()
        self._writer: RecordWriter | None = None
        self._process = 0  # the process that made the writer: a forked one makes its own
        self._is_inside = False  # a recorded call is active: calls within it are not recorded

    def install(self, at_import: Callable[[str, Callable[[types.ModuleType], None]], None]) -> None:
        """Replace jax.pmap, jax_dist.pmap, `mapped` and jax.jit when their modules are imported."""
        for name, function in (("jax", "pmap"), ("jax_dist", "pmap"), (VENDORED, "mapped")):
            at_import(name, functools.partial(self.replace, name=function))
        if self._written:
            at_import("jax", functools.partial(self.replace, name="jit", only_written=True))

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
        frame: types.FrameType | None = sys._getframe(2)
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
        writer = self._open()
        number, place = self._calls_at.total(), (recorded.path, recorded.line)
        self._calls_at[place] += 1
        keep_all = self._calls_at[place] <= replays.CALLS
        event: dict[str, Any] = {"path": place[0], "line": place[1], "name": recorded.name}
        event["given"] = writer.describe((args, kwargs), is_argument=True, keep_all=keep_all)
        self._is_inside = True
        try:
            if keep_all and self._replayed and "step" in recorded.__dict__:
                event["replay"] = self._replay(number, recorded, (args, kwargs))
            result = recorded.fun(*args, **kwargs)
            event["returned"] = writer.describe(result, keep_all=keep_all)
        except BaseException as error:
            event["raised"] = f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            self._is_inside = False
            writer.write(event)
        return result

    def _replay(self, number: int, recorded: "_Recorded", arguments: Any) -> dict[str, Any]:
        """Replay a step on the old program's call of this number; see `RecordedCall.replay`."""
        old = self._old[number] if number < len(self._old) else None
        step, options = recorded.__dict__["step"]
        try:
            epsilon, tolerances = replays.replay(recorded.fun, step, options, arguments, old)
        except replays.Difference as difference:
            text, reason = difference.args
        except Exception as error:  # noqa: BLE001 - any of the program's own
            text, reason = f"it fails on its own: {type(error).__name__}: {error}"[:300], ""
        else:
            return {"text": "", "epsilon": epsilon, "tolerances": tolerances}
        del recorded.__dict__["step"]  # it takes another form: its next calls need no replay
        return {"text": text, "reason": reason}

    def _open(self) -> RecordWriter:
        """Return the writer of this process; open it, and the records of the old program's."""
        import jax

        if self._writer is None or self._process != os.getpid():
            self._process, index = os.getpid(), jax.process_index()
            find = lambda folder: sorted(Path(folder).glob(f"{index:05}-*"))
            earlier, olds = find(self._folder), find(self._replayed) if self._replayed else []
            self._old = read_calls(olds[len(earlier)]) if len(earlier) < len(olds) else []
            name = f"{index:05}-{time.time_ns()}-{os.getpid()}"
            self._writer = RecordWriter(Path(self._folder, name))
        return self._writer


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
