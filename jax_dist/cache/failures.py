"""The programs that did not compile in earlier runs, and are not tried again.

`enable` keeps them beside the entries of the cache; `enable(retry=True)` or JAX_DIST_RETRY_FAILED=1
tries them again.
"""

import os
import pathlib

from jax_dist.cache import entries, ledger, paths
from jax_dist.cache.ledger import Failure

__all__ = ("Failure", "clear", "ls")


def ls(path: str | os.PathLike[str] | None = None) -> list[Failure]:
    """The failures that are noted, by key.

    Args:
      path: the folder of the cache; not given, that which `enable()` would take.

    >>> import tempfile
    >>> ls(tempfile.mkdtemp())
    []
    """
    return [failure for folder in _folders(path) for failure in ledger.read(folder)]


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
        for failure in ledger.read(folder):
            if function in (None, failure.function):
                ledger.forget(folder, failure.key)
                count += 1
    return count


def _folders(path: str | os.PathLike[str] | None) -> list[pathlib.Path]:
    return entries.folders(pathlib.Path(paths.chosen(path, os.environ)))
