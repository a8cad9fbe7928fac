"""Puts new bytes in the place of a file: all of them or none."""

import contextlib
import os


class ChangedError(OSError):
    """A file is no longer what it was when it was read."""


def write(path: str, data: bytes, *, expected: bytes | None = None) -> None:
    """Replaces what a file holds; whoever reads it meanwhile sees the old bytes or the new ones.

    A link stays a link, and the permissions of a file stay as they are.

    Args:
      path: the file; it need not exist, but its folder must.
      data: what it shall hold.
      expected: what it must hold now.

    Raises:
      ChangedError: it holds something else than `expected`.
      OSError: it cannot be written.
    """
    real = os.path.realpath(path)
    temporary = f"{real}.{os.getpid()}.tmp"
    mode = _mode(real)
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if expected is not None and _bytes(real) != expected:
            raise ChangedError("it was changed by somebody else meanwhile")
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _mode(path: str) -> int | None:
    try:
        return os.stat(path).st_mode & 0o7777
    except FileNotFoundError:
        return None
