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
    """Put back names that jax removed, each when the module that had it is imported.

    Args:
      at_import: calls a function with a module when that has been executed.
      names: removed names, with those that take their place: `{"jax.tree_map": "jax.tree.map"}`.
      mapped: the path of the vendored module, which has `device_put_sharded` and its like.
    """
    run_once = functools.cache(runpy.run_path)
    by_module: dict[str, dict[str, str]] = {}  # {"jax": {"tree_map": "jax.tree.map"}}
    for old, new in names.items():
        module, _, name = old.rpartition(".")
        by_module.setdefault(module, {})[name] = new
    for module, new_names in by_module.items():
        if module != "jax":
            at_import(module, functools.partial(_put_back, new_names=new_names))

    def restore_in_jax(jax: ModuleType) -> None:
        _put_back(jax, by_module.get("jax", {}))
        for name in ("device_put_replicated", "device_put_sharded"):
            if _get(jax, name) is _MISSING:
                call = lambda *args, name=name: run_once(mapped)[name](*args)
                setattr(jax, name, call)
        for name, new_names in by_module.items():
            if name in sys.modules:  # imported by jax itself, perhaps before the new names
                _put_back(sys.modules[name], new_names)
            elif not _exists(name):
                _add_module(name, new_names)

    at_import("jax", restore_in_jax)


def _put_back(module: ModuleType, new_names: Mapping[str, str]) -> None:
    for name, new in new_names.items():
        if _get(module, name) is _MISSING and (value := _resolve(new)) is not _MISSING:
            setattr(module, name, value)


def _add_module(name: str, new_names: Mapping[str, str]) -> None:
    """Add a module that jax removed, with its names, and bind it in its package as imports do."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []  # it may have had modules in it
    _put_back(module, new_names)
    package, _, last = name.rpartition(".")
    if package in sys.modules and _get(sys.modules[package], last) is _MISSING:
        setattr(sys.modules[package], last, module)


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
