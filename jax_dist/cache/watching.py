"""The one watcher of JAX's persistent cache in this process: it serves, counts and says."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Iterator

import jax

from jax_dist import _compat
from jax_dist.cache import ledger
from jax_dist.cache.settings import circumstances
from jax_dist.cache.store import Store
from jax_dist.cache.tallies import Tally

_log = logging.getLogger("jax_dist.cache")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
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
        self.settings: Settings | None = None
        self.total = Tally()  # of the process, since somebody first asked
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
            ledger.raise_if_failed(folder, key, lambda: circumstances(program))

    def compiled(self, name: str, key: str, seconds: float, unwritten: str | None) -> None:
        for tally in self._tallies:
            tally.miss(name, seconds, unwritten)
        folder = self._ledger()
        if folder is not None:
            ledger.forget(folder, key)
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
        noted = folder is not None and ledger.note(
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


watcher = Watcher()
