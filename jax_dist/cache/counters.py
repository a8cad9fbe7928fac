"""What the cache did in this process: counted by function, and told by `stats`.

JAX reports each request to the watcher, which serves the entries, counts, and says why a program
is not in the cache.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, Self

import jax

from jax_dist import _compat
from jax_dist.cache import failures
from jax_dist.cache.keys import circumstances
from jax_dist.cache.store import Store


@dataclasses.dataclass(slots=True)
class Counts:
    """Of one function, or of all together."""

    hits: int = 0
    misses: int = 0  # compiled here, in full
    written: int = 0  # of the misses: is in the cache now
    failed: int = 0  # of the misses: did not compile
    seconds_saved: float = 0.0  # what loading took less than compiling had taken
    seconds_compiling: float = 0.0
    # Of the misses: why it is not in the cache; in the order in which they were seen.
    unwritten: dict[str, int] = dataclasses.field(default_factory=collections.Counter)

    @property
    def requests(self) -> int:
        return self.hits + self.misses

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "hits": self.hits,
            "misses": self.misses,
            "written": self.written,
            "failed": self.failed,
            "unwritten": dict(self.unwritten),
            "seconds_saved": round(self.seconds_saved, 3),
            "seconds_compiling": round(self.seconds_compiling, 3),
        }


class Tally:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[str, Counts] = {}

    def hit(self, function: str, saved: float) -> None:
        with self._lock:
            counts = self._of(function)
            counts.hits += 1
            counts.seconds_saved += saved

    def miss(self, function: str, seconds: float, unwritten: str | None) -> None:
        with self._lock:
            counts = self._of(function)
            counts.misses += 1
            counts.seconds_compiling += seconds
            if unwritten is None:
                counts.written += 1
            else:
                counts.unwritten[unwritten] += 1

    def failure(self, function: str, seconds: float) -> None:
        with self._lock:
            counts = self._of(function)
            counts.misses += 1
            counts.failed += 1
            counts.seconds_compiling += seconds

    def functions(self) -> dict[str, Counts]:
        """A copy, in the order in which the functions came first."""
        with self._lock:
            return {
                name: dataclasses.replace(counts, unwritten=counts.unwritten.copy())
                for name, counts in self._functions.items()
            }

    def _of(self, function: str) -> Counts:
        return self._functions.setdefault(function, Counts())


def _together(functions: dict[str, Counts]) -> Counts:
    """The sum over all functions."""
    total = Counts()
    for counts in functions.values():
        for field in dataclasses.fields(Counts):
            if field.name != "unwritten":
                value = getattr(total, field.name) + getattr(counts, field.name)
                setattr(total, field.name, value)
        for reason, times in counts.unwritten.items():
            total.unwritten[reason] = total.unwritten.get(reason, 0) + times
    return total


# --- the one watcher of JAX's persistent cache in this process: it serves, counts and says


_log = logging.getLogger("jax_dist.cache")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSettings:
    """What `enable` was told."""

    folder: str  # or URL
    local: bool
    max_size: int | None = None  # bytes
    writers: str = "every"
    failures: bool = True
    retry: bool = False


class Watcher:
    """Fills the places that `_compat.watch_cache` opens."""

    def __init__(self) -> None:
        self.settings: CacheSettings | None = None
        self.total: Tally = Tally()  # of the process, since somebody first asked
        self._tallies: tuple[Tally, ...] = (self.total,)
        self._store: Store | None = None
        self._failed: set[str] = set()  # keys, in this process
        self._run = f"{os.getpid()}-{time.time():.0f}"

    @contextlib.contextmanager
    def counting(self, tally: Tally) -> Iterator[None]:
        self._tallies = (*self._tallies, tally)
        try:
            yield
        finally:
            self._tallies = tuple(each for each in self._tallies if each is not tally)

    def open(self, path: str, max_size: int) -> Store | None:
        settings = self.settings
        if settings is None or not settings.local or path != settings.folder:
            return None  # somebody set another folder: then JAX's own ways are meant
        limit = settings.max_size if max_size == -1 else max_size
        self._store = Store(
            pathlib.Path(path),
            max_size=limit,
            said=_compat.say_unwritten,
            writer=lambda: (jax.process_index(), self._run),
        )
        return self._store

    def found(self, name: str, key: str, saved: float) -> None:
        del key
        saved = max(saved, 0.0)  # JAX notes whole seconds: a quick program seems to take none
        for tally in self._tallies:
            tally.hit(name, saved)
        _log.info("%s: from cache, saved %.1f s", name, saved)

    def unreadable(self, name: str, key: str, error: Exception) -> None:
        if self._store is not None:
            self._store.unusable(key)
        _log.warning("%s: its cache entry is damaged, so it is compiled again (%s)", name, error)

    def compiling(self, name: str, key: str, program: _compat.CompiledProgram) -> None:
        del name
        folder = self._ledger()
        # In this process it is tried each time: its user may be mending what is missing.
        if folder is not None and key not in self._failed and not self._retries():
            failures.raise_if_failed(folder, key, lambda: circumstances(program))

    def compiled(self, name: str, key: str, seconds: float, unwritten: str | None) -> None:
        for tally in self._tallies:
            tally.miss(name, seconds, unwritten)
        folder = self._ledger()
        if folder is not None:
            failures.forget(folder, key)
        end = "written" if unwritten is None else f"not written: {unwritten}"
        _log.info("%s: compiled in %.1f s, %s", name, seconds, end)

    def failed(
        self,
        name: str,
        key: str,
        program: _compat.CompiledProgram,
        seconds: float,
        error: Exception,
    ) -> None:
        for tally in self._tallies:
            tally.failure(name, seconds)
        folder = self._ledger()
        self._failed.add(key)
        noted = folder is not None and failures.note(
            folder, name, key, circumstances(program), seconds, error
        )
        end = ", noted for the next run" if noted else ""
        _log.info("%s: did not compile (%.1f s)%s", name, seconds, end)

    def writes_everywhere(self) -> bool:
        return self.settings is not None and self.settings.writers == "every"

    def _ledger(self) -> pathlib.Path | None:
        settings = self.settings
        if settings is None or not (settings.local and settings.failures):
            return None
        return pathlib.Path(settings.folder)

    def _retries(self) -> bool:
        asked = os.environ.get("JAX_DIST_RETRY_FAILED", "")
        return (self.settings is not None and self.settings.retry) or asked not in ("", "0")


watcher: Watcher = Watcher()


# --- what the persistent cache did: hits, true misses, what was written, what never is and why


class Stats:
    """Counts of the persistent cache, which grow while programs are compiled.

    A context manager counts what happens inside of it, in all threads. Printed, it is a table.
    """

    def __init__(self) -> None:
        self._tally = watcher.total
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._tally = Tally()
        self._inside.enter_context(watcher.counting(self._tally))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._inside.close()

    @property
    def functions(self) -> dict[str, Counts]:
        """The counts of each function, by the name of its program, such as `jit_step`."""
        return self._tally.functions()

    @property
    def total(self) -> Counts:
        """The counts of all functions together."""
        return _together(self.functions)

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
        rows = [_HEAD, *(_row(name, counts) for name, counts in functions.items())]
        if len(functions) != 1:
            rows.append(_row("all", _together(functions)))
        notes = [
            f"{name}, {times} {'time' if times == 1 else 'times'} not written: {reason}"
            for name, counts in functions.items()
            for reason, times in counts.unwritten.items()
        ]
        return "\n".join([*_aligned(rows), *notes])


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


_HEAD = ("function", "requests", "hits", "misses", "written", "saved")


def _row(name: str, counts: Counts) -> tuple[str, ...]:
    numbers = (counts.requests, counts.hits, counts.misses, counts.written)
    return (name, *(str(number) for number in numbers), f"{counts.seconds_saved:.1f} s")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side: words to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
