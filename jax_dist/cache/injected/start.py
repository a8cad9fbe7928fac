"""Has a program recorded that is being verified, with a cache of its own, once it imports jax."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any


def start(*, library: str, folder: str, cache: str) -> None:
    """Has the program recorded.

    Args:
      library: a folder that holds the package jax_dist, and nothing else.
      folder: where the record is written.
      cache: the directory of the persistent cache that the program is to use, whatever it says.
    """
    sys.meta_path.insert(0, _Finder(library, folder, cache))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find jax, and steps in when it is loaded."""

    def __init__(self, library: str, folder: str, cache: str):
        self._library = library
        self._folder = folder
        self._cache = cache

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            if importlib.util.find_spec("jax_dist") is None:  # else the program has its own
                sys.path.append(self._library)
            _record(module, self._folder, self._cache)

        spec.loader.exec_module = exec_module
        return spec


_until_the_end = contextlib.ExitStack()  # of the process


def _record(jax: Any, folder: str, cache: str) -> None:
    from jax_dist import _compat
    from jax_dist.cache.recorder import Recorder

    wanted = {
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,  # 0 lets JAX choose
    }

    def set_all(values: dict[str, object]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)

    @contextlib.contextmanager
    def in_private_cache(_: object) -> Iterator[None]:
        # Its own settings come back after each compilation: through jax 0.10.2 the directory is
        # part of the key, and one that varies is a cause to be told.
        own = {name: getattr(jax.config, name) for name in wanted}
        set_all(wanted)  # JAX opens the cache within the first compilation, and keeps it
        try:
            yield
        finally:
            set_all(own)

    # The recorder first, so that it sees the program's own settings.
    Recorder(folder, entries=cache).start()
    _until_the_end.enter_context(_compat.compiles_watched(in_private_cache))
