"""The entries of a local cache directory."""

import contextlib
import logging
import os
import pathlib
import time

from jax_dist._files import TEMPORARY_FILES, write_atomically

_log = logging.getLogger("jax_dist.cache")
_ABANDONED = 3600  # seconds, after which nobody writes a temporary file any more


class Store:
    """A local directory of compiled programs, in place of JAX's `LRUCache`, with the same files.

    `LRUCache` does not write atomically, and never replaces a damaged entry. With a limit (bytes),
    it needs `filelock`, and through jax 0.10.2 it stops writing if one entry has no access time.
    """

    def __init__(self, directory: pathlib.Path, max_size: int | None = None) -> None:
        self.path = self._path = directory  # JAX logs `_path`
        self._max_size = max_size
        self._seen: set[str] = set()  # keys that had an entry, perhaps one that cannot be read
        self._errors: dict[str, str] = {}  # by key, why its entry could not be written
        self._warnings: set[str | None] = set()  # errors that were logged

    def get(self, key: str) -> bytes | None:
        """Return the serialized program of a key, or None."""
        path = self._entry(key)
        try:
            data = path.read_bytes()
            # Many file systems are mounted so that reading does not set the time of access.
            with contextlib.suppress(OSError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            self._warn("read", path, error)
            data = b""
        self._seen.add(key)
        return data or None

    def put(self, key: str, value: bytes) -> None:
        """Write the serialized program of a key, unless another process has done so since `get`."""
        path = self._entry(key)
        # JAX compiles a program that it has loaded only if the entry is damaged: it is replaced.
        if key not in self._seen and path.is_file():
            return
        try:
            if self._max_size is not None:
                self._evict(self._max_size - len(value))
            if path.is_dir():  # a damaged entry, too; a file cannot replace it
                path.rmdir()
            write_atomically(path, value)
        except OSError as error:
            self._errors[key] = f"it could not be written: {error.strerror}"
            self._warn("write", path, error)

    def unwritten_reason(self, key: str) -> str | None:
        """Return why a compiled program is not in the directory, or None if it is."""
        reason = None if self._entry(key).is_file() else "JAX could not serialize it"
        return self._errors.get(key, reason)

    def _evict(self, room: int) -> None:
        """Remove the least recently used entries until the others take at most `room` bytes."""
        if room < 0:
            raise OSError(0, f"it is larger than max_size ({self._max_size} bytes)")
        entries, now = [], time.time()
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                status = path.stat()
                if path.name.endswith("-cache"):
                    entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
                elif path.match(TEMPORARY_FILES) and now - status.st_mtime > _ABANDONED:
                    path.unlink()  # of a process that was killed
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total > room:
                path.unlink(missing_ok=True)
                total -= size

    def _entry(self, key: str) -> pathlib.Path:
        return self.path / f"{key}-cache"

    def _warn(self, verb: str, path: pathlib.Path, error: OSError) -> None:
        if error.strerror not in self._warnings:  # once, and not for each program
            self._warnings.add(error.strerror)
            _log.warning("cannot %s %s: %s; the program goes on", verb, path, error.strerror)
