"""Looks a cache over: what in it is broken, useless or unsafe; and mends what can be mended.

`doctor` runs the checks, which follow it, and removes what only costs space.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_dist._usage import human_bytes
from jax_dist.cache import entries, store
from jax_dist.cache.entries import CacheEntry

_SCARCE = 10**9  # bytes of free space below which it is told
_DEAD = 3600  # seconds after which an unfinished file has no writer any more
_RUNS = 3  # that wrote new keys of one function, and none found one


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFinding:
    """One thing that is wrong, or good to know."""

    kind: str  # one word or two, such as "damaged"
    where: str  # the file or folder
    what: str
    do: str  # what to do about it
    fixed: str = ""  # what was done about it
    harmless: bool = False  # only told
    cure: Callable[[], str] | None = dataclasses.field(default=None, compare=False, repr=False)

    def mended(self) -> "CacheFinding":
        """The same, once `cure` ran."""
        if self.cure is None:
            return self
        try:
            return dataclasses.replace(self, fixed=self.cure(), cure=None)
        except OSError as error:
            return dataclasses.replace(self, do=f"{self.do} (tried: {error.strerror})")

    def to_dict(self) -> dict[str, object]:
        fields = ("kind", "where", "what", "do", "fixed", "harmless")
        return {name: getattr(self, name) for name in fields}

    def __str__(self) -> str:
        end = f"fixed: {self.fixed}" if self.fixed else f"help: {self.do}"
        return f"{self.kind}: {self.where}\n  {self.what}\n  {end}"


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """What was found in a cache. Printed, it is a list, the worst first."""

    path: str
    entries: int
    bytes: int
    findings: tuple[CacheFinding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is left to do; what was mended, or is only told, does not count."""
        return all(finding.fixed or finding.harmless for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "entries": self.entries,
            "bytes": self.bytes,
            "healthy": self.healthy,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        noun = "entry" if self.entries == 1 else "entries"
        head = f"{self.path}: {self.entries} {noun}, {human_bytes(self.bytes)}"
        if not self.findings:
            return f"{head}; all is well"
        return "\n".join([head, *(str(finding) for finding in self.findings)])


def doctor(path: str | os.PathLike[str] | None = None, *, fix: bool = False) -> Health:
    """Checks a cache, and repairs it if asked.

    It looks for damaged and empty entries; leftovers of writers that died; files without their
    entry; folders that others can change; a full or read-only disk; keys that no later run ever
    asked for again.

    Args:
      path: the folder of the cache; by default the one that `enable()` would use.
      fix: remove useless files, and write permission from users who must not change the folder.
        Healthy entries stay.

    Returns:
      The findings; a repaired one says how.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> broken = folder / f"jit_step-{64 * 'a'}-cache"
    >>> broken.touch()
    >>> [finding.kind for finding in doctor(folder).findings]
    ['empty']
    >>> doctor(folder, fix=True).healthy, broken.exists()
    (True, False)
    """
    base = pathlib.Path(store.chosen(path, os.environ))
    folders = entries.folders(base)
    if not folders and base.exists():
        what, do = "It is a file, so there is no cache.", "Name another folder, or remove the file."
        return Health(str(base), 0, 0, (CacheFinding("not a folder", str(base), what, do),))
    if not folders:
        what, do = "Nothing is there yet.", "Run a program."
        nothing = CacheFinding("no folder", str(base), what, do, harmless=True)
        return Health(str(base), 0, 0, (nothing,))
    used = any(entries.of_folder(folder) for folder in folders)
    found = [finding for folder in folders for finding in _safety(folder, used=used)]
    free = shutil.disk_usage(base).free
    if free < _SCARCE:
        what = f"Only {human_bytes(free)} are free; what does not fit is compiled every time."
        do = "jax-dist cache prune --max-size SIZE"
        found.append(CacheFinding("disk full", str(base), what, do))
    for folder in folders:
        there = entries.of_folder(folder)
        found += [*_content(there), *_litter(folder, there), *_writers(there)]
    if fix:
        found = [finding.mended() for finding in found]
    left = entries.all_of(base)
    total = sum(entry.size for entry in left)
    return Health(str(base), len(left), total, tuple(found))


def _safety(folder: pathlib.Path, *, used: bool) -> Iterator[CacheFinding]:
    """Who can change what is in it. `used`: it, or a part of it, holds entries."""
    why = store.danger(folder)
    if why is not None:
        status = folder.stat()
        # Whether its mode is ours to change. The sticky bit says that it is meant for all: /tmp.
        ours = status.st_uid == os.getuid() and not status.st_mode & stat.S_ISVTX
        yield CacheFinding(
            "unsafe",
            str(folder),
            f"{why[0].upper()}{why[1:]}, and what lies here is run as code.",
            store.remedy(folder),
            cure=functools.partial(_take_back, folder) if used and ours else None,
        )
    # By trying: the mode says nothing of a read-only disk, and binds no root.
    probe = folder / f".{os.getpid()}{entries.UNFINISHED}"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        what = "It cannot be written to: what is there is found, and nothing is added."
        do = "Make it writable, or name another folder."
        yield CacheFinding("read-only", str(folder), what, do)


def _take_back(folder: pathlib.Path) -> str:
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o022)
    why = store.danger(folder)
    if why is not None:  # it is about the folder above, or about the owner
        raise PermissionError(0, why)
    return "nobody but its owner can write there now; look at what is in it"


