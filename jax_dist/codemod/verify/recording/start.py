"""Has the entry points hooked as soon as the program imports them; imports no jax itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import os
import sys
from collections.abc import Callable
from typing import Any

from . import journal, seeding

# Where the names live that make mapped functions.
_ENTRY_POINTS = {
    "jax": ("pmap", "shard_map", "jit"),
    "jax.experimental.shard_map": ("shard_map",),
    "jax_dist.mapping.pmap": ("pmap",),
}


def start(*, merged: bool = False, **wanted: Any) -> None:
    """Has the program recorded.

    Args:
      merged: the program records itself: it calls `pairs`.
      **wanted: `folder` and `files`, as `Recorder` takes them.
    """
    seeding.seed()
    journal.open_in(wanted["folder"])
    if merged:
        return
    finder = _Finder(wanted)
    sys.meta_path.insert(0, finder)
    dataclasses.dataclass = finder.hooking_helpers(dataclasses.dataclass)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and hooks what they load."""

    def __init__(self, wanted: dict[str, Any]):
        self._wanted = wanted
        self._files = frozenset(os.path.realpath(file) for file in wanted["files"])
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

    def hooking_helpers(self, dataclass: Callable) -> Callable:
        """`dataclass`, at whose call the helpers of migrated code are found.

        They may lie inside a script, which is nobody's import; below their `mapped`, they define
        a dataclass.
        """

        @functools.wraps(dataclass)
        def make(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            names = frame.f_globals
            if frame.f_locals is names and "mapped" in names and "_Program" not in names:
                file = os.path.realpath(frame.f_code.co_filename)
                if file in self._files:
                    self._hook(names, "mapped", names["mapped"], names["__name__"])
            return dataclass(*args, **kwargs)

        return make

    def _hook_when_loaded(self, fullname: str, loader: Any) -> None:
        run_module = loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            for name in _ENTRY_POINTS[fullname]:
                real = getattr(module, name, None)  # some modules make names when asked for them
                if real is not None:
                    self._hook(vars(module), name, real, module.__name__)

        loader.exec_module = exec_module

    def _hook(self, names: dict[str, Any], name: str, real: Callable, module: str) -> None:
        from . import hooks, recorder  # they import jax and numpy, which are imported already

        if self._recorder is None:
            self._recorder = recorder.CallRecorder(**self._wanted)
        names[name] = hooks.hooked(module, name, real, self._recorder)
