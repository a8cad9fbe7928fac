"""Atomic writing of files, for the whole package."""

import contextlib
import errno
import os
import secrets
import stat

TEMPORARY_FILES = ".jax-dist-*.tmp"


def write_atomically(
    path: str | os.PathLike[str], data: str | bytes, *, expected: bytes | None = None
) -> None:
    """Replace the content of a file: a reader sees all of the old or all of the new.

    An existing file keeps its mode and owner; a link stays a link. Text becomes UTF-8. `expected`
    is the content that the file must still have; None: any.

    Raises:
      OSError: the file cannot be written, or has changed; `strerror` is fit for users.
    """
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    status = os.stat(real) if os.path.exists(real) else None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", real)
    temporary = os.path.join(directory, TEMPORARY_FILES.replace("*", secrets.token_hex(8)))
    try:  # before the mode of the file is checked: chmod does not help on a read-only file system
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(temporary, flags, 0o600 if status else 0o666)
    except OSError as error:
        raise OSError(error.errno, f"in {directory}: {error.strerror}", real) from error
    try:
        with open(descriptor, "wb") as file:
            if status is not None:
                _copy_owner_and_mode(real, status, temporary)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if expected is not None:
            with open(real, "rb") as file:
                if file.read() != expected:
                    raise OSError(errno.EBUSY, "it has changed since it was read", real)
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _copy_owner_and_mode(path: str, status: os.stat_result, new: str) -> None:
    """Give the file `new` the owner and mode of the file at `path`, whose status is known."""
    if not status.st_mode & 0o222:
        raise OSError(errno.EACCES, "it is read-only; chmod u+w makes it writable", path)
    new_status = os.stat(new)
    if (new_status.st_uid, new_status.st_gid) != (status.st_uid, status.st_gid):
        try:
            os.chown(new, status.st_uid, status.st_gid)
        except OSError as error:
            raise OSError(error.errno, "its owner and group would change", path) from error
    os.chmod(new, stat.S_IMODE(status.st_mode))  # last, since chown clears some bits
