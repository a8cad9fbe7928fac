"""Refuses what Python code does to files outside of the folders that a run may write to.

Where there is no overlay, this says which file it is, and what allows it. Native code and other
programs pass; where the system can, it stops them itself (`isolation.py`).
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_INSIDE = {  # what changes a file, or what a link leads to: where its path is
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime"), 0),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "os.chflags"), 0),
}
_NAMES = {  # what changes a folder: where paths and open folders are
    **dict.fromkeys(("os.remove", "os.rmdir"), ((0, 1),)),
    "os.mkdir": ((0, 2),),
    "os.symlink": ((1, 2),),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 2), (1, 3))),
}


def install(folder: str, writable: Sequence[str]) -> None:
    """From now on, Python code may write to these folders alone.

    Args:
      folder: of the records, where each refused path is written down.
      writable: all other paths are refused.
    """
    roots = [os.path.realpath(each) for each in writable]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            paths = [_real(path)] if isinstance(flags, int) and flags & _WRITES else []
        elif event in _INSIDE:
            paths = [_real(arguments[_INSIDE[event]])]
        elif event in _NAMES:
            paths = [_name(arguments[i], arguments[j]) for i, j in _NAMES[event]]
        elif event == "sqlite3.connect":
            paths = [_database(arguments[0])]
        else:
            return
        refuse(paths)

    def refuse(paths: Sequence[str]) -> None:
        for path in paths:
            if path and not any(path == each or path.startswith(each + os.sep) for each in roots):
                with open(os.path.join(folder, f"refused-{os.getpid()}.jsonl"), "a") as file:
                    file.write(json.dumps(path) + "\n")
                said = "--verify lets a run write to the project and to --scratch FOLDER alone"
                raise PermissionError(errno.EACCES, said, path)

    opened = os.open

    @functools.wraps(opened)
    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None and flags & _WRITES:  # of which the event does not tell
            refuse([os.path.realpath(_name(path, dir_fd))])
        return opened(path, flags, mode, dir_fd=dir_fd)

    os.open = open_
    sys.addaudithook(hook)


def _real(path: Any) -> str:
    """Where a path leads to; nothing of an open file."""
    return "" if isinstance(path, int) else os.path.realpath(os.fsdecode(path))


def _database(path: Any) -> str:
    """The file of a database that may be written to; nothing of one in memory."""
    name = os.fsdecode(path)
    if name.startswith("file:"):
        name, _, query = name.removeprefix("file:").partition("?")
        if "mode=ro" in query or "mode=memory" in query:
            return ""
        name = urllib.parse.unquote(name)
    return "" if name in ("", ":memory:") else os.path.realpath(name)


def _name(path: Any, folder: int) -> str:
    """The path itself, be it a link or not."""
    path = os.fsdecode(path)
    if folder != -1:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    parent, name = os.path.split(path.rstrip(os.sep))
    return os.path.join(os.path.realpath(parent), name)
