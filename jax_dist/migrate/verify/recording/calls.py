"""Records each call of each mapped function: its arguments and results, as digests and values."""

import collections
import functools
import inspect
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
      written_lines: the lines that a migration wrote, by path in the tree: `{"a.py": [12, 13]}`.
      old_folder: the `folder` of the old program's run, to replay jitted steps: they run on the
        arguments that pmap had there. "": nothing is replayed.
    """

    def __init__(
        self,
        folder: str,
        tree: str,
        written_lines: Mapping[str, Sequence[int]] = types.MappingProxyType({}),
        old_folder: str = "",
    ):
        self._folder, self._tree = folder, os.path.realpath(tree)
        self._written_lines, self._old_folder = written_lines, old_folder
        self._old_calls: Sequence[RecordedCall] = []  # of the old program's process like this one
        self._call_counts: collections.Counter[tuple[str, int]] = collections.Counter()  # by place
        self._writer: RecordWriter | None = None
        self._process = 0  # the process that made the writer: a forked one makes its own
        self._is_in_call = False  # a recorded call is active: calls within it are not recorded

    def install(self, at_import: Callable[[str, Callable[[types.ModuleType], None]], None]) -> None:
        """Replace jax.pmap, jax_dist.pmap, `mapped` and jax.jit when their modules are imported."""
        for name, function in (("jax", "pmap"), ("jax_dist", "pmap"), (VENDORED, "mapped")):
            at_import(name, functools.partial(self.replace, name=function))
        if self._written_lines:
            at_import("jax", functools.partial(self.replace, name="jit", only_written=True))

    def replace(self, module: Any, name: str, *, only_written: bool = False) -> None:
        """Replace a function such as jax.pmap by one whose results record their calls.

        `only_written`: record those alone that are made at the lines a migration wrote.
        """
        make = getattr(module, name, None)
        if make is None:
            return

        @functools.wraps(make)
        def make_recorded(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            path, line = self._find_place(only_direct=only_written) if args else ("", 0)
            is_written = line in self._written_lines.get(path, ())
            is_recorded = not self._is_in_call and (is_written if only_written else path != "")
            return _Recorded(self, result, args[0], path, line, kwargs) if is_recorded else result

        setattr(module, name, make_recorded)

    def _find_place(self, *, only_direct: bool) -> tuple[str, int]:
        """Return the path and line of the program that now map a function; "" and 0 if none does.

        It is the innermost caller in the program's tree that is not the vendored module. With
        `only_direct`, no library is in between: `jax.device_put` may call jax.jit, too.
        """
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            path = os.path.realpath(frame.f_code.co_filename)
            is_vendored = os.path.basename(path) == f"{VENDORED}.py"
            if path.startswith(self._tree + os.sep) and not is_vendored:
                return os.path.relpath(path, self._tree), frame.f_lineno
            frame = None if only_direct else frame.f_back
        return "", 0

    def call(self, recorded: "_Recorded", args: Any, kwargs: Any) -> Any:
        """Call a recorded function, and write its arguments and results as one event.

        Calls in a trace have no values: they are not recorded. Arrays of the first calls of a place
        are kept whatever their size, as these calls are replayed.
        """
        import jax.core

        leaves = jax.tree.leaves((args, kwargs))
        if self._is_in_call or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return recorded.fun(*args, **kwargs)
        writer = self._open_writer()
        number, place = self._call_counts.total(), (recorded.path, recorded.line)
        self._call_counts[place] += 1
        is_early = self._call_counts[place] <= replays.CALLS
        event: dict[str, Any] = {"path": place[0], "line": place[1], "name": recorded.name}
        event["arguments"] = writer.describe((args, kwargs), is_argument=True, keep_all=is_early)
        self._is_in_call = True
        try:
            if is_early and self._old_folder and recorded.jit_options:
                event["replay"] = self._replay(number, recorded, (args, kwargs))
            result = recorded.fun(*args, **kwargs)
            event["results"] = writer.describe(result, keep_all=is_early)
        except BaseException as error:
            event["raised"] = f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            self._is_in_call = False
            writer.write(event)
        return result

    def _replay(self, number: int, recorded: "_Recorded", arguments: Any) -> dict[str, Any]:
        """Run a jitted step on the arguments of the old call; return the `RecordedCall.replay`."""
        old = self._old_calls[number] if number < len(self._old_calls) else None
        step, options = recorded.inner, recorded.jit_options
        try:
            epsilon, tolerances = replays.replay(recorded.fun, step, options, arguments, old)
        except replays.Difference as difference:
            text, reason = difference.args
        except Exception as error:  # noqa: BLE001 - any of the program's own
            text = f"it fails on its own: {type(error).__name__}: {error}"[:300]
            reason = "other code uses its axis" if "unbound axis name" in text else ""
        else:
            return {"text": "", "epsilon": epsilon, "tolerances": tolerances}
        recorded.__dict__["jit_options"] = None  # it will not stay a jit: replay no more
        return {"text": text, "reason": reason}

    def _open_writer(self) -> RecordWriter:
        """Return the writer of this process; the first time, read the old program's calls too."""
        import jax

        if self._writer is None or self._process != os.getpid():
            self._process, index = os.getpid(), jax.process_index()
            find_folders = lambda parent: sorted(Path(parent).glob(f"{index:05}-*"))
            # After a restart, the second process with an index belongs to the second old one.
            count = len(find_folders(self._folder))
            old_folders = find_folders(self._old_folder) if self._old_folder else []
            self._old_calls = read_calls(old_folders[count]) if count < len(old_folders) else []
            name = f"{index:05}-{time.time_ns()}-{self._process}"
            self._writer = RecordWriter(Path(self._folder, name))
        return self._writer


class _Recorded:
    """`fun`, which maps the function `inner`, with its calls recorded; it has its attributes."""

    def __init__(self, recorder: Recorder, fun: Any, inner: Any, path: str, line: int, kwargs: Any):
        self.__dict__.update(recorder=recorder, fun=fun, inner=inner, path=path, line=line)
        step = inspect.unwrap(inner)
        while isinstance(step, functools.partial):
            step = inspect.unwrap(step.func)
        self.__dict__["name"] = getattr(step, "__name__", type(step).__name__)
        self.__dict__["jit_options"] = kwargs if "in_shardings" in kwargs else None  # for replays
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["fun"], name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)
