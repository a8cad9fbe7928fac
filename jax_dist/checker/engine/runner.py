"""Checks many files: those that have changed, in several processes where that pays.

The findings of earlier runs are kept in one JSON file. An entry counts only for the same bytes,
the same rules, and the same checker; what cannot be read is as good as empty.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha1
from typing import Any, TypeAlias

import jax_dist
from jax_dist.checker.engine.linter import Examiner, unreadable
from jax_dist.checker.engine.replacement import write
from jax_dist.checker.model.findings import Code, Edit, Finding, Fix, Position, Safety
from jax_dist.checker.rules import Version

FOLDER = ".jax_dist_cache"
_ROOMS = ("model", "rules", "engine")  # of the checker: what decides on findings

_TAG = """\
Signature: 8a477f597d28d172789f06886806bc55
# This folder holds what jax-dist lint remembers of the files it has checked.
"""


class FindingStore:
    """The findings of earlier runs over the same paths.

    Args:
      folder: where they are kept; made when there is something to keep.
      paths: what the user asked to check; other paths have another memory.
      target: the jax that is asked for.
      files: all files of this run: with one more or one less, names may mean something else.
    """

    def __init__(
        self, folder: str, paths: Sequence[str], target: Version | None, files: Sequence[str]
    ) -> None:
        here = os.getcwd()
        self._folder = folder
        self._path = os.path.join(folder, f"{_hash(here, *paths)[:16]}.json")
        self._context = _hash(
            jax_dist.__version__,
            sys.version,
            ".".join(map(str, target)) if target else "newest",
            _of_checker(),
            here,
            *files,
        )
        self._read, self._entries = _load(self._path, self._context)
        self._fresh: dict[str, list[Any]] = {}

    @staticmethod
    def digest(data: bytes, codes: frozenset[Code]) -> str:
        """Of a file's bytes and the rules that are on in it."""
        print_ = sha1(data, usedforsecurity=False)
        print_.update(",".join(sorted(codes)).encode())
        return print_.hexdigest()

    def get(self, path: str, digest: str) -> list[Finding] | None:
        """The findings of a file, where it is known with these bytes and rules."""
        entry = self._entries.get(path)
        if entry is None or entry[0] != digest:
            return None
        try:
            return [_finding(path, each) for each in entry[1]]
        except (TypeError, ValueError, KeyError):  # somebody wrote into it
            return None

    def put(self, path: str, digest: str, findings: Iterable[Finding]) -> None:
        """Remembers the findings of a file."""
        self._fresh[path] = [digest, [dataclasses.astuple(finding)[1:] for finding in findings]]

    def save(self, read: Iterable[str] = ()) -> None:
        """Writes what is new; a folder that cannot be written to is left as it is.

        Args:
          read: files that were looked into while others were checked. When one of them changes,
            nothing that is remembered counts.
        """
        if not self._fresh:
            return
        kept = {
            "context": self._context,
            "read": self._read | {path: _of_file(path) for path in sorted(read)},
            "files": self._entries | self._fresh,
        }
        text = json.dumps(kept, separators=(",", ":"))
        with contextlib.suppress(OSError):  # a memory that is not kept costs time, nothing else
            if not os.path.isdir(self._folder):
                os.makedirs(self._folder, exist_ok=True)
                for name, said in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
                    with open(os.path.join(self._folder, name), "w", encoding="utf-8") as file:
                        file.write(said)
            write(self._path, text.encode())


def _hash(*texts: str) -> str:
    return sha1("\0".join(texts).encode(), usedforsecurity=False).hexdigest()


