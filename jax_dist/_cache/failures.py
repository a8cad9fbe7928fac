"""Records of failed compilations, so that a later run does not repeat them."""

import contextlib
import datetime
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jax_dist._files import write_atomically
from jax_dist.errors import CompilationError

_log = logging.getLogger("jax_dist.cache")
_TRANSIENT = ("UNAVAILABLE", "CANCELLED", "ABORTED", "DEADLINE_EXCEEDED")  # status codes of XLA


class _Failure(NamedTuple):
    """The record of a failed compilation."""

    error: str  # text of the error
    time: float  # when it failed, in seconds since 1970
    seconds: float  # that the compilation took


class FailureRecords:
    """Files in the cache directory, one for each program whose compilation failed."""

    def __init__(self, directory: pathlib.Path, *, retry: bool) -> None:
        self._directory, self._retry = directory, retry

    @contextlib.contextmanager
    def watch(self, name: str, key: str) -> Iterator[None]:
        """Record the error if the compilation in the block fails; a success removes the record.

        Raises:
          CompilationError: the compilation has failed before, and is not to be retried.
        """
        path = self._directory / f"{key}-failed.json"
        retry = self._retry or os.environ.get("JAX_DIST_RETRY_FAILED", "") not in ("", "0")
        failure = None if retry else _read(path)
        if failure is not None:
            age = datetime.timedelta(seconds=int(max(0, time.time() - failure.time)))
            raise CompilationError(
                f"Compilation of {name} failed {age} ago, after {failure.seconds:.0f} s, and is "
                f"not tried again: {failure.error}\nSet JAX_DIST_RETRY_FAILED=1 or delete "
                f"{path} to compile it again."
            )
        start = time.time()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(_TRANSIENT):
                raise
            failure = _Failure(str(error), time=time.time(), seconds=time.time() - start)
            try:
                write_atomically(path, json.dumps(failure._asdict()))
                error.add_note(f"This failure is recorded in {path}.")
            except OSError as problem:
                _log.warning("cannot write %s: %s", path, problem.strerror)
            raise
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: pathlib.Path) -> _Failure | None:
    """Return the record at a path, or None if it is absent or damaged."""
    try:
        record = json.loads(path.read_bytes())
        return _Failure(str(record["error"]), float(record["time"]), float(record["seconds"]))
    except (OSError, ValueError, TypeError, LookupError):
        return None
