"""Names that newer versions of jax removed, put back where one other name takes their place."""

import builtins
import functools
import importlib.util
import pkgutil
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_MISSING = object()


def install(
    at_import: Callable[[str, Callable[[ModuleType], None]], None],
    names: Mapping[str, str],
    mapped: str,
) -> None:
    """Put back each name when the module that had it is imported.

    Args:
      at_import: calls a function when a module has been executed.
      mapped: the path of the vendored module, which has `device_put_sharded` and its like.
    """
    by_module: dict[str, dict[str, str]] = {}
    for old, new in names.items():
        module, _, name = old.rpartition(".")
        by_module.setdefault(module, {})[name] = new
    for module, entries in by_module.items():
        if module != "jax":
            at_import(module, functools.partial(_put_back, entries=entries))

    def restore_in_jax(jax: ModuleType) -> None:
        _put_back(jax, by_module.get("jax", {}))
        for name in ("device_put_replicated", "device_put_sharded"):
            if _get(jax, name) is _MISSING:
                call = lambda *args, name=name: _run_once(mapped)[name](*args)
                setattr(jax, name, call)
        for name, entries in by_module.items():
            loaded = sys.modules.get(name)
            if loaded is not None and loaded is not jax:  # imported by jax itself: try again
                _put_back(loaded, entries)
            elif loaded is None and not _exists(name):
                sys.modules[name] = gone = ModuleType(name)
                gone.__path__ = []  # it may have had modules in it
                _put_back(gone, entries)
                above, _, last = name.rpartition(".")  # as an import would bind it
                if above in sys.modules and _get(sys.modules[above], last) is _MISSING:
                    setattr(sys.modules[above], last, gone)

    at_import("jax", restore_in_jax)


def _put_back(module: ModuleType, entries: Mapping[str, str]) -> None:
    for name, new in entries.items():
        if _get(module, name) is _MISSING and (value := _resolve(new)) is not _MISSING:
            setattr(module, name, value)


def _get(module: ModuleType, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return getattr(module, name)
        except Exception:  # noqa: BLE001 - deprecations of jax raise errors of several kinds
            return _MISSING


def _resolve(dotted: str) -> Any:
    """Return what a dotted name means, or `_MISSING`."""
    try:
        return pkgutil.resolve_name(dotted) if "." in dotted else getattr(builtins, dotted)
    except (ImportError, AttributeError):
        return _MISSING


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


_run_once = functools.cache(runpy.run_path)
