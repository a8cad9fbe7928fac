"""Gives the program the same random numbers each time, where it asks for no seed of its own."""

import importlib.abc
import random
import sys
from typing import Any

_SEED = 0


def seed() -> None:
    """Seeds `random` now, and `numpy.random` as soon as it is there."""
    random.seed(_SEED)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(_SEED)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "numpy.random":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _seed_when_loaded(spec.loader)
                return spec
        return None


def _seed_when_loaded(loader: Any) -> None:
    run_module = loader.exec_module

    def exec_module(module: Any) -> None:
        run_module(module)
        module.seed(_SEED)

    loader.exec_module = exec_module
