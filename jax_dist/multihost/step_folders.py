"""The folders of checkpoints, one a step: each comes by one rename, and goes by one.

What is being written or removed lies in `.unfinished` meanwhile. So a process that is killed leaves
each step whole or not at all, and nothing that has to be judged.
"""

import contextlib
import os
import pathlib
import shutil

_UNFINISHED = ".unfinished"
_DAMAGED = ".damaged"  # behind the number of a step that is set aside


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
