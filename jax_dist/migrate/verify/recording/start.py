"""Has the entry points hooked as soon as the program imports them, and is what its marks call.

Imports no jax itself: it waits for the program to do so, for that may take settings. The number of
each place that runs is on disk immediately.
"""

from __future__ import annotations

import importlib.abc
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import guard, lost, renames
from .flow import Flow

# Where the names live that make mapped functions.
_ENTRY_POINTS = {
    "jax": ("pmap", "shard_map", "jit"),
    "jax.experimental.shard_map": ("shard_map",),
    "jax_dist.pmap": ("pmap",),
    "jax_dist.global_view.view": ("global_view",),
}
# Helper modules that were there before this migration.
_HELPERS = re.compile(r"(.*\.)?_mapped(_over)?(_devices)?")
_SEED = 0

_folder = ""  # of the records; each process has a file of its own there
_lock = threading.RLock()
_told: set[str] = set()  # of places
_wanted: dict[str, Any] | None = None  # what the recorder takes
_recorder: Any = None  # there is none before the program has imported jax


def start(*, watched: bool = False, writable: Sequence[str] = (), **wanted: Any) -> None:
    """Has the program recorded.

    Args:
      watched: its expressions tell their values.
      writable: the only folders that it may write to; none: any, in an overlay.
      **wanted: `folder` and `files`, as `CallRecorder` takes them.
    """
    global _folder, _wanted
    # The same random numbers each time, where the program asks for no seed of its own.
    random.seed(_SEED)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(_SEED)
    else:
        sys.meta_path.insert(0, _Finder(_seeding))
    _folder = wanted["folder"]
    lost.install(_folder)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew_lock)
    if writable:
        guard.install(_folder, writable)
    else:
        renames.install()
    if watched:
        wanted["flow"] = Flow()
        wanted["flow"].install()
    _wanted = wanted
    sys.meta_path.insert(0, _Finder(_hooking))


def _renew_lock() -> None:
    """In a forked process: there is no thread that would release it."""
    global _lock
    _lock = threading.RLock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and acts on what they load."""

    def __init__(self, action: Callable[[str], Callable[[Any], None] | None]):
        self._action = action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        action = self._action(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _when_loaded(spec.loader, action)
                return spec
        return None


def _when_loaded(loader: Any, action: Callable[[Any], None]) -> None:
    run_module = loader.exec_module

    def exec_module(module: Any) -> None:
        run_module(module)
        action(module)

    loader.exec_module = exec_module


def _seeding(module: str) -> Callable[[Any], None] | None:
    if module != "numpy.random" or module in sys.modules:  # when loaded again, it keeps its state
        return None
    return lambda loaded: loaded.seed(_SEED)


def _hooking(module: str) -> Callable[[Any], None] | None:
    entries = ("mapped",) if _HELPERS.fullmatch(module) else _ENTRY_POINTS.get(module)
    if entries is None:
        return None

    def hook(loaded: Any) -> None:
        for name in entries:
            real = getattr(loaded, name, None)  # some modules make names when asked for them
            if real is not None:
                _hook(vars(loaded), name, real, loaded.__name__)

    return hook


def hook_loaded() -> None:
    """Hooks what the program has imported already, where the recording starts late."""
    for name in _ENTRY_POINTS.keys() & sys.modules.keys():
        if (hook := _hooking(name)) is not None:
            hook(sys.modules[name])


def _hook(names: dict[str, Any], name: str, real: Callable, module: str) -> None:
    from . import recorder  # it imports jax and numpy, which are imported already

    global _recorder
    if hasattr(real, "_recorded_make"):  # by its own text, or another one of its names
        return
    if _recorder is None:
        assert _wanted is not None
        _recorder = recorder.CallRecorder(**_wanted)
    names[name] = _recorder.hooked(module, name, real)


def record_helper(names: dict[str, Any]) -> None:
    """Has the `mapped` of these names recorded; migrated code calls it, below its own."""
    if _wanted is not None:
        _hook(names, "mapped", names["mapped"], names["__name__"])


# --- what marked programs call


def ran(number: int) -> None:
    """The statement of a place is about to run."""
    _tell(f"{number}\n")


def place(number: int, value: Any) -> Any:
    """The value of a place, from here on with the calls of this one.

    Args:
      number: of the place.
      value: what maps functions, a mapped function, or anything.
    """
    ran(number)
    found = None if _recorder is None else _recorder.placed(number, value)
    if found is None:
        _tell(f"{number} alone\n")
    return value if found is None else found


def _tell(line: str) -> None:
    with _lock:
        if line not in _told:
            _told.add(line)
            try:
                with open(os.path.join(_folder, f"places-{os.getpid()}.txt"), "a") as file:
                    file.write(line)
            except OSError:  # a program that may not write goes on all the same
                lost.tell()


def host(number: int, function: Callable[[Any], Any], value: Any) -> Any:
    """What a host edit gives, written down.

    Args:
      number: its own.
      function: what it puts around the value.
      value: what it takes.
    """
    return function(value) if _recorder is None else _recorder.host(number, function, value)
