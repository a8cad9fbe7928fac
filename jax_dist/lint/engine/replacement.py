"""Replaces files: one gets all of its new bytes or none, whatever ends this process meanwhile."""

import contextlib
import os


class ChangedError(OSError):
    """A file is no longer what it was when it was read."""


class KeptError(OSError):
    """A file that cannot be replaced without losing something of it."""


def write(path: str, data: bytes, *, expected: bytes | None = None, new: bool = False) -> None:
    """Replaces what a file holds; a reader sees the old bytes or the new ones.

    A link stays a link; permissions, owner and extended attributes stay as they are.

    Args:
      path: the file; it need not exist, but its folder must.
      data: what it shall hold.
      expected: what it must hold now.
      new: it must not exist.

    Raises:
      ChangedError: it holds something else than `expected`, or exists though it is `new`.
      KeptError: it may not be written to, has other names, or its attributes cannot be kept.
      OSError: it cannot be written.
    """
    real = os.path.realpath(path)
    temporary = f"{real}.{os.getpid()}.tmp"
    try:
        before = os.stat(real)
    except FileNotFoundError:
        before = None
    if before is not None:
        if new:
            raise ChangedError("it was made by somebody else meanwhile")
        if not before.st_mode & 0o222 or not os.access(real, os.W_OK):
            raise KeptError("it may only be read: chmod u+w lets it be changed")
        if before.st_nlink > 1:
            raise KeptError(
                f"it has {before.st_nlink} names (hard links), which a new file would part"
            )
    try:
        with open(temporary, "xb") as file:
            if before is not None:
                _keep_attributes(real, file.fileno(), before)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if expected is not None:
            with open(real, "rb") as file:
                if file.read() != expected:
                    raise ChangedError("it was changed by somebody else meanwhile")
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _keep_attributes(old: str, new: int, status: os.stat_result) -> None:
    made = os.stat(new)
    if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
        try:
            os.chown(new, status.st_uid, status.st_gid)
        except OSError as error:
            raise KeptError("it belongs to somebody else, and would not any more") from error
    os.chmod(new, status.st_mode & 0o7777)  # after chown, which may clear bits of it
    for name in os.listxattr(old) if hasattr(os, "listxattr") else ():
        value = os.getxattr(old, name)
        try:
            os.setxattr(new, name, value)
        except OSError as error:
            raise KeptError(f"its extended attribute {name} cannot be kept") from error
