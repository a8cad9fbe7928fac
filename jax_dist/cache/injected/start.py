"""Has a program recorded that is being verified, with a cache of its own, once it imports jax."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import Any


def start(*, library: str, folder: str, cache: str) -> None:
    """Has the program recorded.

    `library` is a folder that holds the package jax_dist, and nothing else; `folder` gets the
    record; `cache` is the directory of the persistent cache, whatever the program says.
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
            importlib.import_module("jax_dist.cache.recorder").start(self._folder, self._cache)

        spec.loader.exec_module = exec_module
        return spec
