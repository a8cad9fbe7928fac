"""Starts the recorder once the program has imported jax."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import Any


def start(*, library: str, **wanted: str) -> None:
    """Has the program recorded.

    Args:
      library: a folder that holds the package jax_dist, and nothing else.
      **wanted: what `record_verified` takes.
    """
    sys.meta_path.insert(0, _Finder(library, wanted))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find jax, and steps in when it is loaded."""

    def __init__(self, library: str, wanted: dict[str, str]):
        self._library = library
        self._wanted = wanted

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
            sys.path.append(self._library)  # last: the program may have a jax_dist of its own
            recorder = importlib.import_module("jax_dist.cache.recorder")
            recorder.record_verified(**self._wanted)

        spec.loader.exec_module = exec_module
        return spec
