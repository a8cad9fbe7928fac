"""Starts the recorder once the program has imported jax."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from typing import Any


def start(*, root: str, folder: str, cache: str) -> None:
    """Has the program recorded.

    Args:
      root: the folder of the package jax_dist.
      folder: where the record is written.
      cache: the directory of the persistent cache that the program is to use, whatever it says.
    """
    sys.meta_path.insert(0, _Finder(root, folder, cache))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find jax, and steps in when it is loaded."""

    def __init__(self, root: str, folder: str, cache: str):
        self._root = root
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
            if importlib.util.find_spec("jax_dist") is None:
                _lend(self._root)
            recorder = importlib.import_module("jax_dist.cache.recorder")
            recorder.record_verified(folder=self._folder, cache=self._cache)

        spec.loader.exec_module = exec_module
        return spec


def _lend(root: str) -> None:
    """Ours by itself: with its folder on the path, all else that lies there would come too."""
    init = os.path.join(root, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "jax_dist", init, submodule_search_locations=[root]
    )
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["jax_dist"] = module
    spec.loader.exec_module(module)
