"""Inside a program that is being verified: a cache of its own, and a record of what it compiles."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_dist import _compat
from jax_dist.cache.recorder import Recorder

_until_the_end = contextlib.ExitStack()  # of the process


def start(*, folder: str, cache: str) -> None:
    """Begins to record.

    Args:
      folder: where the record is written.
      cache: the directory that the program is to use, whatever it says itself.
    """
    # The recorder first, so that it sees the program's own settings.
    Recorder(Path(folder), entries=cache).start()
    _until_the_end.enter_context(_compat.compiles_watched(_PrivateCache(cache).around))


class _PrivateCache:
    """Has programs looked up and written elsewhere than the program says.

    Its own settings come back after each compilation: through jax 0.10.2 the directory is part of
    the key, and one that varies is a cause to be told.
    """

    def __init__(self, directory: str) -> None:
        self._wanted = {
            "jax_compilation_cache_dir": directory,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,  # 0 lets JAX choose
        }

    @contextlib.contextmanager
    def around(self, request: _compat.CompileRequest) -> Iterator[None]:
        """As a watcher of compilations."""
        del request
        own = {name: _compat.config_value(name) for name in self._wanted}
        _set(self._wanted)  # JAX opens the cache within the first compilation, and keeps it
        try:
            yield
        finally:
            _set(own)


def _set(values: dict[str, object]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