def _of_checker() -> str:
    """Changes with every change of the rules, also between releases."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    rooms = (folder, *(os.path.join(folder, each) for each in _ROOMS))
    files = (file for room in rooms for file in os.scandir(room) if file.name.endswith(".py"))
    found = ((file.name, file.stat()) for file in files)
    return "\n".join(sorted(f"{name} {of.st_size} {of.st_mtime_ns}" for name, of in found))


def _load(path: str, context: str) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """`(read, files)`: files that others depend on, with their digests; and the findings."""
    try:
        with open(path, "rb") as file:
            kept = json.loads(file.read())
        read, entries = dict(kept["read"]), dict(kept["files"])
        if kept["context"] != context or any(_of_file(each) != read[each] for each in read):
            return {}, {}
        whole = all(isinstance(entry, list) and len(entry) == 2 for entry in entries.values())
        return (read, entries) if whole else ({}, {})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}, {}


def _of_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return sha1(file.read(), usedforsecurity=False).hexdigest()
    except OSError:
        return ""


def _finding(path: str, fields: Sequence[Any]) -> Finding:
    """The finding whose fields, but for the path, were kept."""
    code, name, message, start, end, (first, last), line_text, fix = fields
    if fix is not None:
        title, safety, edits, imports, group = fix
        edits = tuple(Edit(*edit) for edit in edits)
        fix = Fix(title, Safety(safety), edits, tuple(imports), group)
    start, end = Position(*start), Position(*end)
    return Finding(path, code, name, message, start, end, (first, last), line_text, fix)


_Pending: TypeAlias = tuple[str, frozenset[Code]]  # a file, and the rules that may find something
_Checked: TypeAlias = tuple[list[tuple[str, list[Finding]]], list[str]]

_CHUNKS_PER_JOB = 8  # so that a chunk of large files does not keep one process busy alone
_ENOUGH = 200  # files to check, from which on starting processes pays
# Objects between two collections. Trees are many objects, and give their memory back by themselves.
_SELDOM = 500_000


def run(
    files: Sequence[str],
    examiner: Examiner,
    *,
    jobs: int | None = None,
    memory: FindingStore | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """The findings of all files, in the order of the files.

    Args:
      files: what to look at.
      examiner: what to look for.
      jobs: how many processes; None: as many as pay.
      memory: findings of earlier runs; takes those of this one.
      progress: is told how many files are done, and how many there are.
    """
    found: dict[str, list[Finding]] = {}
    pending: list[_Pending] = []
    digests: dict[str, str] = {}
    for path in files:
        data = _data_of(path)
        if isinstance(data, Finding):
            found[path] = [data]
            continue
        found[path] = []
        if examiner.passes_over(path, data):
            continue
        if memory is not None:
            digests[path] = memory.digest(data, examiner.codes_for(path))
            known = memory.get(path, digests[path])
            if known is not None:
                found[path] = known
                continue
        likely = examiner.likely(path, data)
        if likely is not None:
            pending.append((path, likely))
        elif memory is not None:
            memory.put(path, digests[path], [])
    if jobs is None:
        jobs = (os.cpu_count() or 1) if len(pending) > _ENOUGH else 1
    done = len(files) - len(pending)
    looked_into: set[str] = set()
    before = gc.get_threshold()
    gc.set_threshold(_SELDOM, *before[1:])
    try:
        for some, read in _checked(pending, examiner, max(1, min(jobs, len(pending)))):
            looked_into.update(read)
            for path, findings in some:
                found[path] = findings
                if memory is not None:
                    memory.put(path, digests[path], findings)
            done += len(some)
            progress(done, len(files))
    finally:
        gc.set_threshold(*before)
    if memory is not None:
        memory.save(looked_into)
    return [finding for path in files for finding in found[path]]


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


def _data_of(path: str) -> bytes | Finding:
    """What a file holds, or the finding that says why that is not known."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return unreadable(path, f"the file cannot be read: {error.strerror or error}")


def _checked(files: Sequence[_Pending], examiner: Examiner, jobs: int) -> Iterator[_Checked]:
    """Findings of some files at a time, and the other files that were looked into for them."""
    if jobs == 1:
        for file in files:
            yield _check([file], examiner)
        return
    import multiprocessing
    from concurrent import futures  # only here: it is slow to load

    size = max(1, len(files) // (jobs * _CHUNKS_PER_JOB))
    chunks = [files[begin : begin + size] for begin in range(0, len(files), size)]
    # Not by fork, which a caller with threads, such as one that uses JAX, does not survive.
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(jobs, context, _start, (examiner,)) as pool:
        try:
            yield from pool.map(_check, chunks)
        except BaseException:  # a key was pressed, or a rule is broken: the rest is not wanted
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_here: list[Examiner] = []  # of a worker process, so that it keeps what it learns of the project


def _start(examiner: Examiner) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one process is enough to say it was stopped
    gc.set_threshold(_SELDOM)
    _here[:] = [examiner]


def _check(files: Sequence[_Pending], examiner: Examiner | None = None) -> _Checked:
    examiner = examiner or _here[0]
    before = len(examiner.project.looked_into)
    found: list[tuple[str, list[Finding]]] = []
    for path, likely in files:
        data = _data_of(path)
        findings = [data] if isinstance(data, Finding) else examined(path, data, examiner, likely)
        found.append((path, findings))
    return found, examiner.project.looked_into[before:]
