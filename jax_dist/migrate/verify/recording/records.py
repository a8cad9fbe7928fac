"""The folder of one process, and the events that it writes there; a forked process has its own.

What a process knows of its mapped functions, a fork knows too: its folder begins with what was
written of them. It is made when something is written, for most forks map nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from . import lost

_EVENTS = "calls.jsonl"
# What happened in the parent did not happen in the fork.
_OF_CALLS = tuple(
    f'{{"event": {json.dumps(name)}' for name in ("call", "called", "total", "problem")
)


class Records:
    """Where one process writes.

    Args:
      folder: where the folders of the processes are made.
    """

    def __init__(self, folder: str):
        self._folder = _own_folder(os.path.join(folder, "process"), 0)
        self.lock: threading.RLock = threading.RLock()
        self._process = os.getpid()
        self._lines = 0  # that were written
        self._forks = 0
        self._inherited: tuple[str, int] | None = None  # of a fork: what it begins with

    def after_forks(self, action: Callable[[], None]) -> None:
        """Each fork gets a folder.

        Args:
          action: what else is to be done in a fork.
        """

        def before() -> None:
            self.lock.acquire()  # what another thread writes is written as a whole
            self._forks += 1

        def in_child() -> None:
            # Its number tells it from others in the same way in each run.
            folder, self._folder = self._folder, f"{self._folder}-{self._forks}"
            self._inherited = self._inherited or (folder, self._lines)
            self._process, self._forks, self.lock = os.getpid(), 0, threading.RLock()
            action()

        if hasattr(os, "register_at_fork"):
            release = lambda: self.lock.release()
            os.register_at_fork(before=before, after_in_parent=release, after_in_child=in_child)

    @property
    def is_own(self) -> bool:
        """Whether it is this process that writes here: Python may not have been told of a fork."""
        if os.getpid() == self._process:
            return True
        lost.tell()
        return False

    def folder(self) -> str:
        """That of the process, which is there."""
        with self.lock:
            if self._inherited is not None:
                origin, lines = self._inherited
                stem, _, number = self._folder.rpartition("-")
                self._folder = _own_folder(stem, int(number))
                self._inherited, self._lines = None, 0
                if lines:
                    with open(os.path.join(origin, _EVENTS)) as file:
                        known = [*itertools.islice(file, lines)]
                    self._append(*(each for each in known if not each.startswith(_OF_CALLS)))
                    self._append(json.dumps({"event": "forked"}) + "\n")
            return self._folder

    def write(self, **event: Any) -> None:
        """Writes an event down; that it cannot be written is no matter of the program's."""
        if self.is_own:
            try:
                with self.lock:
                    self.folder()
                    self._append(json.dumps(event) + "\n")
            except BaseException as problem:
                lost.tell()
                if not isinstance(problem, Exception):
                    raise

    def _append(self, *lines: str) -> None:
        with open(os.path.join(self._folder, _EVENTS), "a") as file:
            file.writelines(lines)
        self._lines += len(lines)

    @property
    def is_begun(self) -> bool:
        """Whether there is a folder: a fork that maps nothing needs none."""
        return self._inherited is None


def _own_folder(stem: str, number: int) -> str:
    """The next free number; making a folder either succeeds or finds it taken."""
    while True:
        own = f"{stem}-{number}"
        try:
            os.mkdir(own)
            return own
        except FileExistsError:
            number += 1
