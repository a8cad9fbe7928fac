"""Switches JAX's persistent compilation cache on, so that it hits, and counts.

JAX reports each request to the watcher, which serves the entries, counts by function, and says why
a program is not in the cache.
"""

import collections
import dataclasses
import enum
import importlib.util
import logging
import os
import pathlib
import threading
import warnings
from typing import Any, Literal, Self

import jax

from jax_dist import _compat
from jax_dist.cache import entries, store
from jax_dist.cache.store import Store
from jax_dist.errors import CacheWarning, message


class Default(enum.Enum):
    """What `enable` takes where no path is given: None has a meaning of its own."""

    PATH = "JAX_DIST_CACHE_DIR, or JAX_COMPILATION_CACHE_DIR, or a folder of this user"


@dataclasses.dataclass(frozen=True, slots=True)
class _CacheSettings:
    """What `enable` was told."""

    folder: str  # or URL
    local: bool
    max_size: int | None = None  # bytes
    writers: str = "every"


_log = logging.getLogger("jax_dist.cache")
_before: dict[str, Any] = {}  # JAX's settings, as they were before the first `enable`


def enable(
    path: str | os.PathLike[str] | None | Default = Default.PATH,
    *,
    max_size: int | str | None = None,
    min_compile_seconds: float = 0.0,
    writers: Literal["every", "first"] = "every",
) -> str | None:
    """Keeps compiled programs in a folder, for this run and all that follow.

    Call it once, at the start of the program and in each of its processes. Every program is kept,
    however quickly it compiles. Files are complete or absent; a damaged one is compiled again and
    replaced. If something cannot be used, a warning says so, and the program continues without it.

    Args:
      path: a folder, or a URL such as `gs://bucket/cache` (needs etils[epath] and fsspec, and is
        left to JAX). Not given: $JAX_DIST_CACHE_DIR, or else $JAX_COMPILATION_CACHE_DIR, or else a
        folder of this user, such as ~/.cache/jax_dist. None: no cache.
      max_size: the bytes that it may hold, also as "20GB"; the least recently used are removed.
      min_compile_seconds: programs that compile in less are not kept.
      writers: "every" process writes what it compiled and did not find; "first": only the first
        one, which on CPUs leaves the others without, since their keys differ.

    Returns:
      Where the programs are: a part of the folder that only machines with the same CPU and jaxlib
      share. None: there is no cache.

    Raises:
      CacheDirectoryError: anybody could change the contents of the folder.
      ValueError: `max_size` is not a size.

    >>> import tempfile
    >>> from jax_dist import cache
    >>> folder = cache.enable(tempfile.mkdtemp())
    >>> with cache.stats() as seen:
    ...     three = jax.jit(lambda: 3)()
    >>> seen.misses, seen.written
    (1, 1)
    >>> cache.enable(None)
    """
    if path is None:
        return _disable()
    asked = store.chosen(None if isinstance(path, Default) else path, os.environ)
    limit = None if max_size is None else entries.bytes_of(max_size)
    trouble, folder = _prepared(asked)
    if trouble is not None:
        warnings.warn(CacheWarning(trouble), stacklevel=2)
        return _disable()
    settings = _CacheSettings(
        folder=folder,
        local=not store.is_url(asked),
        max_size=limit,
        writers=writers,
    )
    _switch_on(settings, min_compile_seconds)
    return folder


def _disable() -> None:
    watcher.settings = None
    for name, value in _before.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", None)
    _compat.reset_cache()


def _switch_on(settings: _CacheSettings, min_compile_seconds: float) -> None:
    wanted = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": settings.folder,
        "jax_persistent_cache_min_compile_time_secs": min_compile_seconds,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    if not settings.local:
        # XLA would take the URL for a folder of its own.
        wanted["jax_persistent_cache_enable_xla_caches"] = "none"
        wanted["jax_compilation_cache_max_size"] = settings.max_size or -1
    for name, value in wanted.items():
        _before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)
    watcher.settings = settings
    _compat.watch_cache(watcher)
    _compat.reset_cache()  # JAX looks at its settings once


def _prepared(asked: str) -> tuple[str | None, str]:
    """Why there can be no cache, if so; and where it is."""
    if store.is_url(asked):
        missing = [name for name in ("etils", "fsspec") if importlib.util.find_spec(name) is None]
        trouble = message(
            what="The compilation cache is off",
            which=[f"{asked} needs {' and '.join(missing)}"],
            why="JAX reads and writes URLs through these packages",
            do="Install etils[epath] and fsspec, with the one that knows the URL, such as gcsfs.",
        )
        return trouble if missing else None, store.of_this_machine(asked)
    folder = pathlib.Path(store.of_this_machine(os.path.abspath(asked)))
    try:
        if folder.parent.is_file():
            raise NotADirectoryError(0, "it is a file", str(folder.parent))
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):  # for this user alone; what is there stays as it is
            each.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster
    except OSError as error:
        trouble = message(
            what="The compilation cache is off",
            which=[f"{error.filename}: {error.strerror}"],
            why="no folder can be made there",
            do="Name another folder, in enable(...) or in JAX_DIST_CACHE_DIR.",
        )
        return trouble, ""
    for each in (folder.parent, folder):
        store.refuse_if_open(each)
    return None, str(folder)


