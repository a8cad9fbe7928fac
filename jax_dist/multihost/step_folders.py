"""Checkpoints on the disk: a folder for each step, which Orbax's manager writes, names and removes.

A folder is ours if it has a manifest: the leaves, and the checksums of the files. Rank 0 makes it
when all is written, and before Orbax gives the folder its name. What has none is never touched.

One job at a time has the lock of a folder, which the system lets go of when rank 0 ends, however it
ends. So the job that has it knows that nobody will finish what the one before has begun.
"""

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
_GOING = ".unfinished"  # what is being removed; an earlier version of ours also wrote there
_LONGEST = 1 << 26  # bytes of a manifest
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_SAID = 400  # bytes in the lock: who has it
_PIECE = 1 << 20  # bytes read at a time

_held: set[int] = set()  # files that are locked: a child must not keep the lock of its parent
os.register_at_fork(after_in_child=lambda: [os.close(_held.pop()) for _ in tuple(_held)])


class _Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, tuple[int, int]]  # path in the folder to bytes and CRC-32
    digest: str  # of the two

    @classmethod
    def of(cls, leaves: dict[str, str], files: dict[str, tuple[int, int]]) -> "_Manifest":
        dumped = json.dumps([leaves, files], sort_keys=True).encode()
        return cls(leaves, files, hashlib.sha256(dumped).hexdigest())


def steps_in(folder: pathlib.Path, *, ours: bool = False) -> list[int]:
    """The numbers that are names of folders, ascending; or only those that have a manifest."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    steps = sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name))
    return [step for step in steps if not ours or os.path.lexists(folder / str(step) / MANIFEST)]


def examine(folder: pathlib.Path) -> tuple[dict[str, str], list[str]]:
    """The leaves of a step, path to type; and what is not as it was written."""
    manifest = _notes.load(folder / MANIFEST, _Manifest, limit=_LONGEST)
    if manifest is None or manifest != _Manifest.of(manifest.leaves, manifest.files):
        return {}, [f"it has no {MANIFEST} that can be read"]
    found = []
    for name, written in sorted(manifest.files.items()):
        try:
            if _checksum(folder / name) != written:
                found.append(f"{name} has not the {written[0]} bytes that were written")
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
        if error.errno in _NO_LOCKS:
            text = f"{folder} cannot be locked ({error.strerror}): let one job save there."
            warnings.warn(CheckpointWarning(text), stacklevel=2)
        else:
            holder = _said_in(file).partition(", writes ")[0]
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
    _held.add(file)
    return file


class StepWriter:
    """Writes steps by Orbax's manager, in every process; what else is done, rank 0 does."""

    def __init__(self, orbax: Any, folder: pathlib.Path, keep: int, lock: int | None):
        self._orbax, self._folder, self._keep, self._lock = orbax, folder, keep, lock
        self._since = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        begun = re.search(r", writes (\d+)$", _said_in(lock)) if lock is not None else None
        self._begun = int(begun[1]) if begun else 0  # the step that is being written
        self.abandon()
        self._leaves: Sequence[TypedLeaf] = ()
        self._trouble = ""
        handler = orbax.StandardCheckpointHandler()
        finalize = handler.finalize
        # No class of ours, whose name would be in the files: Orbax alone reads them, too.
        handler.finalize = lambda item: (finalize(item), self._write_manifest(pathlib.Path(item)))
        handlers = orbax.DefaultCheckpointHandlerRegistry()
        handlers.add(ITEM, orbax.args.StandardSave, handler)
        options = orbax.CheckpointManagerOptions(
            create=False,
            enable_async_checkpointing=False,
            preservation_policy=self,
            todelete_subdir=_GOING,
        )
        self._manager = orbax.CheckpointManager(folder, options=options, handler_registry=handlers)

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        """Orbax asks when a step has its name."""
        old = [] if self._trouble else steps_in(self._folder, ours=True)[: -self._keep]
        return [checkpoint.step not in old for checkpoint in checkpoints]

    def begin(self, step: int, last: int, damaged: Collection[int]) -> None:
        """Makes room for a step after `last`; damaged ones are renamed, and stay."""
        if self._lock is None:
            return
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
        self.abandon()  # what was interrupted
        self._begun = step
        self._note(self._lock)

    def save(self, step: int, leaves: Sequence[TypedLeaf], *, reload: bool) -> None:
        """Raises whatever Orbax, TensorStore or the disk raises."""
        self._leaves = leaves
        stored = {leaf.path: leaf.value() for leaf in leaves if np.size(leaf.given)}
        # Orbax saves neither arrays without elements nor an empty tree.
        how = self._orbax.args.StandardSave(stored or {"nothing": np.zeros(1)})
        if reload:
            self._manager.reload()
        self._manager.save(step, args=how, force=True)

    def end(self, step: int) -> None:
        """After that, the step is there also when the machine has lost its power."""
        if self._lock is None:
            return
        if self._trouble:  # Orbax has named it all the same: the other processes wait for that
            (self._folder / _GOING).mkdir(exist_ok=True)
            (self._folder / str(step)).rename(self._folder / _GOING / str(step))
        sync(self._folder)
        self.abandon()
        if self._trouble:
            raise OSError(self._trouble)

    def abandon(self) -> None:
        """Removes what is unfinished or on its way out: the room may be needed."""
        if self._lock is None:
            return
        unnamed = f"{self._begun}.orbax-checkpoint-tmp*" if self._begun else _GOING
        for path in (*self._folder.glob(unnamed), self._folder / _GOING):
            shutil.rmtree(path, ignore_errors=True)
        self._begun = 0
        with contextlib.suppress(OSError):
            self._note(self._lock)

    def close(self) -> None:
        self._manager.close()
        if self._lock is not None and self._lock in _held:
            _held.remove(self._lock)
            os.close(self._lock)

    def _note(self, lock: int) -> None:
        """For the job that wants the lock meanwhile, or has it after this process has died."""
        text = f"process {os.getpid()} on {socket.gethostname()}, since {self._since}"
        os.pwrite(lock, f"{text}, writes {self._begun}".ljust(_SAID).encode(), 0)

    def _write_manifest(self, item: pathlib.Path) -> None:
        """Notes what there is, and then whether something of what was written is missing.

        What goes missing after that is missed when the step is restored.
        """
        self._trouble = ""
        try:
            with (item.parent / MANIFEST).open("w") as manifest:  # empty: the step is not whole
                paths = sorted(path for path in item.rglob("*") if path.is_file())
                files = {f"{ITEM}/{path.relative_to(item)}": _checksum(path) for path in paths}
                types = {leaf.path: leaf.type for leaf in self._leaves}
                self._trouble = "".join(missing(item)[:1])
                if not self._trouble:
                    json.dump(_Manifest.of(types, files)._asdict(), manifest, indent=1)
            sync_tree(item.parent)
        except Exception as error:  # noqa: BLE001  # of the disk, whatever it is
            self._trouble = text_of(error)


def _said_in(lock: int) -> str:
    return os.pread(lock, _SAID, 0).decode(errors="replace").strip()


def _checksum(path: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with _notes.regular(path) as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum
