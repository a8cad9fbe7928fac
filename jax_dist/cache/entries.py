"""The files of a cache: their names, and the seal at the end of an entry.

A seal says which key an entry belongs to, and holds a checksum: an entry that was cut short,
damaged or copied from another key is never given to XLA.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import struct
from typing import NamedTuple

from jax_dist import _notes

_FRAME = struct.Struct("<II")  # of zstd: one of the numbers of skippable frames, and the length
_SKIPPABLE = 0x184D2A5D
_END = struct.Struct("<I8s")  # the length again, and the name: the seal is found from its end
_NAME = b"jax_dist"
_LONGEST = 1 << 16  # bytes of a seal


class _Seal(NamedTuple):
    """What an entry says of itself."""

    key: str
    sha256: str  # of the entry without its seal


class _Opened(NamedTuple):
    """An entry without its seal."""

    content: bytes
    seal: _Seal | None  # None: JAX alone wrote it, or the seal is damaged

    def fault(self, key: str) -> str | None:
        """Why this is not the entry of `key`, as far as the seal tells."""
        if self.seal is None:
            return None
        if self.seal.key != key:
            return f"that of {self.seal.key}, under another name"
        if hashlib.sha256(self.content).hexdigest() != self.seal.sha256:
            return "damaged (other bytes than were written)"
        return None


def sealed(key: str, content: bytes) -> bytes:
    """An entry with its seal."""
    seal = _Seal(key, hashlib.sha256(content).hexdigest())
    text = json.dumps(seal._asdict()).encode()
    length = len(text) + _END.size
    return content + _FRAME.pack(_SKIPPABLE, length) + text + _END.pack(length, _NAME)


def opened(data: bytes) -> _Opened:
    """An entry, or the end of one, apart from its seal.

    >>> opened(sealed("jit_f-1", b"program")).fault("jit_g-1")
    'that of jit_f-1, under another name'
    """
    if len(data) >= _FRAME.size + _END.size:
        length, name = _END.unpack_from(data, len(data) - _END.size)
        start = len(data) - length - _FRAME.size
        if (
            name == _NAME
            and length <= _LONGEST
            and start >= 0
            and _FRAME.unpack_from(data, start) == (_SKIPPABLE, length)
        ):
            text = data[start + _FRAME.size : -_END.size]
            return _Opened(data[:start], _notes.parse(text, _Seal))
    return _Opened(data, None)


# --- the files of a cache
#
# An entry is what JAX makes it: `NAME-KEY-cache` holds, compressed, the seconds that compiling
# took (4 bytes) and the program; where `jax_dist.cache` wrote it, a seal follows. When it was last
# used is the access time of the file, which `Store.get` sets, so that it is right on every file
# system. Beside it may lie `NAME-KEY-atime`, which JAX writes where a size limit is set.
#
# Nothing here loads JAX.


ENTRY, ATIME, UNFINISHED = "-cache", "-atime", ".unfinished"
_KEY = re.compile(r".+-[0-9a-f]{64}")
_PART = re.compile(r".+-jaxlib-[0-9].*")
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {unit + "ib": 1024**power for power, unit in enumerate(("k", "m", "g", "t"), start=1)}
_UNITS |= {unit + "b": _UNITS[unit] for unit in "kmgt"}
_LARGEST = 2**62  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CacheEntry:
    """One compiled program of a cache."""

    path: pathlib.Path
    size: int  # bytes
    used: float  # seconds since 1970; as written where it never was

    @property
    def key(self) -> str:
        """As JAX has it: the name of the program, and the hash."""
        return self.path.name.removesuffix(ENTRY)

    def remove(self) -> int:
        """Removes it with what lies beside it; gives the bytes that are free now."""
        for path in (self.path, self.path.with_name(self.key + ATIME)):
            path.unlink(missing_ok=True)
        return self.size


def folders(path: pathlib.Path) -> list[pathlib.Path]:
    """A cache, and its parts for different machines. Other folders in it are somebody else's."""
    if not path.is_dir():
        return []
    parts = (each for each in path.iterdir() if _PART.fullmatch(each.name))
    return [path, *sorted(each for each in parts if each.is_dir() and not each.is_symlink())]


def all_of(path: pathlib.Path) -> list[CacheEntry]:
    """The entries of a cache in all its parts, by name."""
    return [entry for folder in folders(path) for entry in of_folder(folder)]


def of_folder(folder: pathlib.Path) -> list[CacheEntry]:
    """The entries of one folder, by name. No other file is taken for one."""
    found = []
    with os.scandir(folder) as files:
        for file in files:
            if not (file.name.endswith(ENTRY) and _KEY.fullmatch(file.name.removesuffix(ENTRY))):
                continue
            try:
                status = file.stat()
            except FileNotFoundError:  # another process removed it
                continue
            except OSError:  # a link to itself
                status = file.stat(follow_symlinks=False)
            used = max(status.st_mtime, status.st_atime)
            found.append(CacheEntry(pathlib.Path(file.path), status.st_size, used))
    return sorted(found, key=lambda entry: entry.path.name)


def bytes_of(text: str | int) -> int:
    """`500`, `"500 MB"`, `"2GiB"` in bytes.

    Raises:
      ValueError: it is no size.

    >>> bytes_of("1.5 kB"), bytes_of("2KiB")
    (1500, 2048)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write it as 500MB or 2GiB")
    size = float(found[1]) * _UNITS[found[2]]
    if size > _LARGEST:
        raise ValueError(f"{str(text)[:30]!r} is more than there can be")
    return int(size)
