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
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import programs

_LARGE = 32 * 2**20  # bytes; of larger arrays only digests are kept
_KEPT = 2**30  # bytes of one process, after which all arrays count as large
_ROWS = 64  # dimensions up to this size may be the device axis
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)


@dataclasses.dataclass
class _MappedPlace:
    """Where in the program a function is mapped."""

    file: str
    line: int
    instruction: int  # tells two of one line apart
    within: list[str]  # the functions of this file that were running, innermost first


@dataclasses.dataclass
class _Site:
    """Where a function is mapped, and how often what was made there has been called."""

    number: int
    kind: str  # "pmap", "mapped", "shard_map", "jit" or "host"
    calls: int = 0


@dataclasses.dataclass
class _Leaf:
    """One array of a call, copied: the program may donate or overwrite it."""

    path: str  # such as "[0].params['w']"
    dtype: str
    devices: int  # that hold it; 0 for an array of numpy
    parts: int  # into which it is cut; 1 where each device holds all of it
    values: np.ndarray  # in a dtype that numpy has


class CallRecorder:
    """What one process writes down.

    Args:
      folder: where the folders of the processes are made.
      files: the files that are being migrated.
    """

    def __init__(self, *, folder: str, files: list[str]):
        self.files: frozenset[str] = frozenset(os.path.realpath(file) for file in files)
        self._folder = _own_folder(folder)
        self._sites: dict[Any, _Site] = {}
        self._left = _KEPT
        self._lock = threading.RLock()
        self._running = threading.local()
        self._texts = programs.ProgramTexts(self._write)
        self._process = os.getpid()
        atexit.register(self._write_totals)

    def site(self, kind: str, place: _MappedPlace, function: str) -> _Site:
        """What is mapped again at one place, as in a loop, stays one site."""
        identity = kind, place.file, place.within[0], place.instruction, function
        with self._lock:
            known = self._sites.get(identity)
            if known is None:
                known = self._sites[identity] = _Site(len(self._sites), kind)
                self._write(
                    event="site",
                    site=known.number,
                    kind=kind,
                    file=place.file,
                    within=place.within,
                    line=place.line,
                    function=function,
                )
            return known

    def call(
        self,
        site: _Site,
        function: Callable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: tuple[int, ...] = (),
        static_names: tuple[str, ...] = (),
    ) -> Any:
        """Calls a function, and writes down what it is given and returns.

        Args:
          site: where it was mapped.
          function: what to call.
          args: its arguments.
          kwargs: its keywords.
          static: the positions of arguments that are constants: they need not be arrays, nor trees.
          static_names: the keywords that are constants.
        """
        number = self._number(site, (args, kwargs))
        if number is None:
            return function(*args, **kwargs)
        constants = {position % len(args) for position in static if args}
        dynamic = tuple(None if i in constants else arg for i, arg in enumerate(args))
        words = {name: arg for name, arg in kwargs.items() if name not in static_names}
        # Before the call, which may donate them.
        given = self._leaves(site, dynamic) + self._leaves(site, words)
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [programs.abstract(leaf) for leaf in leaves]
        returned: list[_Leaf] = []
        inside, raised, text = False, None, None
        running = self._running_calls()
        running.append(site)
        try:
            result = function(*args, **kwargs)
            inside = _traced(result)  # the call was part of a larger program
            if not inside:
                returned = self._leaves(site, result)
                text = self._text(site, function, leaves, tree)
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
        site = self.site("host", _MappedPlace("", 0, number, [""]), str(number))
        return self.call(site, function, (value,), {})

    def _number(self, site: _Site, arguments: Any) -> int | None:
        """Of a call that begins; None where it is not to be written down."""
        # After a fork, the folder is its parent's.
        if os.getpid() != self._process or self._texts.is_tracing:
            return None
        with self._lock:
            if _traced(arguments):
                self._found_inside(site)
                return None
            site.calls += 1
            return site.calls - 1

    def _found_inside(self, site: _Site) -> None:
        """The function is being traced, as a part of the jit that runs."""
        running = self._running_calls()
        cover = running[0].number if running else None
        if cover != site.number:
            self._write(event="inside", site=site.number, cover=cover)

    def _running_calls(self) -> list[_Site]:
        """The calls of this thread that have not returned, the outermost first."""
        if not hasattr(self._running, "sites"):
            self._running.sites = []
        return self._running.sites

    def _leaves(self, site: _Site, tree: Any) -> list[_Leaf]:
        try:
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            return [
                _leaf(jax.tree_util.keystr(path), leaf)
                for path, leaf in flat
                if isinstance(leaf, _NUMBERS) and getattr(leaf, "dtype", None) != np.dtype(object)
            ]
        except Exception as problem:  # noqa: BLE001  # a bad argument is for the program to refuse
            self._note(site, problem)
            return []

    def _text(self, site: _Site, function: Callable, leaves: list[Any], tree: Any) -> int | None:
        """The number of the text of its program."""
        try:  # on the host, a number of Python is one: numpy may take it
            numbers = site.kind != "host"
            return self._texts.number(site.number, function, leaves, tree, numbers=numbers)
        except Exception as problem:  # noqa: BLE001  # the program goes on without a text
            self._note(site, problem)
            return None

    def _write_call(
        self,
        site: _Site,
        number: int,
        given: list[_Leaf],
        returned: list[_Leaf],
        *,
        raised: str | None,
        text: int | None,
    ) -> None:
        """The arrays first: an event without them would be taken for a crash of ours."""
        name = f"{site.number}-{number}.npz"
        arrays: dict[str, np.ndarray] = {}
        try:
            with self._lock:
                described = {
                    side: [
                        self._describe(f"{side}{i}", leaf, arrays) for i, leaf in enumerate(all_)
                    ]
                    for side, all_ in (("given", given), ("returned", returned))
                }
                np.savez(os.path.join(self._folder, name), **arrays)  # pyright: ignore[reportArgumentType]
                event = {"site": site.number, "call": number, "arrays": name, **described}
                self._write(event="call", raised=raised, text=text, **event)
        except Exception as problem:  # noqa: BLE001  # the program must not fail because of us
            self._note(site, problem)

    def _note(self, site: _Site, problem: Exception) -> None:
        """Something of ours failed; the program goes on."""
        self._write(event="problem", site=site.number, problem=repr(problem))

    def _describe(self, key: str, leaf: _Leaf, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        described: dict[str, Any] = {
            "path": leaf.path,
            "dtype": leaf.dtype,
            "shape": list(leaf.values.shape),
            "devices": leaf.devices,
            "parts": leaf.parts,
        }
        if leaf.values.nbytes > min(_LARGE, self._left):
            return described | _digests(leaf.values)
        self._left -= leaf.values.nbytes
        arrays[key] = leaf.values
        return described | {"key": key}

    def _write(self, **event: Any) -> None:
        with self._lock, open(os.path.join(self._folder, "calls.jsonl"), "a") as file:
            file.write(json.dumps(event) + "\n")

    def _write_totals(self) -> None:
        if os.getpid() == self._process and os.path.isdir(self._folder):
            for site in self._sites.values():
                self._write(event="total", site=site.number, calls=site.calls)


def _leaf(path: str, leaf: Any) -> _Leaf:
    devices, parts = _placement(leaf)
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            leaf = jax.device_get(leaf)
        else:  # of several processes: what this one has
            leaf = np.stack([jax.device_get(shard.data) for shard in leaf.addressable_shards])
    return _Leaf(path, dtype, devices, parts, _plain(np.array(leaf)))


def _placement(leaf: Any) -> tuple[int, int]:
    if not isinstance(leaf, jax.Array):
        return 0, 0
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    return len(indices), len({str(index) for index in indices.values()})


def _plain(values: np.ndarray) -> np.ndarray:
    """bfloat16, float8 and int4 as a larger type: the same numbers, without their library."""
    if values.dtype.isbuiltin == 1:
        return values
    is_integer = "int" in str(values.dtype)
    return values.astype(np.int8 if is_integer else np.float32)


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree_util.tree_leaves(tree))


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

