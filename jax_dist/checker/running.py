"""Checks many files: those that have changed, in several processes where that pays."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from jax_dist.checker import pools
from jax_dist.checker.examining import Examiner, unreadable
from jax_dist.checker.findings import Code, Finding

if TYPE_CHECKING:  # loaded only where there is a memory
    from jax_dist.checker.store import Store

Progress: TypeAlias = Callable[[int, int], None]  # files done, files in all
_Pending: TypeAlias = tuple[str, frozenset[Code]]  # a file, and the rules that may find something
_Checked: TypeAlias = tuple[list[tuple[str, list[Finding]]], list[str]]

_ENOUGH = 200  # files to check, from which on starting processes pays
# Objects between two collections. Trees are many objects, and give their memory back by themselves.
_SELDOM = 500_000


def run(
    files: Sequence[str],
    examiner: Examiner,
    *,
    jobs: int | None = None,
    memory: "Store | None" = None,
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
    sifted = _Sifted(files, examiner, memory)
    done = len(files) - len(sifted.pending)
    with _collecting_seldom():
        jobs = pools.jobs_for(len(sifted.pending), _ENOUGH, jobs)
        for found, read in _checked(sifted.pending, examiner, jobs):
            sifted.take(found, read)
            done += len(found)
            progress(done, len(files))
    if memory is not None:
        memory.save(sifted.read)
    return [finding for path in files for finding in sifted.found[path]]


def examined(
    path: str, data: bytes, examiner: Examiner, likely: frozenset[Code] | None = None
) -> list[Finding]:
    """The findings of one file; a fault of ours is one of them, and stays in it."""
    try:
        return examiner.examined(path, data, likely)
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        return [failed(path, error)]


def failed(path: str, error: Exception) -> Finding:
    """The finding for a file on which the checker itself fails."""
    said = f"{type(error).__name__}: {error}"
    return unreadable(path, f"jax-dist failed on this file ({said}); please report it")


def data_of(path: str) -> bytes | Finding:
    """What a file holds, or the finding that says why that is not known."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return unreadable(path, f"the file cannot be read: {error.strerror or error}")


class _Sifted:
    """Files whose findings are known, and files that must be checked."""

    def __init__(self, files: Sequence[str], examiner: Examiner, memory: "Store | None") -> None:
        self.found: dict[str, list[Finding]] = {}
        self.pending: list[_Pending] = []
        self.read: set[str] = set()  # what was looked into while others were checked
        self._digests: dict[str, str] = {}
        self._memory = memory
        for path in files:
            known = self._known(path, examiner)
            if isinstance(known, frozenset):
                self.pending.append((path, known))
            else:
                self.found[path] = known

    def take(self, found: Sequence[tuple[str, list[Finding]]], read: Sequence[str]) -> None:
        self.found |= found
        self.read.update(read)
        if self._memory is not None:
            for path, findings in found:
                self._memory.put(path, self._digests[path], findings)

    def _known(self, path: str, examiner: Examiner) -> list[Finding] | frozenset[Code]:
        """The findings, or what must be looked for."""
        data = data_of(path)
        if isinstance(data, Finding):
            return [data]
        if examiner.passes_over(data):
            return []
        if self._memory is not None:
            self._digests[path] = self._memory.digest(data, examiner.codes_for(path))
            known = self._memory.get(path, self._digests[path])
            if known is not None:
                return known
        likely = examiner.likely(path, data)
        if likely is None and self._memory is not None:
            self._memory.put(path, self._digests[path], [])
        return [] if likely is None else likely


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _checked(files: Sequence[_Pending], examiner: Examiner, jobs: int) -> Iterator[_Checked]:
    """Findings of some files at a time, and the other files that were looked into for them."""
    if jobs == 1:
        for file in files:
            yield _check([file], examiner)
    else:
        yield from pools.in_chunks(_check, files, jobs, _start, examiner)


_here: list[Examiner] = []  # of a worker process, so that it keeps what it learns of the project


def _start(examiner: Examiner) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one process is enough to say it was stopped
    gc.set_threshold(_SELDOM)
    _here[:] = [examiner]


def _check(files: Sequence[_Pending], examiner: Examiner | None = None) -> _Checked:
    examiner = examiner or _here[0]
    before = len(examiner.looked_into())
    found: list[tuple[str, list[Finding]]] = []
    for path, likely in files:
        data = data_of(path)
        if isinstance(data, Finding):
            found.append((path, [data]))
            continue
        found.append((path, examined(path, data, examiner, likely)))
    return found, examiner.looked_into()[before:]
