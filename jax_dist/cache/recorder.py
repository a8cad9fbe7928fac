"""Writes down each program that JAX compiles: its key, what is in it, and what became of it."""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_dist import _compat
from jax_dist.cache.records import CONSTANT, HIT, WRITTEN, Compile, Operation

_HIT = "/jax/compilation_cache/cache_hits"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"

_until_the_end = contextlib.ExitStack()  # of the process


class _Heard(threading.local):
    events: list[str] | None = None  # what JAX reports about this thread's compilation


class _PrivateCache:
    """Settings of JAX that are ours while anything is compiled, and else the program's.

    Through jax 0.10.2 the directory is part of the key, and one that varies is a cause to be told.
    """

    def __init__(self, directory: str) -> None:
        self._ours: dict[str, object] = {
            "jax_compilation_cache_dir": directory,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,  # 0 lets JAX choose
        }
        self._own: dict[str, object] = {}
        self._lock = threading.Lock()
        self._inside = 0  # threads

    @contextlib.contextmanager
    def used(self) -> Iterator[str]:
        """Gives the directory that the program has set."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._own = {name: _compat.config_value(name) for name in self._ours}
                _set_all(self._ours)  # JAX opens the cache within the first compilation, for good
        try:
            yield str(self._own["jax_compilation_cache_dir"] or "")
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    _set_all(self._own)


def _set_all(values: dict[str, object]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)


def start(folder: str, cache: str) -> None:
    """Records all that this process compiles from now on.

    `folder` gets a file for each program as it is compiled, so that nothing is lost in a crash and
    several processes can share it. `cache` is the directory of the persistent cache, whatever the
    program says.
    """
    private, heard, begun, numbers = _PrivateCache(cache), _Heard(), time.time_ns(), count()

    def hear(event: str, **_: object) -> None:
        if heard.events is not None:
            heard.events.append(event)

    @contextlib.contextmanager
    def watch(request: _compat.CompileRequest) -> Iterator[None]:
        compiled = described(request)
        heard.events = events = []
        try:
            with private.used() as directory:
                yield
        finally:
            heard.events = None
        fate = _fate(request, events, Path(cache, f"{compiled.key}-cache"))
        compiled = dataclasses.replace(compiled, fate=fate, directory=directory)
        # Names sort by start, then by process, then in order.
        name = f"{begun:020}-{os.getpid()}-{next(numbers):06}.json"
        with contextlib.suppress(OSError):  # a full disk must not end the program
            compiled.save(Path(folder, name))

    jax.monitoring.register_event_listener(hear)
    _until_the_end.enter_context(_compat.compiles_watched(watch))


def _fate(request: _compat.CompileRequest, events: list[str], entry: Path) -> str:
    """What became of a program in the private cache."""
    if _HIT in events:
        return HIT
    if _ASKED not in events:
        return "cache-off"
    if entry.exists():
        return WRITTEN
    if jax.process_index() != 0:
        return "rank"
    if request.host_callbacks and _compat.refuses_host_callbacks():
        return "host-callback"
    return "write-failed"


def described(request: _compat.CompileRequest) -> Compile:
    """A program that JAX is about to look up, with what can make its key differ."""
    try:
        operations = operations_of(request.module)
    except Exception:  # noqa: BLE001  # of MLIR's bindings, whatever it is: the program goes on
        operations = ()  # its key is still known; where it differs from another one is not
    options: Any = request.options
    return Compile(
        function=request.name,
        key=request.key(),
        fate="",
        process=jax.process_index(),
        directory="",
        flags=_in_key(_flags()),
        options=_in_key(f"{name}={value}" for name, value in options.env_option_overrides),
        devices=tuple(device.id for device in request.devices.flatten()),
        operations=operations,
    )


def _flags() -> Iterator[str]:
    """As JAX gathers them, from two variables and the command line."""
    yield from os.environ.get("XLA_FLAGS", "").split()
    yield from os.environ.get("LIBTPU_INIT_ARGS", "").split()
    yield from (argument for argument in sys.argv if argument.startswith("--xla"))


def _in_key(flags: Iterator[str]) -> tuple[str, ...]:
    """Less those that only dump."""
    outside = _compat.flags_outside_key()
    kept = (flag for flag in flags if f"--{flag.split('=')[0].lstrip('-')}" not in outside)
    return tuple(sorted(kept))


# --- what a program consists of, kept small enough to be written down and compared later
#
# An array inside the program becomes its type, a hash and its first numbers; everything else is
# kept as text. Values are numbered as they are defined: arguments, then the results of each
# operation.


_LONGEST = 4000  # characters of one attribute; of a longer one, the hash is kept
_SHOWN = 3  # numbers of an array that are shown
_BUFFERED = ("DenseFPElementsAttr", "DenseIntElementsAttr")
_ELEMENTS = {"f16", "f32", "f64"} | {f"{sign}{n}" for sign in ("i", "ui") for n in (8, 16, 32, 64)}
_SPLAT = re.compile(r"dense<([^<>\[\]\"]*)>")
_FRAME = re.compile(r'"([^"]*)":(\d+):')
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]|[\\/]jax_dist[\\/]")


def operations_of(module: Any) -> tuple[Operation, ...]:
    """All operations of an MLIR module, the module itself first, in the order of its text."""
    numbers: dict[Any, int] = {}

    def number(value: Any) -> int:
        return numbers.setdefault(value, len(numbers))

    def read(operation: Any) -> Iterator[Operation]:
        operands = tuple(map(number, operation.operands))
        if operation.name == CONSTANT:
            attributes = {"value": _value(operation)}
        else:
            named = sorted(_named(operation.attributes))
            attributes = {part: text for pair in named for part, text in _texts(*pair)}
        attributes["types"] = ", ".join(str(result.type) for result in operation.results)
        yield Operation(
            kind=operation.name,
            attributes=attributes,
            operands=operands,
            results=tuple(map(number, operation.results)),
            line=_user_line(operation.location),
        )
        for region in operation.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    number(argument)
                for inner in block.operations:
                    yield from read(inner.operation)

    return tuple(read(module.operation))


def _value(operation: Any) -> str:
    """`tensor<64xf32> afb9825a.. = 1.5, 2, 0.25, ...`: its type, hash, and first numbers."""
    type_ = operation.results[0].type
    # Asked first: of a complex array, the attribute alone makes jaxlib 0.7.2 end the process and
    # 0.10.2 raise; of bfloat16, its buffer does so in 0.7.2.
    attribute = operation.attributes["value"] if str(type_.element_type) in _ELEMENTS else None
    if attribute is None or attribute.is_splat or type(attribute).__name__ not in _BUFFERED:
        # An operation is slow to print: MLIR numbers all values of the program for it.
        text = str(operation).partition(" = ")[-1] if attribute is None else str(attribute)
        number = _SPLAT.search(text)
        return f"{type_} {_digest(text.encode())}" + (f" = {number[1]}" if number else "")
    values = np.ascontiguousarray(memoryview(attribute))
    shown = [
        f"{each:.6g}" if isinstance(each, float) and math.isfinite(each) else str(each)
        for each in values.ravel()[: _SHOWN + 1].tolist()
    ]
    more = ", ..." if len(shown) > _SHOWN else ""
    return f"{type_} {_digest(values.data)} = {', '.join(shown[:_SHOWN])}{more}"


def _named(attributes: Any) -> Iterator[tuple[str, Any]]:
    for each in attributes:  # names in 0.10.2 and 0.12.0.1, pairs in 0.7.2
        if isinstance(each, str):
            yield each, attributes[each]
        else:
            yield each.name, each.attr


def _texts(name: str, attribute: Any) -> Iterator[tuple[str, str]]:
    """One text for each part, so that a difference has a name: `res_attrs[0].jax.result_info`."""
    kind = type(attribute).__name__
    if kind == "DictAttr":
        for key, inner in _named(attribute):
            yield from _texts(f"{name}.{key}", inner)
    elif kind == "ArrayAttr" and any(type(each).__name__ == "DictAttr" for each in attribute):
        for number, each in enumerate(attribute):
            yield from _texts(f"{name}[{number}]", each)
    else:
        text = str(attribute)
        yield name, text if len(text) <= _LONGEST else _digest(text.encode())


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _user_line(location: Any) -> str:
    """The innermost line that belongs to no library."""
    frames = _FRAME.findall(str(location))
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return next((f"{file}:{line}" for file, line in own or frames), "")
