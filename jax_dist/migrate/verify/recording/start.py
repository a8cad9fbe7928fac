"""Hooks that change modules as the recorded program imports them."""

import builtins
import collections
import functools
import importlib.abc
import os
import pkgutil
import random
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from . import calls


def start(
    *,
    mapped: str,
    old: Mapping[str, str],
    library: str = "",
    record: Mapping[str, Any] | None = None,
    ran: str = "",
    explain: str = "",
) -> None:
    """Make this process change modules when they are imported, as the arguments say.

    Args:
      mapped: the path of the vendored module, which has `device_put_sharded` and its like.
      old: names that newer jax removed, to put back, and those that take their place:
        `{"jax.tree_map": "jax.tree.map"}`.
      library: the folder of jax_dist, whose pmap replaces jax.pmap; "": jax.pmap stays.
      record: the arguments of `calls.Recorder`; None: no call is recorded.
      ran: the file that gets the lines where `__ran__(path, line, value)` ran; "": there are none.
      explain: the file that gets the reports of `jax_dist.explain`; "": there are none.
    """
    hooks: dict[str, list[Callable[[ModuleType], None]]] = collections.defaultdict(list)
    at_import = lambda module_name, hook: hooks[module_name].append(hook)
    at_import("jax", lambda jax: _restore_names(jax, old, mapped))
    if library:
        at_import("jax", lambda jax: _use_library(jax, library, explain))
    if record:
        calls.Recorder(**record).install(at_import)
    if ran:
        builtins.__ran__ = _make_marker(ran)  # type: ignore[attr-defined] # of marked texts
    if not library:
        random.seed(0)
        at_import("numpy.random", lambda numpy_random: numpy_random.seed(0))
    sys.meta_path.insert(0, _Finder(hooks))


def _restore_names(jax: ModuleType, names: Mapping[str, str], mapped: str) -> None:
    """Put back the names that jax removed, and the modules that held them; see `start`."""
    run_once = functools.cache(runpy.run_path)
    with warnings.catch_warnings():  # of the names that jax deprecates
        warnings.simplefilter("ignore")
        for old, new in names.items():
            module, _, name = old.rpartition(".")
            try:
                _put_back(_import_or_make(module), name, pkgutil.resolve_name(new))
            except (ImportError, AttributeError):
                continue  # this jax has no such new name
        for name in ("device_put_replicated", "device_put_sharded"):
            _put_back(jax, name, lambda *args, name=name: run_once(mapped)[name](*args))


def _put_back(module: ModuleType, name: str, value: Any) -> None:
    if not hasattr(module, name):
        setattr(module, name, value)


def _import_or_make(name: str) -> ModuleType:
    """Return a module of jax; make one that jax removed, bound in its package as imports do."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module = sys.modules[name] = ModuleType(name)
        package, _, last = name.rpartition(".")
        _put_back(_import_or_make(package), last, module)
        return module


def _use_library(jax: Any, folder: str, report_path: str) -> None:
    """Replace jax.pmap by jax_dist.pmap, which is imported from `folder` when it is first called.

    Each function that it maps then appends a report to the file `report_path`, unless that is "".
    """

    def pmap(fun: Any, *args: Any, **kwargs: Any) -> Any:
        if folder not in sys.path:
            sys.path.append(folder)
        import jax_dist

        mapped = jax_dist.pmap(fun, *args, **kwargs)
        return _report_first_call(mapped, fun, report_path) if report_path else mapped

    jax.pmap = functools.update_wrapper(pmap, jax.pmap)


def _report_first_call(mapped: Any, fun: Any, path: str) -> Any:
    """Return `mapped`, a pmap of `fun`, so that its first call appends a report to a file."""
    frame = sys._getframe(2)  # the program's
    place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
    is_reported = False

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        import jax.core

        import jax_dist

        nonlocal is_reported
        is_tracer = lambda leaf: isinstance(leaf, jax.core.Tracer)
        if not is_reported and not any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
            is_reported = True
            try:
                report = str(jax_dist.explain(mapped, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the program goes on
                report = f"{type(error).__name__}: {error}"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{place} {report}\0")  # `runs.explain` splits at the zero bytes
        return mapped(*args, **kwargs)

    return call


def _make_marker(records: str) -> Callable[[str, int, Any], Any]:
    """Return the function `__ran__` of marked texts: it notes each line once, in a file."""

    @functools.cache
    def note(path: str, line: int) -> None:
        with open(records, "a", encoding="utf-8") as file:
            file.write(f"{line} {path}\n")

    def ran(path: str, line: int, value: Any) -> Any:
        note(path, line)
        return value

    return ran


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python would, and calls hooks when they have been executed."""

    def __init__(self, hooks: dict[str, list[Callable[[ModuleType], None]]]):
        self._hooks = hooks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module, whose loader then calls its hooks; None if it has none.

        Hooks of the vendored module are found by its last name, since any package may hold it.
        """
        last = name.rpartition(".")[2]
        hooks = self._hooks.get(last if last == calls.VENDORED else name, [])
        others = (x for x in sys.meta_path if x is not self) if hooks else ()
        spec = next(filter(None, (x.find_spec(name, path, target) for x in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for hook in hooks:
                    hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this spec only
        return spec
