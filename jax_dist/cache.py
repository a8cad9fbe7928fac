"""JAX's persistent compilation cache: one call turns it on, and counters show whether it hits.

JAX computes the key of a program, and asks for its entry: `Store.get`. What it can load is a hit.
Otherwise it compiles, within `_Watcher.compiling`, which remembers failures, and writes the entry:
`Store.put`. `_compat.watch_cache` is where JAX calls these.
"""

import collections
import contextlib
import dataclasses
import logging
import operator
import os
import pathlib
import re
import threading
import warnings
from typing import Any, Literal, Self

import jax

from jax_dist import _compat
from jax_dist._cache import directories
from jax_dist._cache.failures import FailureRecords
from jax_dist._cache.store import Store
from jax_dist._usage import render
from jax_dist.errors import ArgumentError, CacheWarning

__all__ = ("enable", "stats")

_log = logging.getLogger("jax_dist.cache")
_original_settings: dict[str, Any] = {}  # JAX's settings before the first `enable`
_MAX_SIZE = "jax_compilation_cache_max_size"
_UNITS = {unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("", "kib", "mib", "gib", "tib"))}


def enable(
    path: str | os.PathLike[str] | None = "",
    *,
    max_size: int | str | None = None,
    min_compile_seconds: float = 0.0,
    failures: Literal["raise", "retry"] | None = None,
) -> str | None:
    """Keep compiled programs in a directory, for this run and all that follow.

    Call it once, at the start of each process. Every program is kept, however quickly it compiles.
    Files are complete or absent; one that cannot be loaded is compiled again and replaced. If the
    directory cannot be used, a warning says so, and the program continues without it.

    Args:
      path: a directory, or a URL such as `gs://bucket/cache` (needs etils[epath] and fsspec, and is
        left to JAX). Not given: $JAX_DIST_CACHE_DIR, or else $JAX_COMPILATION_CACHE_DIR, or else a
        directory of this user, such as ~/.cache/jax_dist. None: no cache.
      max_size: the bytes that it may hold, also as "20GB"; the least recently used are removed.
        -1: no limit. None: JAX's setting.
      min_compile_seconds: programs that compile in less are not kept.
      failures: "raise": a program whose compilation failed before raises the recorded error, unless
        $JAX_DIST_RETRY_FAILED is 1. "retry": it is compiled again. None: failures are not recorded.

    Returns:
      Where the programs are: a part of the directory that only machines with the same CPU and
      jaxlib share. None: there is no cache.

    Raises:
      ArgumentError: others can change the directory, or an argument is not what it should be.

    >>> import tempfile
    >>> from jax_dist import cache
    >>> directory = cache.enable(tempfile.mkdtemp())
    >>> with cache.stats() as seen:
    ...     three = jax.jit(lambda: 3)()
    >>> seen.misses, seen.written
    (1, 1)
    >>> cache.enable(None)
    """
    if failures not in (None, "raise", "retry"):
        raise ArgumentError(f"failures={failures!r} is not one of None, 'raise' and 'retry'.")
    if not isinstance(min_compile_seconds, int | float) or not min_compile_seconds >= 0:
        raise ArgumentError(
            f"min_compile_seconds={min_compile_seconds!r} is not a time in seconds."
        )
    size = _compat.config_value(_MAX_SIZE) if max_size is None else max_size
    if path is None or (max_size is None and size == 0):  # JAX's size 0 turns its cache off
        return _disable()
    limit = None if size == -1 else _parse_size(size)
    base = directories.choose(path, os.environ)
    is_url = directories.is_url(base)
    if is_url and failures is not None:
        raise ArgumentError(f"failures={failures!r} needs a local directory, not {base}.")
    directory = directories.add_machine(base if is_url else os.path.abspath(base))
    try:
        directories.prepare(directory)
    except OSError as error:
        text = f"The compilation cache is off: {error.filename}: {error.strerror}."
        warnings.warn(CacheWarning(text), stacklevel=2)
        return _disable()
    _watcher.directory, _watcher.max_size, _watcher.failures = directory, limit, None
    if failures is not None:
        _watcher.failures = FailureRecords(pathlib.Path(directory), retry=failures == "retry")
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": float(min_compile_seconds),
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    if is_url:
        settings["jax_persistent_cache_enable_xla_caches"] = "none"  # XLA needs a real directory
        settings[_MAX_SIZE] = -1 if limit is None else limit
    for name, value in settings.items():
        _original_settings.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)
    _compat.watch_cache(_watcher)
    _compat.reset_cache()  # JAX reads its settings once
    return directory


def _disable() -> None:
    """Turn the cache off, and restore the settings that `enable` changed."""
    _watcher.directory = _watcher.failures = None
    for name, value in _original_settings.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", None)
    _compat.reset_cache()


