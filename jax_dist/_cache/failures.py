"""Records of failed compilations, as in the cache of AWS Neuron."""

import contextlib
import datetime
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator

import jax

from jax_dist._files import write_atomically
from jax_dist.errors import CompilationError

_log = logging.getLogger("jax_dist.cache")
_TRANSIENT = ("UNAVAILABLE", "CANCELLED", "ABORTED", "DEADLINE_EXCEEDED")  # status codes of XLA


class FailureRecords:
    """Files next to the entries, one for each program whose compilation failed."""

    def __init__(self, directory: pathlib.Path, *, retry: bool) -> None:
        self._directory, self._retry = directory, retry

    @contextlib.contextmanager
    def watch(self, name: str, key: str) -> Iterator[None]:
        """Record an error of the compilation inside of the block; a success removes the record.

        Raises:
          CompilationError: the compilation has failed before, and is not to be retried.
        """
        path = self._directory / f"{key}-failed.json"
        retry = self._retry or os.environ.get("JAX_DIST_RETRY_FAILED", "") not in ("", "0")
        record = None if retry else _read(path)
        if record is not None:
            age = datetime.timedelta(seconds=int(max(0, time.time() - record["time"])))
            raise CompilationError(
                f"Compilation of {name} failed {age} ago, after {record['seconds']:.0f} s, and is "
                f"not tried again: {record['error']}\nSet JAX_DIST_RETRY_FAILED=1 or delete "
                f"{path} to compile it again."
            )
        start = time.time()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(_TRANSIENT):
                raise
            seconds = time.time() - start
            record = {"error": str(error), "time": start + seconds, "seconds": seconds}
            try:
                write_atomically(path, json.dumps(record))
                error.add_note(f"This failure is recorded in {path}.")
            except OSError as problem:
                _log.warning("cannot write %s: %s", path, problem.strerror)
            raise
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: pathlib.Path) -> dict | None:
    try:
        record = json.loads(path.read_bytes())
        return {"error": str(record["error"]), **{k: float(record[k]) for k in ("time", "seconds")}}
    except (OSError, ValueError, TypeError, LookupError):  # absent, or edited by hand
        return None
