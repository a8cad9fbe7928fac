"""Has the entry points hooked as soon as the program imports them; imports no jax itself."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

# Where the names live that make mapped functions.
_ENTRY_POINTS = {
    "jax": ("pmap", "shard_map", "jit"),
    "jax.experimental.shard_map": ("shard_map",),
    "jax_dist.mapping.pmap": ("pmap",),
}


def start(**wanted: Any) -> None:
    """Has the program recorded.

    Args:
      **wanted: `folder`, `calls` and `files`, as `Recorder` takes them.
    """
    sys.meta_path.insert(0, _Finder(wanted))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and hooks what they load."""

    def __init__(self, wanted: dict[str, Any]):
        self._wanted = wanted
        self._recorder: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _ENTRY_POINTS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._hook_when_loaded(fullname, spec.loader)
                return spec
        return None

    def _hook_when_loaded(self, fullname: str, loader: Any) -> None:
        run_module = loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            for name in _ENTRY_POINTS[fullname]:
                if hasattr(module, name):
                    self._hook(module, name)

        loader.exec_module = exec_module

    def _hook(self, module: Any, name: str) -> None:
        from . import hooks, recorder  # they import jax and numpy, which are there by now

        if self._recorder is None:
            self._recorder = recorder.Recorder(**self._wanted)
        real = getattr(module, name)
        setattr(module, name, hooks.hooked(module.__name__, name, real, self._recorder))