def _parse_size(text: int | str) -> int:
    """Return the bytes of `500`, `"500 MB"` or `"2GiB"`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*)\s*", str(text).lower())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size == 0:
        raise ArgumentError(f"max_size={text!r} is not a size such as 500MB or 2GiB.")
    return size


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of programs that JAX looked up in the cache, for one function or for all."""

    hits: int = 0  # programs that were loaded
    misses: int = 0  # programs that were compiled in this process
    written: int = 0  # misses that are in the cache now
    seconds_saved: float = 0.0  # compiling time of the hits, less their loading time
    # Misses that are not in the cache, by reason.
    unwritten: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: "Counts") -> "Counts":
        names = [field.name for field in dataclasses.fields(Counts)]
        return Counts(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def requests(self) -> int:
        return self.hits + self.misses


class _Watcher:
    """The cache of this process, whose methods JAX calls (`_compat.watch_cache`)."""

    def __init__(self) -> None:
        self.directory: str | None = None  # a path or URL; None: the cache is off
        self.max_size: int | None = None  # bytes
        self.failures: FailureRecords | None = None
        self.total: dict[str, Counts] = {}  # by function, since the start of the process
        self.blocks: list[Stats] = []  # `with` blocks of `stats`, which count too
        self.lock = threading.Lock()  # of `total` and `blocks`
        self._store: Store | None = None

    def open_store(self, path: str) -> Store | None:
        """Return what reads and writes entries at a path; None leaves it to JAX."""
        is_local = path == self.directory and not directories.is_url(path)
        self._store = Store(pathlib.Path(path), self.max_size) if is_local else None
        return self._store

    def is_enabled(self) -> bool:
        """Return whether JAX uses the directory of `enable`; the user may have set another."""
        directory = _compat.config_value("jax_compilation_cache_dir")
        return self.directory is not None and self.directory == directory

    def on_hit(self, name: str, seconds_saved: float) -> None:
        # An entry has the compiling time in whole seconds, often 0: less than the loading time.
        saved = max(seconds_saved, 0.0)
        self._count(name, Counts(hits=1, seconds_saved=saved))
        _log.info("%s: from cache, saved %.1f s", name, saved)

    def on_unreadable(self, name: str, error: Exception) -> None:
        _log.warning("%s: its cache entry cannot be loaded: %s", name, error)

    def compiling(self, name: str, key: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for a compilation, which looks up and records its failure."""
        if self.failures is None:
            return contextlib.nullcontext()
        return self.failures.watch(name, key)

    def on_compiled(self, name: str, key: str, seconds: float, reason: str | None) -> None:
        """Count a miss; `reason` says why JAX does not write the program, None that it may."""
        if reason is None and self._store is not None:
            reason = self._store.unwritten_reason(key)
        unwritten = collections.Counter([reason] if reason else [])
        self._count(name, Counts(misses=1, written=0 if reason else 1, unwritten=unwritten))
        outcome = f"not written: {reason}" if reason else "written"
        _log.info("%s: compiled in %.1f s, %s", name, seconds, outcome)

    def _count(self, name: str, counts: Counts) -> None:
        with self.lock:
            for functions in (self.total, *(block._functions for block in self.blocks)):
                functions[name] = functions.get(name, Counts()) + counts


_watcher = _Watcher()


def _read_total(name: str) -> Any:
    """Return a property with the value that an attribute of `self.total` has."""
    return property(operator.attrgetter(f"total.{name}"))


class Stats:
    """Counts of the persistent cache, which grow while programs are compiled.

    A context manager counts what happens inside of it, in all threads. Printed, it is a table.
    """

    def __init__(self) -> None:
        self._functions = _watcher.total

    def __enter__(self) -> Self:
        self._functions = {}
        with _watcher.lock:
            _watcher.blocks.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _watcher.lock:
            _watcher.blocks.remove(self)

    @property
    def functions(self) -> dict[str, Counts]:
        """The counts of each function, by the name of its program, such as `jit_step`."""
        return dict(self._functions)

    @property
    def total(self) -> Counts:
        """The counts of all functions together."""
        return sum(self.functions.values(), Counts())

    requests: int = _read_total("requests")  # programs that were looked up
    hits: int = _read_total("hits")  # programs that were loaded
    misses: int = _read_total("misses")  # programs that were compiled
    written: int = _read_total("written")  # misses that are kept now
    unwritten: collections.Counter[str] = _read_total("unwritten")  # other misses, by reason
    seconds_saved: float = _read_total("seconds_saved")  # compiling time that all hits saved

    def __str__(self) -> str:
        from rich.table import Table  # slow to import

        functions = self.functions
        table = Table("function", box=None, pad_edge=False)
        for header in ("requests", "hits", "misses", "written", "saved"):
            table.add_column(header, justify="right")
        rows = list(functions.items())
        if len(functions) != 1:
            rows.append(("all", self.total))
        for name, counts in rows:
            numbers = (counts.requests, counts.hits, counts.misses, counts.written)
            table.add_row(name, *map(str, numbers), f"{counts.seconds_saved:.1f} s")
        reasons = []
        for name, counts in functions.items():
            for reason, number in counts.unwritten.items():
                reasons.append(f"{name}: {number} not written: {reason}")
        return render(table, *reasons, width=200)


def stats() -> Stats:
    """Count hits and misses of the persistent cache, in a block or in the process.

    Returns:
      With `with`, the counts of the block. Otherwise those of the process since counting began:
      with `enable`, or with the first call of this function.

    >>> import jax
    >>> def step():
    ...     return 4
    >>> with stats() as seen:
    ...     four = jax.jit(step)()
    >>> print(seen)
    function  requests  hits  misses  written  saved
    jit_step         1     0       1        0  0.0 s
    jit_step: 1 not written: there is no cache directory
    """
    _compat.watch_cache(_watcher)
    return Stats()
