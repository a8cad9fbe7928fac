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
    number = os.open(os.path.join(folder, NAME), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(number, 1)  # no byte changes that is there already
        _shared = shared = mmap.mmap(number, 1)
    finally:
        os.close(number)
    # It closes the number of a file when it goes: after all else, for the program may have closed
    # that number itself, and opened another file that has it now.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: shared and None)


def tell() -> None:
    """Something could not be written down."""
    if _shared is not None:
        _shared[0] = 1