# --- what the cache did in this process, counted by function


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Of one function, or of all together."""

    hits: int = 0
    misses: int = 0  # compiled here, in full
    written: int = 0  # of the misses: is in the cache now
    seconds_saved: float = 0.0  # what loading took less than compiling had taken
    seconds_compiling: float = 0.0
    # Of the misses: why it is not in the cache; in the order in which they were seen.
    unwritten: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, more: "Counts") -> "Counts":
        names = [field.name for field in dataclasses.fields(Counts)]
        return Counts(*(getattr(self, name) + getattr(more, name) for name in names))

    @property
    def requests(self) -> int:
        return self.hits + self.misses

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "hits": self.hits,
            "misses": self.misses,
            "written": self.written,
            "unwritten": dict(self.unwritten),
            "seconds_saved": round(self.seconds_saved, 3),
            "seconds_compiling": round(self.seconds_compiling, 3),
        }


# --- the one watcher of JAX's persistent cache in this process: it serves, counts and says


class _Watcher:
    """Fills the places that `_compat.watch_cache` opens."""

    def __init__(self) -> None:
        self.settings: _CacheSettings | None = None
        self.total: dict[str, Counts] = {}  # by function, since somebody first asked
        self.counted: list[dict[str, Counts]] = [self.total]
        self._lock = threading.Lock()
        self._store: Store | None = None

    def open(self, path: str, max_size: int) -> Store | None:
        settings = self.settings
        if settings is None or not settings.local or path != settings.folder:
            return None  # somebody set another folder: then JAX's own ways are meant
        limit = settings.max_size if max_size == -1 else max_size
        self._store = Store(
            pathlib.Path(path),
            max_size=limit,
            said=_compat.say_unwritten,
        )
        return self._store

    def found(self, name: str, saved: float) -> None:
        saved = max(saved, 0.0)  # JAX notes whole seconds: a quick program seems to take none
        self._count(name, Counts(hits=1, seconds_saved=saved))
        _log.info("%s: from cache, saved %.1f s", name, saved)

    def unreadable(self, name: str, key: str, error: Exception) -> None:
        if self._store is not None:
            self._store.unusable(key)
        _log.warning("%s: its cache entry is damaged, so it is compiled again (%s)", name, error)

    def compiled(self, name: str, seconds: float, unwritten: str | None) -> None:
        why = collections.Counter[str]() if unwritten is None else collections.Counter([unwritten])
        written = int(unwritten is None)
        counts = Counts(misses=1, written=written, seconds_compiling=seconds, unwritten=why)
        self._count(name, counts)
        end = "written" if unwritten is None else f"not written: {unwritten}"
        _log.info("%s: compiled in %.1f s, %s", name, seconds, end)

    def _count(self, name: str, counts: Counts) -> None:
        with self._lock:
            for functions in self.counted:
                functions[name] = functions.get(name, Counts()) + counts

    def writes_everywhere(self) -> bool:
        return self.settings is not None and self.settings.writers == "every"


watcher: _Watcher = _Watcher()


# --- what the persistent cache did: hits, true misses, what was written, what never is and why


class Stats:
    """Counts of the persistent cache, which grow while programs are compiled.

    A context manager counts what happens inside of it, in all threads. Printed, it is a table.
    """

    def __init__(self) -> None:
        self._functions = watcher.total

    def __enter__(self) -> Self:
        self._functions = {}
        watcher.counted = [*watcher.counted, self._functions]
        return self

    def __exit__(self, *raised: object) -> None:
        watcher.counted = [each for each in watcher.counted if each is not self._functions]

    @property
    def functions(self) -> dict[str, Counts]:
        """The counts of each function, by the name of its program, such as `jit_step`."""
        return dict(self._functions)

    @property
    def total(self) -> Counts:
        """The counts of all functions together."""
        return sum(self.functions.values(), Counts())

    @property
    def requests(self) -> int:
        """How often a program was looked up."""
        return self.total.requests

    @property
    def hits(self) -> int:
        """How often it was there."""
        return self.total.hits

    @property
    def misses(self) -> int:
        """How often it was not: requests minus hits.

        The event `cache_misses` of JAX is different: it counts writes of entries.
        """
        return self.total.misses

    @property
    def written(self) -> int:
        """How many of the misses are in the cache now."""
        return self.total.written

    @property
    def unwritten(self) -> dict[str, int]:
        """Why others of the misses are not, and how many."""
        return dict(self.total.unwritten)

    @property
    def seconds_saved(self) -> float:
        """What loading took less than compiling had taken, which JAX notes in whole seconds."""
        return self.total.seconds_saved

    def to_dict(self) -> dict[str, Any]:
        functions = {name: counts.to_dict() for name, counts in self.functions.items()}
        return {"total": self.total.to_dict(), "functions": functions}

    def __str__(self) -> str:
        functions = self.functions
        counted = list(functions.items())
        if len(counted) != 1:
            counted.append(("all", self.total))
        head = ("function", "requests", "hits", "misses", "written", "saved")
        rows = [
            (
                name,
                *map(str, (each.requests, each.hits, each.misses, each.written)),
                f"{each.seconds_saved:.1f} s",
            )
            for name, each in counted
        ]
        notes = [
            f"{name}, {times} {'time' if times == 1 else 'times'} not written: {reason}"
            for name, counts in functions.items()
            for reason, times in counts.unwritten.items()
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = []
        for name, *numbers in (head, *rows):
            cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        return "\n".join([*lines, *notes])


def stats() -> Stats:
    """Counts hits and misses of the persistent cache, in a block or in the process.

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
    jit_step, 1 time not written: there is no cache directory
    """
    _compat.watch_cache(watcher)
    return Stats()
