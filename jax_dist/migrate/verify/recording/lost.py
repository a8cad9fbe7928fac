"""Whether anything could not be written down: one byte of a file, shared by all processes of a run.

To tell it takes no open file, no room on the disk and no rights, for it is the lack of these that
keeps a process from writing.
"""

from __future__ import annotations

import mmap
import os

NAME = "lost"  # of the file, in the folder of the records

_shared: mmap.mmap | None = None  # forked processes have the same one


def install(folder: str) -> None:
    """Makes ready to tell it.

    Args:
      folder: of the records.
    """
    global _shared
    with open(os.path.join(folder, NAME), "a+b") as file:
        file.truncate(1)  # no byte changes that is there already
        _shared = mmap.mmap(file.fileno(), 1)


def tell() -> None:
    """Something could not be written down."""
    if _shared is not None:
        _shared[0] = 1
