"""Renames folders in an overlay as the disk below it would.

Linux refuses to rename a folder there that was in the lower layer, as if it went to another disk:
https://docs.kernel.org/filesystems/overlayfs.html#renaming-directories.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any


def install() -> None:
    """From now on, `os.rename` and `os.replace` move such a folder entry by entry."""
    for name in ("rename", "replace"):
        setattr(os, name, _moving(getattr(os, name)))


def _moving(rename: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(rename)
    def move(src: Any, dst: Any, **folders: Any) -> None:
        try:
            return rename(src, dst, **folders)
        except OSError as error:
            old, new = os.fsdecode(src), os.fsdecode(dst)
            if folders or error.errno != errno.EXDEV or not _is_one_disk(old, new):
                raise
        if os.path.lexists(new):
            os.rmdir(new)  # as rename, it refuses one that is not empty
        os.mkdir(new)
        for each in os.listdir(old):
            move(os.path.join(old, each), os.path.join(new, each))
        shutil.copystat(old, new)
        return os.rmdir(old)

    return move


def _is_one_disk(folder: str, target: str) -> bool:
    """Whether it is a folder, and the new name is on its disk: between two, Linux is right."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return False
    parent = os.path.dirname(os.path.abspath(target))
    return os.stat(folder).st_dev == os.stat(parent).st_dev
