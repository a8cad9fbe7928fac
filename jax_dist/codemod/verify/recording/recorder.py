"""Writes down the calls of mapped functions, one folder a process, as they happen.

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
class MappedPlace:
    """Where in the program a function is mapped."""

    file: str
    line: int
    instruction: int  # tells two of one line apart
    within: list[str]  # the functions of this file that were running, innermost first


@dataclasses.dataclass
class RecordedSite:
    """Where a function is mapped, and how often what was made there has been called."""

    number: int
    kind: str  # "pmap", "mapped", "shard_map", "jit" or "host"
    calls: int = 0


class CallRecorder:
    """What one process writes down.

    Args:
      folder: where the folders of the processes are made.
      files: the files that are being migrated.
    """

    def __init__(self, *, folder: str, files: list[str]):
        self.files: frozenset[str] = frozenset(os.path.realpath(file) for file in files)
        self._folder = _own_folder(folder)
        self._sites: dict[Any, RecordedSite] = {}
        self._left = _KEPT
        self._lock = threading.RLock()
        self._running = threading.local()
        self.texts = programs.ProgramTexts(self._write)
        self._process = os.getpid()
        atexit.register(self._write_totals)

    def site(self, kind: str, place: MappedPlace, function: str) -> RecordedSite:
        """What is mapped again at one place, as in a loop, stays one site."""
        identity = kind, place.file, place.within[0], place.instruction, function
        with self._lock:
            known = self._sites.get(identity)
            if known is None:
                known = self._sites[identity] = RecordedSite(len(self._sites), kind)
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

    def open(self, site: RecordedSite, arguments: Any) -> RecordedCall | None:
        """The record of a call that begins; None where it is not to be written down."""
        if (
            os.getpid() != self._process or self.texts.is_tracing
        ):  # a fork: the folder is its parent's
            return None
        with self._lock:
            number = site.calls
            if _traced(arguments):
                self.found_inside(site)
                return None
            site.calls += 1
        return RecordedCall(self, site, number)

    def host(self, number: int, function: Callable, value: Any) -> Any:
        """The value of a host edit, written down as a call of its own."""
        site = self.site("host", MappedPlace("", 0, number, [""]), str(number))
        call = self.open(site, (value,))
        if call is None:
            return function(value)
        call.given((value,), {})
        leaves, tree = call.types((value,), {})
        with call:
            result = function(value)
            call.returned(result)
            call.traced(function, leaves, tree)
        return result

    def found_inside(self, site: RecordedSite) -> None:
        """The function is being traced, as a part of the jit that runs."""
        running = self.running()
        cover = running[0].number if running else None
        if cover != site.number:
            self._write(event="inside", site=site.number, cover=cover)

    def running(self) -> list[RecordedSite]:
        """The calls of this thread that have not returned, the outermost first."""
        if not hasattr(self._running, "sites"):
            self._running.sites = []
        return self._running.sites

    def write_call(self, call: RecordedCall) -> None:
        """The arrays first: an event without them would be taken for a crash of ours."""
        name = f"{call.site.number}-{call.number}.npz"
        arrays: dict[str, np.ndarray] = {}
        with self._lock:
            described = {
                side: [self._describe(f"{side}{i}", leaf, arrays) for i, leaf in enumerate(leaves)]
                for side, leaves in (("given", call.inputs), ("returned", call.outputs))
            }
            np.savez(os.path.join(self._folder, name), **arrays)  # pyright: ignore[reportArgumentType]
            self._write(
                event="call",
                site=call.site.number,
                call=call.number,
                arrays=name,
                raised=call.raised,
                text=call.text,
                **described,
            )

    def note(self, site: RecordedSite, problem: str) -> None:
        """Something of ours failed; the program goes on."""
        self._write(event="problem", site=site.number, problem=problem)

    def _describe(
        self, key: str, leaf: RecordedLeaf, arrays: dict[str, np.ndarray]
    ) -> dict[str, Any]:
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


@dataclasses.dataclass
class RecordedLeaf:
    """One array of a call, copied: the program may donate or overwrite it."""

    path: str  # such as "[0].params['w']"
    dtype: str
    devices: int  # that hold it; 0 for an array of numpy
    parts: int  # into which it is cut; 1 where each device holds all of it
    values: np.ndarray  # in a dtype that numpy has


class RecordedCall:
    """One call, from before it to after it."""

    def __init__(self, recorder: CallRecorder, site: RecordedSite, number: int):
        self.site = site
        self.number = number
        self.inputs: list[RecordedLeaf] = []
        self.outputs: list[RecordedLeaf] = []
        self.raised: str | None = None
        self.text: int | None = None  # the number of that of its program
        self._recorder = recorder
        self._inside = False

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies the arguments, before they may be donated."""
        self.inputs = self._leaves(args) + self._leaves(kwargs)

    def traced(self, function: Callable, leaves: list[Any], tree: Any) -> None:
        """Writes down its program; takes the types of what it was called with."""
        if not self._inside:
            texts, site = self._recorder.texts, self.site
            try:  # on the host, a number of Python is one: numpy may take it
                numbers = site.kind != "host"
                self.text = texts.number(site.number, function, leaves, tree, numbers=numbers)
            except Exception as problem:  # noqa: BLE001  # the program goes on without a text
                self._recorder.note(self.site, repr(problem))

    @staticmethod
    def types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """The leaves of the arguments, with types in place of arrays, and their structure."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        return [programs.abstract(leaf) for leaf in leaves], tree

    def returned(self, result: Any) -> None:
        """Copies the results; a traced one means that the call was part of a larger program."""
        if _traced(result):
            self._inside = True
        else:
            self.outputs = self._leaves(result)

    def __enter__(self) -> RecordedCall:
        self._recorder.running().append(self.site)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._recorder.running().pop()
        if self._inside:
            self._recorder.found_inside(self.site)
            return
        self.raised = None if kind is None else kind.__name__
        try:
            self._recorder.write_call(self)
        except Exception as problem:  # noqa: BLE001  # the program must not fail because of us
            self._recorder.note(self.site, repr(problem))

    def _leaves(self, tree: Any) -> list[RecordedLeaf]:
        try:
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            return [
                _leaf(jax.tree_util.keystr(path), leaf)
                for path, leaf in flat
                if isinstance(leaf, _NUMBERS) and getattr(leaf, "dtype", None) != np.dtype(object)
            ]
        except Exception as problem:  # noqa: BLE001  # a bad argument is for the program to refuse
            self._recorder.note(self.site, repr(problem))
            return []


def _leaf(path: str, leaf: Any) -> RecordedLeaf:
    devices, parts = _placement(leaf)
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            leaf = jax.device_get(leaf)
        else:  # of several processes: what this one has
            leaf = np.stack([jax.device_get(shard.data) for shard in leaf.addressable_shards])
    return RecordedLeaf(path, dtype, devices, parts, _plain(np.array(leaf)))


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
    wrap = _jitted if name == "jit" else _mapped

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
        return wrap(name, real, recorder, frame, args, kwargs)

    make.__module__ = module
    make._is_recorded = True  # pyright: ignore[reportAttributeAccessIssue]
    return make


def _mapped(
    name: str,
    real: Callable,
    recorder: CallRecorder,
    frame: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Recorded:
    site = recorder.site(name, _place(frame), _name_of(args[0]))
    static = _positions(kwargs.get("static_broadcasted_argnums"))
    return Recorded(real(_bare(args[0]), *args[1:], **kwargs), site, recorder, static)


def _jitted(
    name: str,
    real: Callable,
    recorder: CallRecorder,
    frame: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """A jit of a mapped function is that mapped function; any other is a witness of its own."""
    fun, *rest = args
    inner = _mapped_within(fun)
    if inner is not None:
        site = inner._recorded_site
    elif _is_users(frame.f_code.co_filename, recorder):
        site = recorder.site(name, _place(frame), _name_of(fun))
    else:
        return real(*args, **kwargs)
    static = _positions(kwargs.get("static_argnums"))
    if inner is not None and inner is fun and not static:
        static = inner._recorded_static
    names = kwargs.get("static_argnames") or ()
    names = (names,) if isinstance(names, str) else tuple(names)
    return Recorded(real(_bare(fun), *rest, **kwargs), site, recorder, static, names)


class Recorded:
    """A mapped or jitted function that has its first calls written down."""

    def __init__(
        self,
        function: Callable,
        site: RecordedSite,
        recorder: CallRecorder,
        static: tuple[int, ...],
        static_names: tuple[str, ...] = (),
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
        call = self._recorded_by.open(self._recorded_site, (args, kwargs))
        if call is None:
            return self._recorded_function(*args, **kwargs)
        call.given(*self._recorded_arguments(args, kwargs))
        leaves, tree = call.types(args, kwargs)
        with call:
            result = self._recorded_function(*args, **kwargs)
            call.returned(result)
            call.traced(self._recorded_function, leaves, tree)
        return result

    def _recorded_arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Without those that are constants: they need not be arrays, nor trees."""
        static = {position % len(args) for position in self._recorded_static if args}
        dynamic = tuple(None if i in static else arg for i, arg in enumerate(args))
        names = self._recorded_static_names
        return dynamic, {name: arg for name, arg in kwargs.items() if name not in names}

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
    return fun._recorded_function if isinstance(fun, Recorded) else fun


def _mapped_within(fun: Any) -> Recorded | None:
    while isinstance(fun, functools.partial):
        fun = fun.func
    is_mapped = isinstance(fun, Recorded) and fun._recorded_site.kind != "jit"
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


def _place(frame: Any) -> MappedPlace:
    file, line, instruction = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
    within: list[str] = []
    while frame is not None and frame.f_code.co_filename == file and len(within) < _DEPTH:
        code = frame.f_code
        within.append(getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    return MappedPlace(os.path.realpath(file), line, instruction, within)


def _is_users(file: str, recorder: CallRecorder) -> bool:
    file = os.path.realpath(file)
    return file in recorder.files or not file.startswith(_INSTALLED)
