"""Checks many files: those that changed, in several processes where that pays."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from jax_dist.checker import store
from jax_dist.checker.examining import Examiner, unreadable
from jax_dist.checker.findings import Finding
from jax_dist.checker.store import Store

_ENOUGH = 200  # files to check, from which on starting processes pays
_CHUNKS_PER_JOB = 8  # so that a chunk of large files does not keep one process busy alone

Progress = Callable[[int, int], None]  # files done, files in all


def run(
    files: Sequence[str],
    examiner: Examiner,
    *,
    jobs: int | None = None,
    memory: Store | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Finding]:
    """The findings of all files, in the order of the files.

    Args:
      files: what to look at.
      examiner: what to look for.
      jobs: how many processes; None: as many as pay.
      memory: findings of earlier runs; takes those of this one.
      progress: is told how far it is.
    """
    found: dict[str, list[Finding]] = {}
    digests: dict[str, str] = {}
    pending: list[str] = []
    for path in files:
        data = read(path)
        if not isinstance(data, bytes):
            found[path] = [data]
        elif examiner.passes_over(data):
            found[path] = []
        elif memory is None:
            (pending if examiner.wants(path, data) else found.setdefault(path, [])).append(path)
        else:
            digests[path] = store.digest(data, examiner.codes_for(path))
            known = memory.get(path, digests[path])
            if known is None:
                pending.append(path)
            else:
                found[path] = known
    return _rest(files, pending, found, digests, examiner, jobs, memory, progress)
