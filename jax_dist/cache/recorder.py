"""Writes down each program that JAX compiles: its key, what is in it, and what became of it.

The key under which JAX looks for a program in its persistent cache is one hash over eight
components. A program is found again if all eight are the same. Beside the key stand the two things
that it is made from: the settings beside the program, and the operations inside it.
"""

import contextlib
import functools
import hashlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jax_dist import _compat
from jax_dist.cache.causes import UNKNOWN
from jax_dist.cache.records import (
    COMPILER_OPTION,
    CONSTANT,
    DEBUG_OPTION,
    DEVICES,
    DIRECTORY,
    DIRECTORY_OPTIONS,
    FLAGS,
    METADATA,
    CacheOutcome,
    Compile,
    Key,
    Operation,
    Record,
    Settings,
)

_HIT = "/jax/compilation_cache/cache_hits"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_WRITING = "/jax/compilation_cache/cache_misses"  # what it counts are attempts to write
_THRESHOLDS = (
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def key(lowered: jax.stages.Lowered) -> Key:
    """The key under which JAX will look for a lowered program; compiles nothing.

    Through jax 0.10.2 the cache's directory is part of it: set that first.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` returns.

    Returns:
      The key, equal to the name of the file that JAX writes, and the hash of each component.

    Raises:
      UnsupportedError: this jax does not expose the components of its keys.

    >>> import jax, jax.numpy as jnp
    >>> def double(x):
    ...     return 2 * x
    >>> found = key(jax.jit(double).lower(jnp.ones(3)))
    >>> found.function
    'jit_double'
    >>> key(jax.jit(double).lower(jnp.ones(4))).differing(found)
    ('computation',)
    """
    request = _compat.CompileRequest.of(lowered)
    return Key(request.name, *request.key())


def record(path: str | os.PathLike[str] | None = None) -> "Recorder":
    """Records what JAX compiles, from now on or within a `with` block.

    Args:
      path: where it is saved. A name that ends in ".json" is written at the end, in one step; any
        other is a folder, which gets a file for each program as it is compiled, so that nothing is
        lost in a crash and several processes can share it. By default nothing is saved.

    Returns:
      A recorder: a context manager with `start()`, `stop()`, and the record so far as `.record`.

    >>> import jax, jax.numpy as jnp
    >>> def halve(x):
    ...     return x / 2
    >>> with record() as recorder:
    ...     _ = jax.jit(halve)(jnp.ones(3))
    >>> [compiled.key.function for compiled in recorder.record.compiles][-1]
    'jit_halve'
    """
    return Recorder(path)


class Recorder:
    """Records while it runs; see `record`.

    Args:
      path: where it is saved.
      entries: the directory in which JAX keeps its entries; by default what its setting says.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, entries: str | None = None
    ) -> None:
        self._path = None if path is None else Path(path)
        self._entries = entries
        self._compiles: list[Compile] = []
        self._lock = threading.Lock()
        self._running = contextlib.ExitStack()
        self._is_folder = self._path is not None and self._path.suffix != ".json"
        # Names sort by start, then by process, then in order.
        self._stem = f"{time.time_ns():020}-{os.getpid()}"

    @property
    def record(self) -> Record:
        """What was compiled so far."""
        with self._lock:
            return Record(tuple(self._compiles))

    def start(self) -> Self:
        """Begins to record."""
        _listen()
        self._running.enter_context(_compat.compiles_watched(self._around))
        return self

    def stop(self) -> None:
        """Ends, and saves the record if it has a file."""
        self._running.close()
        if self._path is not None and not self._is_folder:
            self.record.save(self._path)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def _around(self, request: _compat.CompileRequest) -> Iterator[None]:
        key = Key(request.name, *request.key())
        try:
            operations = operations_of(request.module)
        except Exception:  # noqa: BLE001  # of MLIR's bindings, whatever it is: the program goes on
            operations = ()  # its key is still known; where it differs from another one is not
        settings = _settings_of(request)
        directory = self._entries or str(_compat.config_value("jax_compilation_cache_dir") or "")
        before = _written_at(directory, key)
        start = time.monotonic()
        outer, events = _heard.lists, []
        _heard.lists = (*outer, events)
        try:
            yield
        finally:
            _heard.lists = outer
        seconds = time.monotonic() - start
        outcome, reason = _outcome(request, events, before, _written_at(directory, key), directory)
        compiled = Compile(
            key=key,
            outcome=outcome,
            reason=reason,
            seconds=seconds,
            process=jax.process_index(),
            settings=settings,
            operations=operations,
        )
        with self._lock:
            self._compiles.append(compiled)
            number = len(self._compiles)
        if self._path is not None and self._is_folder:
            # A full disk must not end the program; a record that lacks a program says so itself.
            with contextlib.suppress(OSError):
                self._path.mkdir(parents=True, exist_ok=True)
                Record((compiled,)).save(self._path / f"{self._stem}-{number:06}.json")


def _outcome(
    request: _compat.CompileRequest,
    events: list[str],
    before: int | None,
    after: int | None,
    where: str,
) -> tuple[CacheOutcome, str | None]:
    """What became of a program, and why it was not written, by the name of the cause."""
    if _HIT in events:
        return CacheOutcome.HIT, None
    if _ASKED not in events or not where:
        return CacheOutcome.UNWRITTEN, "cache-off"
    if _WRITING in events:
        # JAX would warn if it could not write into a bucket.
        if after != before or "://" in where:
            return CacheOutcome.WRITTEN, None
        return CacheOutcome.UNWRITTEN, "write-failed" if before is None else "damaged-entry"
    if jax.process_index() != 0:
        return CacheOutcome.UNWRITTEN, "rank"
    if request.host_callbacks and _compat.refuses_host_callbacks():
        return CacheOutcome.UNWRITTEN, "host-callback"
    if "://" not in where and not os.path.isdir(where):
        return CacheOutcome.UNWRITTEN, "write-failed"
    has_threshold = any(_compat.config_value(name) > 0 for name in _THRESHOLDS)
    return CacheOutcome.UNWRITTEN, "threshold" if has_threshold else UNKNOWN


def _written_at(directory: str, key: Key) -> int | None:
    """When the entry of a program was written; None if there is none."""
    try:
        return os.stat(os.path.join(directory, f"{key.name}-cache")).st_mtime_ns
    except OSError:
        return None


# --- what JAX reports about this thread's compilation


class _Heard(threading.local):
    lists: tuple[list[str], ...] = ()  # of the recorders that are around it


_heard = _Heard()


@functools.cache  # once for all: listeners cannot be taken away
def _listen() -> None:
    def hear(event: str, **_: object) -> None:
        for events in _heard.lists:
            events.append(event)

    jax.monitoring.register_event_listener(hear)


# --- the settings beside a program


def _settings_of(request: _compat.CompileRequest) -> Settings:
    """What can make the key of a request differ, without its program."""
    devices = request.devices.flatten().tolist()
    # As JAX gathers them, from two variables and the command line, less those that only dump.
    said = [
        *os.environ.get("XLA_FLAGS", "").split(),
        *os.environ.get("LIBTPU_INIT_ARGS", "").split(),
        *(argument for argument in sys.argv if argument.startswith("--xla")),
    ]
    outside = _compat.flags_outside_key()
    flags = [flag for flag in sorted(said) if flag.split("=")[0] not in outside]
    settings = {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "backend version": request.backend.platform_version,
        FLAGS: " ".join(flags),
        DEVICES: " ".join(str(device.id) for device in devices),
        "number of devices": str(len(devices)),
        "kinds of devices": ", ".join(dict.fromkeys(device.device_kind for device in devices)),
        "devices of all processes": str(request.backend.device_count()),
        "processes": str(jax.process_count()),
        DIRECTORY: str(_compat.config_value("jax_compilation_cache_dir") or ""),
        METADATA: str(_compat.config_value("jax_compilation_cache_include_metadata_in_key")),
        "compression": "zlib" if util.find_spec("zstandard") is None else "zstandard",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random"),
    }
    options: Any = request.options
    debug = options.executable_build_options.debug_options
    for name in dir(debug):
        if name.startswith("xla") and f"--{name}" not in outside or name in DIRECTORY_OPTIONS:
            settings[DEBUG_OPTION + name] = str(getattr(debug, name))
    for name, value in options.env_option_overrides:
        if f"--{name}" not in outside:
            settings[COMPILER_OPTION + name] = str(value)
    return settings


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