_LIBRARIES = ("jax", "jaxlib", "jax_dist")  # what these map inside is not the user's call
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_DEPTH = 8  # frames that name where a function was mapped


def hooked(module: str, name: str, real: Callable, recorder: CallRecorder) -> Callable:
    """`real`, whose results are recorded; the same in all else.

    Args:
      module: where it will be found, also by pickle.
      name: "pmap", "mapped" (of a helper in migrated code), "shard_map" or "jit".
      real: what it is without us.
      recorder: writes the calls.
    """

    @functools.wraps(real)
    def make(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        given = bool(args) and callable(args[0])
        is_library = frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
        if is_library or type(frame.f_locals.get("self")).__name__ == "_Program":
            return real(*args, **kwargs)  # a part of what is recorded
        if not given and callable(kwargs.get("fun")):  # pmap takes it by name too
            args, kwargs = (kwargs["fun"], *args), {k: v for k, v in kwargs.items() if k != "fun"}
        elif not given and not args:  # a decorator with options
            return functools.partial(make, **kwargs)
        elif not given:  # a mistake; let it say so
            return real(*args, **kwargs)
        return _stand_in(name, real, recorder, frame, args, kwargs)

    make.__module__ = module
    make._is_recorded = True  # pyright: ignore[reportAttributeAccessIssue]
    return make


def _stand_in(
    name: str,
    real: Callable,
    recorder: CallRecorder,
    frame: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """A jit of a mapped function is that mapped function; any other is a witness of its own."""
    fun, *rest = args
    file, is_jit = os.path.realpath(frame.f_code.co_filename), name == "jit"
    inner = _mapped_within(fun) if is_jit else None
    if inner is not None:
        site = inner._recorded_site
    elif not is_jit or file in recorder.files or not file.startswith(_INSTALLED):
        site = recorder.site(name, _place(frame), _name_of(fun))
    else:
        return real(*args, **kwargs)
    static = _positions(kwargs.get("static_argnums" if is_jit else "static_broadcasted_argnums"))
    if inner is not None and inner is fun and not static:
        static = inner._recorded_static
    names = (kwargs.get("static_argnames") if is_jit else None) or ()
    names = (names,) if isinstance(names, str) else tuple(names)
    return _Recorded(real(_bare(fun), *rest, **kwargs), site, recorder, static, names)


class _Recorded:
    """A mapped or jitted function that has its first calls written down."""

    def __init__(
        self,
        function: Callable,
        site: _Site,
        recorder: CallRecorder,
        static: tuple[int, ...],
        static_names: tuple[str, ...],
    ):
        self._recorded_function = function
        self._recorded_site = site
        self._recorded_by = recorder
        self._recorded_static = static
        self._recorded_static_names = static_names
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorded_by.call(
            self._recorded_site,
            self._recorded_function,
            args,
            kwargs,
            self._recorded_static,
            self._recorded_static_names,
        )

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


def _bare(fun: Any) -> Any:
    return fun._recorded_function if isinstance(fun, _Recorded) else fun


def _mapped_within(fun: Any) -> _Recorded | None:
    while isinstance(fun, functools.partial):
        fun = fun.func
    is_mapped = isinstance(fun, _Recorded) and fun._recorded_site.kind != "jit"
    return fun if is_mapped else None


def _positions(numbers: int | Iterable[int] | None) -> tuple[int, ...]:
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


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


def _place(frame: Any) -> _MappedPlace:
    file, line, instruction = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
    within: list[str] = []
    while frame is not None and frame.f_code.co_filename == file and len(within) < _DEPTH:
        code = frame.f_code
        within.append(getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    return _MappedPlace(os.path.realpath(file), line, instruction, within)
