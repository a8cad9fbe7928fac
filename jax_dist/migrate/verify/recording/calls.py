"""Records each call of each mapped function: its arguments and results, as digests and values.

One folder for each process; one line for each call, and one .npz beside it with the values of
arrays that are not too large.
"""

import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from . import replays

_MOST = 1 << 20  # bytes of an array whose values are kept; of larger ones only digests are
_PUT_NAMES = ("_mapped", "_mapped_devices", "_mapped_over_devices")


def install(
    at_import: Callable[[str, Callable[[ModuleType], None]], None],
    folder: str,
    tree: str,
    written: Mapping[str, Sequence[Sequence[int]]],
    replayed: str,
) -> None:
    """Record the functions that jax.pmap, jax_dist.pmap, `mapped` and written jits make."""
    recorder = _Recorder(folder, tree, written, replayed)
    at_import("jax", lambda jax: recorder.replace(jax, "pmap"))
    at_import("jax", recorder.replace_jit)
    at_import("jax_dist", lambda jax_dist: recorder.replace(jax_dist, "pmap"))
    for name in _PUT_NAMES:
        at_import(name, lambda module: recorder.replace(module, "mapped"))


class _Recorder:
    def __init__(
        self,
        folder: str,
        tree: str,
        written: Mapping[str, Sequence[Sequence[int]]],
        replayed: str,
    ):
        self._folder, self._tree, self._written = folder, os.path.realpath(tree), written
        self._replayed = replayed
        self._old: replays.Records | None = None
        self._calls: dict[tuple[str, int], int] = {}  # by place
        self._file: Any = None
        self._process = 0
        self._count = 0
        self._is_inside = False  # a mapped call of a mapped call is not the program's

    def replace(self, module: Any, name: str) -> None:
        """Replace a mapping function by one that makes recorded functions."""
        make = getattr(module, name, None)
        if make is None:
            return

        @functools.wraps(make)
        def mapping(fun: Any, *args: Any, **kwargs: Any) -> Any:
            result = make(fun, *args, **kwargs)
            place = None if self._is_inside else self._place()
            return result if place is None else _Recorded(self, result, fun, *place)

        setattr(module, name, mapping)

    def replace_jit(self, jax: Any) -> None:
        """Record the jits at lines that a migration wrote."""
        plain = jax.jit

        @functools.wraps(plain)
        def jit(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            place = self._place()
            if place is None or not args or not self._is_written(*place):
                return result
            recorded = _Recorded(self, result, args[0], *place)
            if "in_shardings" in kwargs:
                recorded.__dict__["step"] = args[0], kwargs
            return recorded

        if self._written:
            jax.jit = jit

    def _is_written(self, path: str, line: int) -> bool:
        return any(start <= line <= end for start, end in self._written.get(path, ()))

    def _place(self) -> tuple[str, int] | None:
        """Return the file of the tree, and the line, that asks for a mapped function."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            path = os.path.realpath(frame.f_code.co_filename)
            if path.startswith(self._tree + os.sep) and os.path.basename(path) not in _FILES:
                return os.path.relpath(path, self._tree), frame.f_lineno
            frame = frame.f_back
        return None

    def call(self, recorded: "_Recorded", args: Any, kwargs: Any) -> Any:
        """Call a mapped function and write down what it takes and gives."""
        import jax
        import jax.core

        leaves = jax.tree.leaves((args, kwargs))
        if self._is_inside or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return recorded.fun(*args, **kwargs)
        number, self._count = self._count, self._count + 1
        event: dict[str, Any] = {"path": recorded.path, "line": recorded.line, "call": number}
        event["name"] = recorded.name
        values: dict[str, Any] = {}
        place = recorded.path, recorded.line
        self._calls[place] = self._calls.get(place, 0) + 1
        most = math.inf if self._calls[place] <= replays.CALLS else _MOST
        event["given"] = _described((args, kwargs), "in", values, most)
        self._is_inside = True
        try:
            if "step" in recorded.__dict__ and self._calls[place] <= replays.CALLS:
                step, options = recorded.__dict__["step"]
                self._replay(event, step, options, (args, kwargs))
            result = recorded.fun(*args, **kwargs)
        except BaseException as error:
            event["raised"] = f"{type(error).__name__}: {error}"[:500]
            self._write(event, {})
            raise
        finally:
            self._is_inside = False
        event["returned"] = _described(result, "out", values, most)
        self._write(event, values)
        return result

    def _replay(self, event: dict[str, Any], step: Any, options: Any, arguments: Any) -> None:
        """Note in the event how the step differs from the old program's call, if it does."""
        if not self._replayed:
            return
        self._open()
        assert self._old is not None
        old = self._old.call(event["call"])
        event["replay"] = {"text": "pmap was not called at the same time", "reason": ""}
        if old is None:
            return
        try:
            replays.replay(step, options, arguments, *old)
            event["replay"] = {"text": "", "reason": ""}
        except replays.Difference as difference:
            event["replay"] = {"text": difference.text, "reason": difference.reason}
        except Exception as error:  # noqa: BLE001 - any of the program's own
            text = f"it fails on its own: {type(error).__name__}: {error}"
            event["replay"] = {"text": text[:300], "reason": ""}

    def _open(self) -> None:
        """Open the records of this process."""
        import jax

        if self._file is not None and self._process == os.getpid():
            return
        self._process, index = os.getpid(), jax.process_index()
        if self._replayed:
            names = os.listdir(self._folder)
            rank = sum(name.startswith(f"{index:05}-") for name in names)
            self._old = replays.Records(self._replayed, index, rank)
        name = f"{index:05}-{time.time_ns()}-{os.getpid()}"
        self._folder_of_process = os.path.join(self._folder, name)
        os.makedirs(self._folder_of_process)
        path = os.path.join(self._folder_of_process, "calls.jsonl")
        self._file = open(path, "a")  # noqa: SIM115 - as long as the process lives

    def _write(self, event: dict[str, Any], values: dict[str, Any]) -> None:
        import numpy as np

        self._open()
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        if values:
            np.savez(os.path.join(self._folder_of_process, f"{event['call']}.npz"), **values)


_FILES = tuple(f"{name}.py" for name in _PUT_NAMES)


class _Recorded:
    """A mapped function whose calls are recorded; all else is that function's own."""

    def __init__(self, recorder: _Recorder, fun: Any, inner: Any, path: str, line: int):
        self.__dict__.update(recorder=recorder, fun=fun, path=path, line=line)
        self.__dict__["name"] = getattr(inner, "__name__", type(inner).__name__)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["fun"], name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _described(tree: Any, side: str, values: dict[str, Any], most: float) -> list[dict[str, Any]]:
    """Describe each leaf; the values of arrays of at most so many bytes go into `values`."""
    import jax

    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        about: dict[str, Any] = {"path": jax.tree_util.keystr(path)}
        about |= _array(leaf, side, f"{side}{len(leaves)}", values, most)
        leaves.append(about)
    return leaves


def _array(leaf: Any, side: str, key: str, values: dict[str, Any], most: float) -> dict[str, Any]:
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex | bool):
        return {"dtype": type(leaf).__name__, "text": _plain_repr(leaf)}
    about: dict[str, Any] = {"dtype": str(getattr(leaf, "dtype", type(leaf).__name__))}
    copies: list[Any] = []
    if isinstance(leaf, jax.Array):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        if leaf.is_fully_replicated:
            copies = [np.asarray(shard.data) for shard in shards]
            array = copies[0]
        elif leaf.is_fully_addressable:
            array = np.asarray(leaf)
        else:
            array = np.concatenate([np.asarray(shard.data) for shard in shards])
    else:
        array = np.asarray(leaf)
    if side == "in" and not array.dtype.hasobject:  # as jit takes it
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        about["dtype"] = str(array.dtype)
    about["shape"] = list(array.shape)
    about["digest"] = _digest(array)
    if array.ndim and array.shape[0] <= 64:
        about["rows"] = [_digest(row) for row in array]
    if len(copies) > 1:
        about["copies"] = [_digest(copy) for copy in copies]
    if array.nbytes <= most:
        values[key] = array.astype(np.float32) if array.dtype.kind == "V" else array
        about["key"] = key
    return about


def _digest(array: Any) -> str:
    import numpy as np

    if not array.nbytes:
        return "empty"
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def _plain_repr(leaf: Any) -> str:
    text = repr(leaf)[:200]
    return type(leaf).__name__ if " at 0x" in text else text
