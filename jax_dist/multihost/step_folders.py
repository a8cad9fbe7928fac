"""Checkpoints on the disk: a folder for each step, which gets its name when Orbax has written it.

A folder is ours if it has a manifest: the leaves, and the checksums of the files. Rank 0 makes it
when all is written, and renames the folder then. What has none is never touched.

One job at a time has the lock of a folder, which the system lets go of when rank 0 ends, however it
ends. So the job that has it knows that nobody will finish what the one before has begun.
"""

import concurrent.futures
import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import time
import warnings
import zlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_dist import _notes
from jax_dist._exceptions import text_of
from jax_dist.errors import CheckpointError, CheckpointInUseError, CheckpointWarning, refusal
from jax_dist.multihost.conversion import MANIFEST, ORBAX_MARK, sync, sync_tree
from jax_dist.multihost.state_leaves import TypedLeaf

ITEM = "default"  # the folder of a step in which Orbax's own manager would look
_LOCK = ".jax_dist.lock"
_OURS = ".unfinished"  # what is being written, and what is being removed
_LONGEST = 1 << 26  # bytes of a manifest
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_PIECE = 1 << 20  # bytes read at a time

_held: set[int] = set()  # files that are locked: a child must not keep the lock of its parent
os.register_at_fork(after_in_child=lambda: [os.close(_held.pop()) for _ in tuple(_held)])


class _Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, tuple[int, int]]  # path in the folder to bytes and CRC-32
    digest: str  # of the two and the step, which an earlier version left out

    @classmethod
    def of(
        cls, leaves: dict[str, str], files: dict[str, tuple[int, int]], *step: int
    ) -> "_Manifest":
        dumped = json.dumps([leaves, files, *step], sort_keys=True).encode()
        return cls(leaves, files, hashlib.sha256(dumped).hexdigest())

    def is_of(self, step: int) -> bool:
        parts = self.leaves, self.files
        return self in (_Manifest.of(*parts, step), _Manifest.of(*parts))


def steps_in(folder: pathlib.Path, *, ours: bool = False) -> list[int]:
    """The numbers that are names of folders, ascending; or only those that have a manifest."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    steps = sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name))
    return [step for step in steps if not ours or os.path.lexists(folder / str(step) / MANIFEST)]


def examine(folder: pathlib.Path) -> tuple[dict[str, str], list[str]]:
    """The leaves of a step, path to type; and what is not as it was written.

    Raises:
      PermissionError: nothing shows that it is damaged.
    """
    try:
        manifest = _notes.parse(_notes.content(folder / MANIFEST, limit=_LONGEST), _Manifest)
    except PermissionError:
        raise
    except OSError:
        manifest = None
    if manifest is None or not manifest.is_of(int(folder.name)):
        return {}, [f"it has no {MANIFEST} that can be read and is of this step"]
    found = []
    for name, written in sorted(manifest.files.items()):
        try:
            if _checksum(folder / name) != written:
                found.append(f"{name} has not the {written[0]} bytes that were written")
        except PermissionError:
            raise
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return manifest.leaves, found


def missing(item: pathlib.Path) -> list[str]:
    """What Orbax and TensorStore have written there, by their own account, and is there no more."""
    import tensorstore  # comes with Orbax

    base = {"driver": "file", "path": f"{item}/"}
    try:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        keys = store.list().result()
        lost = [key.decode() for key in keys if not store.read(key).result().value]
    except Exception as error:  # noqa: BLE001  # of TensorStore, whatever it is
        return [f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]]
    lost += [] if keys else ["manifest.ocdbt"]
    lost += [] if (item / ORBAX_MARK).is_file() else [ORBAX_MARK]
    return [f"{name} is not there" for name in lost]


def locked(folder: pathlib.Path) -> int:
    """The lock of a folder, which is made if it is not there: a file to be closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            holder = os.pread(file, 400, 0).decode(errors="replace").strip()
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise refusal(
                CheckpointInUseError,
                what=f"another job saves its checkpoints in {folder}",
                which=[holder or "it has not said yet which one"],
                why="each of the two would remove the checkpoints of the other",
                do="Stop that job, or leave its `with` block, or use another folder. A program "
                "that only restores needs no `every`, and may read at any time.",
            ) from None
        text = f"{folder} cannot be locked ({error.strerror}): let one job save there."
        warnings.warn(CheckpointWarning(text), stacklevel=2)
    _held.add(file)
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode(), 0)
    return file


