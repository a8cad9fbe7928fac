"""Writes down each program that JAX compiles: its key, what is in it, and what became of it."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import jax

from jax_dist import _compat
from jax_dist.cache.causes import UNKNOWN
from jax_dist.cache.keys import key_of, operations_of, settings_of
from jax_dist.cache.records import CacheOutcome, Compile, Key, Operation, Record, save

_HIT = "/jax/compilation_cache/cache_hits"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_WRITING = "/jax/compilation_cache/cache_misses"  # what it counts are attempts to write


_THRESHOLDS = (
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

_Entry: TypeAlias = tuple[int, int, int] | None  # the file, as far as it can tell it was replaced


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
    return Recorder(None if path is None else Path(path))


class Recorder:
    """Records while it runs; see `record`.

    Args:
      path: where it is saved.
      entries: the directory in which JAX keeps its entries; by default what its setting says.
    """

    def __init__(self, path: Path | None, *, entries: str | None = None) -> None:
        self._path = path
        self._entries = entries
        self._compiles: list[Compile] = []
        self._lock = threading.Lock()
        self._running = contextlib.ExitStack()
        self._is_folder = path is not None and path.suffix != ".json"
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
            save(self.record, self._path)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @contextlib.contextmanager
    def _around(self, request: _compat.CompileRequest) -> Iterator[None]:
        key = key_of(request)
        operations, settings = _operations(request), settings_of(request)
        directory = self._entries or _directory()
        before = _entry(directory, key)
        start = time.monotonic()
        with _heard() as events:
            yield
        seconds = time.monotonic() - start
        outcome, reason = _outcome(request, events, before, _entry(directory, key), directory)
        self._add(
            Compile(
                key=key,
                outcome=outcome,
                reason=reason,
                seconds=seconds,
                process=jax.process_index(),
                settings=settings,
                operations=operations,
            )
        )

    def _add(self, compiled: Compile) -> None:
        with self._lock:
            self._compiles.append(compiled)
            number = len(self._compiles)
        if self._path is not None and self._is_folder:
            # A full disk must not end the program; a record that lacks a program says so itself.
            with contextlib.suppress(OSError):
                self._path.mkdir(parents=True, exist_ok=True)
                save(Record((compiled,)), self._path / f"{self._stem}-{number:06}.json")


def _operations(request: _compat.CompileRequest) -> tuple[Operation, ...]:
    try:
        return operations_of(request.module)
    except Exception:  # noqa: BLE001  # of MLIR's bindings, whatever it is: the program goes on
        return ()  # its key is still known; where it differs from another one is not


def _outcome(
    request: _compat.CompileRequest, events: list[str], before: _Entry, after: _Entry, where: str
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


def _directory() -> str:
    return str(_compat.config_value("jax_compilation_cache_dir") or "")


def _entry(directory: str, key: Key) -> _Entry:
    """Which file holds the program now; None if there is none."""
    try:
        found = os.stat(os.path.join(directory, f"{key.name}-cache"))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


# --- what JAX reports about this thread's compilation


_events = threading.local()
_listening = threading.Lock()
_listens = False


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    _events.heard = heard = []
    try:
        yield heard
    finally:
        _events.heard = None


def _listen() -> None:
    """Once for all: listeners cannot be taken away."""
    global _listens
    with _listening:
        if not _listens:
            jax.monitoring.register_event_listener(_hear)
            _listens = True


def _hear(event: str, **_: object) -> None:
    heard = getattr(_events, "heard", None)
    if heard is not None:
        heard.append(event)


# --- inside a program that is being verified


_until_the_end = contextlib.ExitStack()  # of the process


def record_verified(*, folder: str, cache: str) -> None:
    """Records a program that is being verified, with a cache of its own.

    Args:
      folder: where the record is written.
      cache: the directory that the program is to use, whatever it says itself.
    """
    # The recorder first, so that it sees the program's own settings.
    Recorder(Path(folder), entries=cache).start()
    _until_the_end.enter_context(_compat.compiles_watched(_PrivateCache(cache).around))


class _PrivateCache:
    """Has programs looked up and written elsewhere than the program says.

    Its own settings come back after each compilation: through jax 0.10.2 the directory is part of
    the key, and one that varies is a cause to be told.
    """

    def __init__(self, directory: str) -> None:
        self._wanted = {
            "jax_compilation_cache_dir": directory,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,  # 0 lets JAX choose
        }

    @contextlib.contextmanager
    def around(self, request: _compat.CompileRequest) -> Iterator[None]:
        """As a watcher of compilations."""
        del request
        own = {name: _compat.config_value(name) for name in self._wanted}
        _set(self._wanted)  # JAX opens the cache within the first compilation, and keeps it
        try:
            yield
        finally:
            _set(own)


def _set(values: dict[str, object]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
