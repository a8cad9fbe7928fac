"""Looks a cache over: what in it is broken, useless or unsafe; and mends what can be mended."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax_dist.cache import checks, entries, paths
from jax_dist.cache.checks import Finding


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """What was found in a cache. Printed, it is a list, the worst first."""

    path: str
    entries: int
    bytes: int
    findings: tuple[Finding, ...]

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
        head = f"{self.path}: {self.entries} {noun}, {entries.in_words(self.bytes)}"
        if not self.findings:
            return f"{head}; all is well"
        return "\n".join([head, *(str(finding) for finding in self.findings)])


def doctor(path: str | os.PathLike[str] | None = None, *, fix: bool = False) -> Health:
    """Checks a cache, and repairs it if asked.

    It looks for damaged and empty entries; leftovers of writers that died; files without their
    entry; folders that others can change; a full or read-only disk; entries for another CPU; keys
    that differ between processes; keys that no later run ever asked for again.

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
    base = pathlib.Path(paths.chosen(path, os.environ))
    folders = entries.folders(base)
    if not folders:
        return Health(str(base), 0, 0, (checks.no_folder(base),))
    found = list(_findings(base, folders))
    if fix:
        found = [finding.mended() for finding in found]
    left = entries.all_of(base)
    total = sum(entry.size for entry in left)
    return Health(str(base), len(left), total, tuple(found))


def _findings(base: pathlib.Path, folders: Sequence[pathlib.Path]) -> Iterator[Finding]:
    used = any(entries.of_folder(folder) for folder in folders)
    for folder in folders:
        yield from checks.folder_safety(folder, used=used)
    yield from checks.disk(base)
    for folder in folders:
        found = entries.of_folder(folder)
        yield from checks.content(found)
        yield from checks.litter(folder, found)
        yield from checks.repetition(found)
        yield from checks.ranks(found)
