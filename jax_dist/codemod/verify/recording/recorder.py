"""Stands in for what maps functions and for `jax.jit`, and writes down their calls.

Each process has a folder of its own, and writes as the calls happen:

`calls.jsonl` holds one event a line, and each call's arrays lie beside it as `.npz`. Everything is
on disk when the call returns, for the program may end in any way.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from . import programs
from .flow import Flow
from .programs import is_traced

_LARGE = 32 * 2**20  # bytes; of larger arrays only digests are kept
_KEPT = 2**30  # bytes of one process, after which all arrays count as large
_ROWS = 64  # dimensions up to this size may be the device axis
_LIBRARIES = ("jax", "jaxlib", "jax_dist")  # what these map inside is not the user's call
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_UNKNOWN = "unknown"  # begins the type of what cannot be compared
_DEPTH = 8  # frames that name where a function was mapped
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)


@dataclasses.dataclass
class _Site:
    """Where a function is mapped, and how often what was made there has been called."""

    number: int
    kind: str  # "pmap", "mapped", "shard_map", "jit" or "host"
    calls: int = 0


# One array of a call: what is said of it, and a copy of its values, for the program may donate or
# overwrite it, in a dtype that numpy has.
_Leaf: TypeAlias = tuple[dict[str, Any], np.ndarray]


class _Thread(threading.local):
    def __init__(self):
        self.running: list[_Site] = []  # calls that have not returned, the outermost first


class CallRecorder:
    """What one process writes down.

    Args:
      folder: where the folders of the processes are made.
      files: the files that are being migrated.
      flow: where arrays come from and go to, if that is asked for.
    """

    def __init__(self, *, folder: str, files: list[str], flow: Flow | None = None):
        self._files: frozenset[str] = frozenset(os.path.realpath(file) for file in files)
        self._folder = _own_folder(folder)
        self._sites: dict[Any, _Site] = {}
        self._left = _KEPT
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._texts = programs.ProgramTexts(self._write)
        self._process = os.getpid()
        self._flow = flow
        atexit.register(self._write_totals)

    def hooked(self, module: str, name: str, real: Callable) -> Callable:
        """`real`, whose results are recorded; the same in all else.

        Args:
          module: where it will be found, also by pickle.
          name: "pmap", "mapped" (of a helper in migrated code), "shard_map" or "jit".
          real: what it is without us.
        """

        @functools.wraps(real)
        def make(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            given = bool(args) and callable(args[0])
            is_library = frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
            if is_library or type(frame.f_locals.get("self")).__name__ == "_Program":
                return real(*args, **kwargs)  # a part of what is recorded
            if not given and callable(kwargs.get("fun")):  # pmap takes it by name too
                args = kwargs.pop("fun"), *args
            elif not given and not args:  # a decorator with options
                return functools.partial(make, **kwargs)
            elif not given:  # a mistake; let it say so
                return real(*args, **kwargs)
            fun, *rest = args
            site = recorded = None
            if name == "jit":  # of a mapped function, it is that mapped function
                inner = fun
                while isinstance(inner, functools.partial):
                    inner = inner.func
                if isinstance(inner, _Recorded) and inner._recorded_site.kind != "jit":
                    recorded, site = inner, inner._recorded_site
            if site is None:  # any other is a witness of its own
                file = os.path.realpath(frame.f_code.co_filename)
                if name == "jit" and file not in self._files and file.startswith(_INSTALLED):
                    return real(*args, **kwargs)
                site = self._site(name, _name_of(fun), **_place(frame))
            prefix = "static_" if name == "jit" else "static_broadcasted_"
            static = _several(kwargs.get(f"{prefix}argnums"), int)
            if recorded is fun and not static:
                static = fun._recorded_static
            names = _several(kwargs.get("static_argnames") if name == "jit" else None, str)
            if self._flow is not None:
                self._flow.mapped(site.number, fun)
            bare = fun._recorded_function if isinstance(fun, _Recorded) else fun
            function = real(bare, *rest, **kwargs)
            call = functools.partial(self._call, site, function, static, names)
            return _Recorded(function, site, static, call)

        make.__module__ = module
        make._is_recorded = True  # pyright: ignore[reportAttributeAccessIssue]
        return make

    def _site(
        self,
        kind: str,
        function: str,
        *,
        file: str = "",
        line: int = 0,
        instruction: int = 0,
        within: Sequence[str] = ("",),
    ) -> _Site:
        """What is mapped again at one place, as in a loop, stays one site.

        Args:
          kind, function: as `_Site` has it, and the name.
          file, line, instruction: where it is mapped; the last tells two of one line apart.
          within: the functions of the file that were running, innermost first.
        """
        identity = kind, file, within[0], instruction, function
        with self._lock:
            site = self._sites.get(identity)
            if site is None:
                site = self._sites[identity] = _Site(len(self._sites), kind)
                place = {"file": file, "within": within, "line": line, "function": function}
                self._write(event="site", site=site.number, kind=kind, **place)
            return site

    def _call(
        self,
        site: _Site,
        function: Callable,
        static: tuple[int, ...],
        static_names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a function, and writes down what it is given and returns.

        Args:
          site: where it was mapped.
          function: what to call.
          static, static_names: which arguments are constants: they need not be arrays, nor trees.
          args, kwargs: all of them.
        """
        number = self._number(site, (args, kwargs))
        if number is None:
            return function(*args, **kwargs)
        constants = {position % len(args) for position in static if args}
        dynamic = tuple(None if i in constants else arg for i, arg in enumerate(args))
        words = {name: arg for name, arg in kwargs.items() if name not in static_names}
        # Before the call, which may donate them.
        given = self._leaves(site, dynamic) + self._leaves(site, words)
        flow = self._flow if site.kind == "pmap" else None
        if flow is not None:
            flow.given(site.number, args, words, tuple(constants))
        arguments = programs.Arguments(args, kwargs)
        returned: list[_Leaf] = []
        inside, raised, text = False, None, None
        running = self._thread.running
        running.append(site)
        try:
            result = function(*args, **kwargs)
            inside = is_traced(result)  # the call was part of a larger program
            if not inside:
                returned = self._leaves(site, result)
                if flow is not None:
                    flow.returned(site.number, result)
                text = self._text(site, function, arguments)
            return result
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            running.pop()
            if inside:
                self._found_inside(site)
            else:
                self._write_call(site, number, given, returned, raised=raised, text=text)

    def host(self, number: int, function: Callable, value: Any) -> Any:
        """The value of a host edit, written down as a call of its own."""
        site = self._site("host", str(number))
        return self._call(site, function, (), (), (value,), {})

    def _number(self, site: _Site, arguments: Any) -> int | None:
        """Of a call that begins; None where it is not to be written down."""
        # After a fork, the folder is its parent's.
        if os.getpid() != self._process or self._texts.is_tracing:
            return None
        with self._lock:
            if is_traced(arguments):
                self._found_inside(site)
                return None
            site.calls += 1
            return site.calls - 1

    def _found_inside(self, site: _Site) -> None:
        """The function is being traced, as a part of the jit that runs."""
        running = self._thread.running
        cover = running[0].number if running else None
        if cover != site.number:
            self._write(event="inside", site=site.number, cover=cover)

    def _leaves(self, site: _Site, tree: Any) -> list[_Leaf]:
        try:
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            is_host = site.kind == "host"  # it may give anything
            return [
                (_leaf if is_number else _other_leaf)(jax.tree_util.keystr(path), leaf)
                for path, leaf in flat
                for is_number in [isinstance(leaf, _NUMBERS) and _dtype(leaf) != np.dtype(object)]
                if is_number or is_host
            ]
        except Exception as problem:  # noqa: BLE001  # a bad argument is for the program to refuse
            self._note(site, problem)
            return []

    def _text(self, site: _Site, function: Callable, arguments: programs.Arguments) -> int | None:
        """The number of the text of its program."""
        try:  # on the host, a number of Python is one: numpy may take it
            numbers = site.kind != "host"
            return self._texts.number(site.number, function, arguments, numbers=numbers)
        except Exception as problem:  # noqa: BLE001  # the program goes on without a text
            self._note(site, problem)
            return None

    def _write_call(
        self,
        site: _Site,
        number: int,
        given: list[_Leaf],
        returned: list[_Leaf],
        **more: Any,
    ) -> None:
        """The arrays first: an event without them would be taken for a crash of ours."""
        name = f"{site.number}-{number}.npz"
        arrays: dict[str, np.ndarray] = {}
        try:
            with self._lock:
                for side, leaves in (("given", given), ("returned", returned)):
                    more[side] = []
                    for i, (described, values) in enumerate(leaves):
                        if values.nbytes > min(_LARGE, self._left):
                            more[side].append(described | _digests(values))
                            continue
                        self._left -= values.nbytes
                        arrays[f"{side}{i}"] = values
                        more[side].append(described | {"key": f"{side}{i}"})
                np.savez(os.path.join(self._folder, name), **arrays)  # pyright: ignore[reportArgumentType]
                self._write(event="call", site=site.number, call=number, arrays=name, **more)
        except Exception as problem:  # noqa: BLE001  # the program must not fail because of us
            self._note(site, problem)

    def _note(self, site: _Site, problem: Exception) -> None:
        """Something of ours failed; the program goes on."""
        problem_text = f"{type(problem).__name__}: {programs.text_of(problem)}"
        self._write(
            event="problem",
            site=site.number,
            problem=problem_text,
        )

    def _write(self, **event: Any) -> None:
        with self._lock, open(os.path.join(self._folder, "calls.jsonl"), "a") as file:
            file.write(json.dumps(event) + "\n")

    def _write_totals(self) -> None:
        if os.getpid() == self._process and os.path.isdir(self._folder):
            for site in self._sites.values():
                self._write(event="total", site=site.number, calls=site.calls)
            if self._flow is not None:
                self._flow.write(self._folder)