def _content(found: Sequence[CacheEntry]) -> Iterator[CacheFinding]:
    """What is in the files. Reads them all."""
    for entry in found:
        try:
            data = entry.content()
        except OSError as error:
            what = f"It cannot be read: {error.strerror}."
            do = "Look at who owns it; enable() replaces it where it may."
            yield CacheFinding("unreadable", str(entry.path), what, do)
            continue
        damage = entry.damage(data)
        if damage is not None:
            kind = "misplaced" if damage.startswith("that of") else damage.split(" ")[0]
            what = f"It is {damage}, so its program is compiled every time."
            do = "jax-dist cache doctor --fix, or enable(), which compiles it once and replaces it"
            cure = functools.partial(_remove, entry)
            yield CacheFinding(kind, str(entry.path), what, do, cure=cure)


def _remove(entry: CacheEntry) -> str:
    return f"removed, {human_bytes(entry.remove())}"


def _litter(folder: pathlib.Path, found: Sequence[CacheEntry]) -> Iterator[CacheFinding]:
    """What belongs to no entry."""
    keys = {entry.key for entry in found}
    for path in sorted(folder.glob(f"*{entries.ATIME}")):
        ours = entries.is_of_entry(path.name, entries.ATIME)  # else it is not ours to judge
        if ours and path.name.removesuffix(entries.ATIME) not in keys:
            yield _useless("orphaned", path, "Its entry is gone.")
    for path in sorted(folder.glob(f".[0-9]*{entries.UNFINISHED}")):
        if time.time() - path.stat().st_mtime > _DEAD:
            yield _useless("unfinished", path, "Its writer died; no program reads it.")


def _useless(kind: str, path: pathlib.Path, what: str) -> CacheFinding:
    def cure() -> str:
        path.unlink(missing_ok=True)
        return "removed"

    return CacheFinding(kind, str(path), what, "jax-dist cache doctor --fix", cure=cure)


def _writers(found: Sequence[CacheEntry]) -> Iterator[CacheFinding]:
    """Functions that several runs wrote again, and none found."""
    groups: dict[str, list[CacheEntry]] = {}
    for entry in found:
        groups.setdefault(entry.function, []).append(entry)
    for function, group in groups.items():
        runs = {seal.run for seal in (entry.seal() for entry in group) if seal is not None}
        if len(runs) >= _RUNS and not any(entry.repeated for entry in group):
            yield CacheFinding(
                "never repeats",
                function,
                f"{len(runs)} runs wrote {len(group)} keys of it, and none was asked for again.",
                "jax-dist cache verify -- python YOUR_PROGRAM says what differs, and where",
            )
