"""The programs that did not compile in earlier runs, and are not tried again.

`enable` keeps them beside the entries of the cache, each in a file that says when, why and under
which circumstances; `enable(retry=True)` or JAX_DIST_RETRY_FAILED=1 tries them again.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

from jax_dist import _notes
from jax_dist._exceptions import text_of
from jax_dist.cache import entries, store
from jax_dist.cache.store import replace
from jax_dist.errors import FailedBeforeError, message

_SUFFIX = "-failure"
_CERTAIN = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
_NOT_FOUND = "NOT_FOUND"  # certain of a function outside XLA; else it may be a file
_OF_THE_MOMENT = re.compile(
    r"out of memory|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE|CANCELLED|No space left|signal",
    re.IGNORECASE,
)
NOT_REGISTERED = "not registered"
CALL = "custom call "  # begins the name of one, in what a failure depends on
_LONGEST = 1 << 16  # characters of a reason; XLA may add the whole program

__all__ = ("CompilationFailure", "clear", "ls")


@dataclasses.dataclass(frozen=True, slots=True)
class CompilationFailure:
    """A program that did not compile."""

    function: str
    key: str
    reason: str  # as XLA says it, beginning with its code
    seconds: float  # until it failed
    at: str  # UTC, as 2026-11-21 14:40
    under: dict[str, str]  # what it depends on beside its key, by name

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def raise_if_failed(
    folder: pathlib.Path, key: str, under: Callable[[], dict[str, str] | None]
) -> None:
    """Raises FailedBeforeError where an earlier run could not compile the program either.

    Args:
      folder: of the cache.
      key: of the program.
      under: gives what a failure depends on beside the key, as it is now.
    """
    failure = _notes.load(_path(folder, key), CompilationFailure)
    if failure is None or failure.key != key or failure.under != under():
        return
    first = failure.reason.splitlines()[0]
    raise FailedBeforeError(
        message(
            what=f"{failure.function} is not compiled",
            which=[f"on {failure.at} UTC it failed, after {failure.seconds:.1f} s: {first}"],
            why="the same program, for the same devices, flags and custom calls, fails again",
            do="Change it; or set JAX_DIST_RETRY_FAILED=1, or enable(retry=True), to try again. "
            "`jax-dist cache failures` lists them all.",
        )
    )


def note(
    folder: pathlib.Path,
    function: str,
    key: str,
    under: dict[str, str] | None,
    seconds: float,
    error: Exception,
) -> bool:
    """Notes a failure, if it is of a kind that comes again; says whether it did.

    Args:
      folder: of the cache.
      function: what did not compile.
      key: its key in the cache.
      under: what the failure depends on beside the key; None where it cannot be told.
      seconds: how long that took.
      error: what XLA raised.
    """
    reason = text_of(error)[:_LONGEST]
    if under is None or _OF_THE_MOMENT.search(reason):
        return False
    if reason.startswith(_NOT_FOUND):
        missing = (name for name, state in under.items() if state == NOT_REGISTERED)
        if not any(name.removeprefix(CALL) in reason for name in missing):
            return False
    elif not reason.startswith(_CERTAIN):
        return False
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    failure = CompilationFailure(function, key, reason, round(seconds, 3), at, under)
    try:
        replace(_path(folder, key), json.dumps(failure.to_dict(), sort_keys=True).encode())
    except OSError:  # a full disk; what the user must see is why it did not compile
        return False
    return True


def forget(folder: pathlib.Path, key: str) -> None:
    """Takes a note away, if there is one."""
    with contextlib.suppress(OSError):  # none, or read-only
        _path(folder, key).unlink()


def _path(folder: pathlib.Path, key: str) -> pathlib.Path:
    return folder / f"{key}{_SUFFIX}"


def ls(path: str | os.PathLike[str] | None = None) -> list[CompilationFailure]:
    """The failures that are noted, by key.

    Args:
      path: the folder of the cache; not given, that which `enable()` would take.

    >>> import tempfile
    >>> ls(tempfile.mkdtemp())
    []
    """
    return [failure for folder in _folders(path) for failure in _noted(folder)]


def clear(path: str | os.PathLike[str] | None = None, *, function: str | None = None) -> int:
    """Forgets them, so that the next run tries again.

    Args:
      path: the folder of the cache; not given, that which `enable()` would take.
      function: only those of this program, such as "jit_step".

    Returns:
      How many were forgotten.

    >>> import tempfile
    >>> clear(tempfile.mkdtemp())
    0
    """
    count = 0
    for folder in _folders(path):
        for failure in _noted(folder):
            if function in (None, failure.function):
                forget(folder, failure.key)
                count += 1
    return count


def _folders(path: str | os.PathLike[str] | None) -> list[pathlib.Path]:
    return entries.folders(pathlib.Path(store.chosen(path, os.environ)))


def _noted(folder: pathlib.Path) -> list[CompilationFailure]:
    noted = (_notes.load(path, CompilationFailure) for path in sorted(folder.glob(f"*{_SUFFIX}")))
    return [failure for failure in noted if failure is not None]
