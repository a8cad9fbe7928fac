"""The folders of checkpoints, one a step: each comes by one rename, and goes by one.

What is being written or removed lies in `.unfinished` meanwhile. So a process that is killed leaves
each step whole or not at all, and nothing that has to be judged.

A folder of Orbax's is a checkpoint if it has a manifest: its leaves, and the checksums of its
files. Orbax notices a file that is missing or cut short, but not always one with other bytes.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_dist import _notes
from jax_dist.multihost.leaves import TypedLeaf

_UNFINISHED = ".unfinished"
_DAMAGED = ".damaged"  # behind the number of a step that is set aside
NAME = "jax_dist.json"
_LONGEST = 1 << 26  # bytes
_PIECE = 1 << 20  # bytes read at a time


class StepFolders:
    """The steps in a folder. In several processes, rank 0 alone changes anything."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._unfinished = folder / _UNFINISHED

    def clean(self) -> None:
        """Makes the folder, and removes what an earlier run has begun."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(parents=True)
        shutil.rmtree(self._unfinished, ignore_errors=True)  # also where the disk is read-only

    def steps(self) -> list[int]:
        """The numbers, ascending."""
        try:
            names = [path.name for path in self._folder.iterdir() if path.is_dir()]
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def unfinished(self, step: int) -> pathlib.Path:
        """Where to write a step."""
        return self._unfinished / str(step)

    def begin(self, step: int) -> None:
        """Makes an empty folder there."""
        self.abandon(step)
        self.unfinished(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Removes what was written there so far."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def commit(self, step: int) -> None:
        """What was written is there from now on, also after the machine has lost its power."""
        sync_tree(self.unfinished(step))
        self.unfinished(step).rename(self.path(step))
        sync(self._folder)
        self._tidy()

    def keep(self, count: int) -> None:
        """Removes all but the newest."""
        for step in self.steps()[:-count]:
            going = self._unfinished / f"{step}.old"
            with contextlib.suppress(OSError):  # it stays, and is tried again at the next step
                self._unfinished.mkdir(exist_ok=True)
                self.path(step).rename(going)
                shutil.rmtree(going)
        self._tidy()

    def set_aside(self, step: int) -> None:
        """Takes a damaged step out of the way; nothing of it is lost."""
        aside = self._folder / f"{step}{_DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # something is left in it
            self._unfinished.rmdir()


def sync_tree(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            sync(os.path.join(folder, name))
        sync(folder)
    if path.is_file():
        sync(path)


def sync(path: str | pathlib.Path) -> None:
    """The same for one file, or for the names in one folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, tuple[int, int]]  # path in the folder to bytes and CRC-32
    digest: str  # of the two


def write(folder: pathlib.Path, leaves: Sequence[TypedLeaf]) -> None:
    """After all other files, and before the folder gets its name."""
    types = {leaf.path: leaf.type for leaf in leaves}
    files = {str(path.relative_to(folder)): _checksum(path) for path in _files(folder)}
    manifest = Manifest(types, files, _digest(types, files))
    (folder / NAME).write_text(json.dumps(manifest._asdict(), indent=1))


def read(folder: pathlib.Path) -> Manifest | None:
    """None where there is none that was written whole."""
    found = _notes.load(folder / NAME, Manifest, limit=_LONGEST)
    return found if found and found.digest == _digest(found.leaves, found.files) else None


def damages(folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """What is not as it was written, as in "d/73068e7c has 100 bytes instead of 374"."""
    for name, (size, checksum) in sorted(manifest.files.items()):
        path = folder / name
        try:
            if not path.is_file():
                yield f"{name} is not there"
            elif path.stat().st_size != size:
                yield f"{name} has {path.stat().st_size} bytes instead of {size}"
            elif _checksum(path)[1] != checksum:
                yield f"{name} has other bytes than were written"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)


def _digest(leaves: dict[str, str], files: dict[str, tuple[int, int]]) -> str:
    return hashlib.sha256(json.dumps([leaves, files], sort_keys=True).encode()).hexdigest()


def _checksum(path: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum
