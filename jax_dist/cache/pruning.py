"""Makes a cache smaller: by size, by age."""

import dataclasses
import pathlib
import time

from jax_dist.cache import entries
from jax_dist.cache.entries import Entry


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, or would be."""

    removed: tuple[Entry, ...]
    kept: int  # entries
    kept_bytes: int

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.removed)


def prune(
    path: pathlib.Path,
    *,
    max_size: int | None = None,
    older_than: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Removes entries that were not used for long.

    Args:
      path: the folder of the cache.
      max_size: the bytes that may stay; those used last stay.
      older_than: those not used for so many seconds go.
      dry_run: only say what would be removed.
    """
    found = sorted(entries.all_of(path), key=lambda entry: (-entry.used, entry.key))
    now = time.time()
    kept, removed, size = 0, [], 0
    for entry in found:  # the one used last comes first
        old = older_than is not None and now - entry.used > older_than
        if old or (max_size is not None and size + entry.size > max_size):
            removed.append(entry)
        else:
            kept += 1
            size += entry.size
    if not dry_run:
        for entry in removed:
            entries.remove(entry)
    return Pruned(tuple(removed), kept, size)