def _leaf(path: str, leaf: Any) -> _Leaf:
    devices = parts = 0  # that hold it, and into which it is cut; 0 for an array of numpy
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
    if isinstance(leaf, jax.Array):
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        devices, parts = len(indices), len({str(index) for index in indices.values()})
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            leaf = jax.device_get(leaf)
        else:  # of several processes: what this one has
            leaf = np.stack([jax.device_get(shard.data) for shard in leaf.addressable_shards])
    values = np.array(leaf)
    if values.dtype.isbuiltin != 1:
        # bfloat16, float8 and int4 as a larger type: the same numbers, without their library.
        values = values.astype(np.int8 if "int" in str(values.dtype) else np.float32)
    shape = list(values.shape)
    described = {"path": path, "dtype": dtype, "shape": shape, "devices": devices, "parts": parts}
    return described, values


def _other_leaf(path: str, leaf: Any) -> _Leaf:
    """What is no number: its text, where that says all of it."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    text = ""
    if type(leaf) in (str, bytes) or (not callable(leaf) and kind.startswith(("jax.", "jaxlib."))):
        text = repr(leaf)
    values = np.frombuffer(text.encode(), np.uint8)
    dtype = kind if text else f"{_UNKNOWN} {kind}"
    described = {"path": path, "dtype": dtype, "shape": [values.size], "devices": 0, "parts": 0}
    return described, values


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)


def _digests(values: np.ndarray) -> dict[str, Any]:
    """Enough to tell whether two large arrays are equal, also after a device axis went away."""
    rows = values if values.ndim and values.shape[0] <= _ROWS else ()
    return {
        "digest": _digest(values),
        "rows": [_digest(row) for row in rows],
        "mean": None if values.dtype.kind == "c" else float(np.mean(values, dtype=np.float64)),
    }


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _own_folder(folder: str) -> str:
    """The next free number; making a folder either succeeds or finds it taken."""
    number = 0
    while True:
        own = os.path.join(folder, f"process-{number}")
        try:
            os.mkdir(own)
            return own
        except FileExistsError:
            number += 1


# --- what stands in for the functions that map, and for `jax.jit`


class _Recorded:
    """A mapped or jitted function that has its first calls written down."""

    def __init__(
        self,
        function: Callable,
        site: _Site,
        static: tuple[int, ...],
        call: Callable[[tuple, dict[str, Any]], Any],
    ):
        self._recorded_function, self._recorded_call = function, call
        self._recorded_site, self._recorded_static = site, static
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorded_call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_recorded"):  # copied or unpickled before __init__
            raise AttributeError(name)
        return getattr(self._recorded_function, name)

    def __repr__(self) -> str:
        return repr(self._recorded_function)

    # Spelled out, for `isinstance(f, jax.stages.Wrapped)` asks the class.
    @property
    def lower(self) -> Any:
        return self._recorded_function.lower  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def trace(self) -> Any:
        return self._recorded_function.trace  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def eval_shape(self) -> Any:
        return self._recorded_function.eval_shape  # pyright: ignore[reportFunctionMemberAccess]


def _several(given: Any, one: type) -> tuple[Any, ...]:
    """What may be given as one, as several or not at all."""
    return () if given is None else (given,) if isinstance(given, one) else tuple(given)


def _name_of(fun: Any) -> str:
    """Of the function that the user wrote, under partial objects and wrappers."""
    for _ in range(_DEPTH):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif inspect.ismethod(fun):
            fun = fun.__func__
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            break
    return getattr(fun, "__qualname__", type(fun).__qualname__)


def _place(frame: Any) -> dict[str, Any]:
    """Where the function is mapped that a frame maps, as `CallRecorder._site` takes it."""
    file, line, instruction = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
    within: list[str] = []
    while frame is not None and frame.f_code.co_filename == file and len(within) < _DEPTH:
        code = frame.f_code
        within.append(getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    file = os.path.realpath(file)
    return {"file": file, "line": line, "instruction": instruction, "within": within}