class StepWriter:
    """Lets Orbax write steps in the background, in every process; rank 0 does the rest."""

    def __init__(
        self,
        orbax: Any,
        folder: pathlib.Path,
        kept: tuple[int, int | None],
        lock: int | None,
        timeout: float,
    ):
        self._orbax, self._folder, self._lock = orbax, folder, lock
        self._newest, self._period = kept  # how many, and which ones besides
        self._ours = folder / _OURS
        handler = orbax.CompositeCheckpointHandler(**{ITEM: orbax.StandardCheckpointHandler()})
        self._checkpointer = orbax.AsyncCheckpointer(handler, timeout_secs=int(timeout))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jax_dist checkpoints")
        self._end = concurrent.futures.Future[None]()
        self._end.set_result(None)
        self.clean()

    def begin(self, step: int, last: int, damaged: Collection[int]) -> None:
        """Makes room for a step after `last`; damaged ones are renamed, and stay."""
        if self._lock is None:
            return
        if not self._has_lock():  # somebody has cleaned up there, or has replaced the folder
            lock = locked(self._folder)
            self._release()
            self._lock = lock
        ours = steps_in(self._folder, ours=True)
        for each in set(damaged) & set(ours):
            aside = self._folder / f"{each}.damaged"
            again = f".{time.time_ns()}" if os.path.lexists(aside) else ""
            (self._folder / str(each)).rename(f"{aside}{again}")
        unknown = [f"step {each}" for each in ours if each > last and each not in damaged]
        if not unknown and os.path.lexists(self._folder / str(step)):
            unknown = [f"{self._folder / str(step)}, which has no {MANIFEST}"]
        if unknown:
            raise refusal(
                CheckpointError,
                what=f"step {step} is not saved: {self._folder} holds what was not restored",
                which=unknown,
                why="what is newer by number would be taken for the newest, and what another "
                "program made is never overwritten",
                do="Call `restore` first, move away what is not a checkpoint, or use another "
                "folder.",
            )
        self.clean()
        self._ours.mkdir()

    def write(self, step: int, leaves: Sequence[TypedLeaf]) -> None:
        """Returns when the values are copied; the rest is done meanwhile, until `finish`."""
        stored = {leaf.path: leaf.value() for leaf in leaves if np.size(leaf.given)}
        # Orbax saves neither arrays without elements nor an empty tree.
        how = self._orbax.args.StandardSave(stored or {"nothing": np.zeros(1)})
        self._checkpointer.save(
            self._ours / str(step), args=self._orbax.args.Composite(**{ITEM: how})
        )
        types = {leaf.path: leaf.type for leaf in leaves}
        self._end = self._thread.submit(self._commit, step, types)

    def finish(self) -> None:
        """Waits until it is on the disk; raises whatever Orbax, TensorStore or the disk raised."""
        self._end.result()

    def clean(self) -> None:
        """Removes what is unfinished or on its way out: the room may be needed."""
        if self._has_lock():
            shutil.rmtree(self._ours, ignore_errors=True)

    def close(self) -> None:
        self._thread.shutdown()
        self._checkpointer.close()
        self._release()

    def _has_lock(self) -> bool:
        """Whether the next job would find the folder locked, by this process."""
        try:
            here = (self._folder / _LOCK).stat()
            return self._lock in _held and os.path.samestat(os.fstat(self._lock), here)
        except OSError:
            return False

    def _release(self) -> None:
        if self._lock is not None and self._lock in _held:
            _held.remove(self._lock)
            os.close(self._lock)

    def _commit(self, step: int, leaves: dict[str, str]) -> None:
        """After that, the step is there also when the machine has lost its power."""
        self._checkpointer.wait_until_finished()
        if self._lock is None:
            return
        written = self._ours / str(step)
        try:
            # What goes missing after it was listed has no checksum, or is missed by `examine`.
            paths = sorted(path for path in written.rglob("*") if path.is_file())
            files = {str(path.relative_to(written)): _checksum(path) for path in paths}
            if lost := missing(written / ITEM):
                raise OSError(lost[0])
            manifest = json.dumps(_Manifest.of(leaves, files, step)._asdict(), indent=1)
            (written / MANIFEST).write_text(manifest)
            sync_tree(written)
            written.rename(self._folder / str(step))
            sync(self._folder)
            with contextlib.suppress(OSError):  # the next step tries again
                for old in steps_in(self._folder, ours=True)[: -self._newest]:
                    if self._period is None or old % self._period:
                        (self._folder / str(old)).rename(self._ours / str(old))
        finally:
            self.clean()


def _checksum(path: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with _notes.regular(path) as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum
