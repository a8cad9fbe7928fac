"""Has the entry points hooked as soon as the program imports them; imports no jax itself."""

from __future__ import annotations

import importlib.abc
import re
import sys
from collections.abc import Callable
from typing import Any

from . import journal, seeding

# Where the names live that make mapped functions.
_ENTRY_POINTS = {
    "jax": ("pmap", "shard_map", "jit"),
    "jax.experimental.shard_map": ("shard_map",),
    "jax_dist.mapping.pmap": ("pmap",),
    "jax_dist.global_views.view": ("global_view",),
}


# Helper modules that were there before this migration.
_HELPERS = re.compile(r"(.*\.)?_mapped(_over)?(_devices)?")
_finder: _Finder | None = None


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
    global _finder
    _finder = _Finder(wanted)
    sys.meta_path.insert(0, _finder)


def record_helper(names: dict[str, Any]) -> None:
    """Has the `mapped` of these names recorded; migrated code calls it, below its own."""
    if _finder is not None:
        _finder.hook(names, "mapped", names["mapped"], names["__name__"])


def recorder() -> Any:
    """What writes calls down; None before the program has imported jax."""
    return None if _finder is None else _finder.recorder


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and hooks what they load."""

    def __init__(self, wanted: dict[str, Any]):
        self._wanted = wanted
        self.recorder: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        entries = ("mapped",) if _HELPERS.fullmatch(fullname) else _ENTRY_POINTS.get(fullname)
        if entries is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._hook_when_loaded(entries, spec.loader)
                return spec
        return None

    def _hook_when_loaded(self, entries: tuple[str, ...], loader: Any) -> None:
        run_module = loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            for name in entries:
                real = getattr(module, name, None)  # some modules make names when asked for them
                if real is not None:
                    self.hook(vars(module), name, real, module.__name__)

        loader.exec_module = exec_module

    def hook(self, names: dict[str, Any], name: str, real: Callable, module: str) -> None:
        from . import hooks, recorder  # they import jax and numpy, which are imported already

        if hasattr(real, "_is_recorded"):
            return
        if self.recorder is None:
            self.recorder = recorder.CallRecorder(**self._wanted)
        names[name] = hooks.hooked(module, name, real, self.recorder)
