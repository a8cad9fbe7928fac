"""The files of a cache: their names, whether an entry is whole, and the seal at its end.

A seal says which key an entry belongs to, and holds a checksum: an entry that was cut short,
damaged or copied from another key is never given to XLA.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

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
    run: str  # one name for each process that runs


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


def sealed(key: str, content: bytes, *, run: str) -> bytes:
    """An entry with its seal."""
    seal = _Seal(key, hashlib.sha256(content).hexdigest(), run)
    text = json.dumps(seal._asdict()).encode()
    length = len(text) + _END.size
    return content + _FRAME.pack(_SKIPPABLE, length) + text + _END.pack(length, _NAME)


def opened(data: bytes) -> _Opened:
    """An entry, or the end of one, apart from its seal.

    >>> opened(sealed("jit_f-1", b"program", run="7")).fault("jit_g-1")
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


# --- the files of a cache: what each of them is, and whether an entry is whole
#
# An entry is what JAX makes it: `NAME-KEY-cache` holds, compressed, the seconds that compiling
# took (4 bytes) and the program; where `jax_dist.cache` wrote it, a seal follows. When it was last
# used is the access time of the file, which `Store.get` sets, so that it is right on every file
# system. Beside it may lie `NAME-KEY-atime`, which JAX writes where a size limit is set.
#
# Nothing here loads JAX.


ENTRY, ATIME, UNFINISHED = "-cache", "-atime", ".unfinished"
_TIME_BYTES = 4
_KEY = re.compile(r"(?P<name>.+)-(?P<hash>[0-9a-f]{64})")
_PART = re.compile(r".+-jaxlib-[0-9].*")
_ZSTD = b"\x28\xb5\x2f\xfd"
_START = 256  # bytes of a file, enough for the first four of what they hold
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {unit + "ib": 1024**power for power, unit in enumerate(("k", "m", "g", "t"), start=1)}
_UNITS |= {unit + "b": _UNITS[unit] for unit in "kmgt"}
_LARGEST = 2**62  # bytes or seconds
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclasses.dataclass(frozen=True, slots=True)
class CacheEntry:
    """One compiled program of a cache."""

    path: pathlib.Path
    size: int  # bytes
    written: float  # seconds since 1970
    used: float  # seconds since 1970; as written where it never was

    @property
    def key(self) -> str:
        """As JAX has it: the name of the program, and the hash."""
        return self.path.name.removesuffix(ENTRY)

    @property
    def function(self) -> str:
        return self.key.rpartition("-")[0]

    @property
    def repeated(self) -> bool:
        """Whether it was loaded since it was written."""
        return self.used > self.written

    def beside(self, suffix: str) -> pathlib.Path:
        return self.path.with_name(self.key + suffix)

    def content(self) -> bytes:
        """The bytes of its file.

        Raises:
          OSError: it cannot be read, or is no regular file.
        """
        with _look(self.path) as file:
            return file.read()

    def damage(self, data: bytes) -> str | None:
        """What is wrong with its bytes, as far as they tell."""
        data, fault = (found := opened(data)).content, found.fault(self.key)
        if fault is not None:
            return fault
        if not data:
            return "empty"
        if data.startswith(_ZSTD):
            return None  # has no checksum; only loading it would tell
        try:
            program = zlib.decompress(data)
        except zlib.error as error:
            return f"damaged ({error})"
        return "damaged (no program in it)" if len(program) <= _TIME_BYTES else None

    def seal(self) -> _Seal | None:
        """What it says of itself; None where JAX alone wrote it."""
        try:
            with _look(self.path) as file:
                file.seek(max(0, self.size - _LONGEST))
                return opened(file.read()).seal
        except OSError:
            return None

    def compile_seconds(self) -> int | None:
        """How long compiling took, in whole seconds as JAX notes them; None: it cannot be read."""
        try:
            with _notes.regular(self.path) as file:
                start = file.read(_START)
            seconds = zlib.decompressobj().decompress(start, _TIME_BYTES)
        except (OSError, zlib.error):
            return None
        return int.from_bytes(seconds, "big") if len(seconds) == _TIME_BYTES else None

    def remove(self) -> int:
        """Removes it with what lies beside it; gives the bytes that are free now."""
        for path in (self.path, self.beside(ATIME)):
            path.unlink(missing_ok=True)
        return self.size

    def to_dict(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "key": self.key,
            "folder": str(self.path.parent),
            "bytes": self.size,
            "written": round(self.written),
            "used": round(self.used) if self.repeated else None,
            "compile_seconds": self.compile_seconds(),
        }


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
            if not is_of_entry(file.name, ENTRY):
                continue
            try:
                status = file.stat()
            except FileNotFoundError:  # another process removed it
                continue
            except OSError:  # a link to itself
                status = file.stat(follow_symlinks=False)
            found.append(
                CacheEntry(
                    path=pathlib.Path(file.path),
                    size=status.st_size,
                    written=status.st_mtime,
                    used=max(status.st_mtime, status.st_atime),
                )
            )
    return sorted(found, key=lambda entry: entry.path.name)


def is_of_entry(name: str, suffix: str) -> bool:
    """Whether a file is the part of an entry that has this suffix."""
    return name.endswith(suffix) and bool(_KEY.fullmatch(name.removesuffix(suffix)))


@contextlib.contextmanager
def _look(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a file, and leaves the time of its last use: to look at an entry is not to use it."""
    before = path.stat()
    with _notes.regular(path) as file:
        yield file
    with contextlib.suppress(OSError):  # read-only: the system keeps no account either
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


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
    return _limited(text, float(found[1]) * _UNITS[found[2]])


def seconds_of(text: str) -> int:
    """`"90s"`, `"36h"`, `"30d"`, `"2w"` in seconds.

    Raises:
      ValueError: it is no duration.

    >>> seconds_of("2d")
    172800
    """
    found = re.fullmatch(r"\s*(\d+)\s*([smhdw])\s*", text.lower())
    if found is None:
        raise ValueError(f"{text!r} is no duration; write it as 36h, 30d or 2w")
    return _limited(text, float(found[1]) * _AGES[found[2]])


def _limited(text: object, number: float) -> int:
    if number > _LARGEST:
        raise ValueError(f"{str(text)[:30]!r} is more than there can be")
    return int(number)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """Columns side by side, those in `numbers` to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
