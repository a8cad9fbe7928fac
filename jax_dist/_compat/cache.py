"""The private places where JAX meets its persistent compilation cache."""

import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np
from jax import core

from jax_dist._compat import private
from jax_dist._compat.private import config_value

_MODULES = ("jax._src.compilation_cache", "jax._src.compiler")
_lock = threading.Lock()


class CacheWatcher(Protocol):
    """An observer of the persistent cache, which also provides its store."""

    def open_store(self, path: str) -> Any | None:
        """Return the store of a directory, with `get(key)` and `put(key, value)`; None: JAX's."""

    def is_enabled(self) -> bool:
        """Return whether every process writes, and not only the first."""
        ...

    def on_hit(self, name: str, seconds_saved: float) -> None:
        """Take note of a program that was loaded."""

    def on_unreadable(self, name: str, error: Exception) -> None:
        """Take note of an entry that cannot be loaded; its program is compiled next."""

    def compiling(self, name: str, key: str) -> AbstractContextManager[None]:
        """Return what is entered while a program is compiled; it may raise instead."""
        ...

    def on_compiled(self, name: str, key: str, seconds: float, reason: str | None) -> None:
        """Take note of a program that was compiled, and of the reason if JAX does not keep it."""


def watch_cache(watcher: CacheWatcher) -> None:
    """Hand what the persistent cache does in this process to `watcher`, from now on.

    JAX tells its listeners neither names nor keys, and writes from the first process only. Replaces
    `compilation_cache.get_file_cache` (the store), `compiler._cache_read` (hits; warns of a damaged
    entry, an error under -W error) and `compiler._compile_and_write_cache` (misses, failures, the
    other processes). Seen in 0.10.2 and 0.12.0.1, with the same first arguments.
    """
    use = "watch the persistent cache"
    cache: Any = importlib.import_module(_MODULES[0])
    compiler: Any = importlib.import_module(_MODULES[1])
    with _lock:
        if hasattr(compiler, "_jax_dist_watcher"):
            return
        open_file_cache = private.part(_MODULES[0], "get_file_cache", use=use)
        private.part(_MODULES[1], "_cache_read", use=use)
        compile_and_write = private.part(_MODULES[1], "_compile_and_write_cache", use=use)
        write = private.part(_MODULES[1], "_cache_write", use=use)
        # Taken by 0.10.2, which never writes a program with callbacks, and not by 0.12.0.1.
        refuses_callbacks = "host_callbacks" in inspect.signature(write).parameters
        compiler._jax_dist_watcher = watcher
        cache.get_file_cache = functools.partial(_open_file_cache, watcher, open_file_cache)
        compiler._cache_read = functools.partial(_read, watcher, cache)
        compiler._compile_and_write_cache = functools.partial(
            _compile_and_write, watcher, cache, compile_and_write, refuses_callbacks
        )


def _open_file_cache(watcher: CacheWatcher, original: Callable, path: str) -> Any:
    store = watcher.open_store(path)
    return original(path) if store is None else (store, path)


def _read(watcher: CacheWatcher, cache: Any, name: str, key: str, *rest: Any) -> Any:
    start = time.monotonic()
    try:
        executable, seconds = cache.get_executable_and_time(key, *rest)
    except Exception as error:  # zlib, zstd, protobuf and XLA have their own classes
        if config_value("jax_raise_persistent_cache_errors"):
            raise
        watcher.on_unreadable(name, error)
        return None, None
    if executable is not None:
        watcher.on_hit(name, seconds - (time.monotonic() - start))
    return executable, seconds


def _compile_and_write(watcher: CacheWatcher, cache: Any, original: Callable, *rest: Any) -> Any:
    refuses_callbacks, *arguments = rest
    backend, _, _, _, callbacks, name, key = arguments
    start = time.monotonic()
    seconds, reason = 0.0, "compiling it failed"
    try:
        with watcher.compiling(name, key):
            executable = original(*arguments)
        seconds = time.monotonic() - start
        reason = _reason_not_to_write(seconds, callbacks if refuses_callbacks else ())
        if reason is None and jax.process_index() != 0 and not watcher.is_enabled():
            reason = "only the first process writes"
        elif reason is None and jax.process_index() != 0:
            try:  # as the original does in the first process
                cache.put_executable_and_time(key, name, executable, backend, int(seconds))
            except jax.errors.JaxRuntimeError:  # it has no serialized form
                if config_value("jax_raise_persistent_cache_errors"):
                    raise
        return executable
    finally:
        watcher.on_compiled(name, key, seconds or time.monotonic() - start, reason)


def _reason_not_to_write(seconds: float, callbacks: Sequence[Any]) -> str | None:
    if not config_value("jax_compilation_cache_dir"):
        return "there is no cache directory"
    if callbacks:
        return f"it calls back into Python, which jax {jax.__version__} does not write"
    least = config_value("jax_persistent_cache_min_compile_time_secs")
    return f"it compiled in less than {least:g} s" if seconds < least else None


def reset_cache() -> None:
    """Have JAX read the settings of its cache again, which it does once.

    `jax.experimental.compilation_cache.compilation_cache.reset_cache`, seen in 0.10.2 and 0.12.0.1.
    """
    module = "jax.experimental.compilation_cache.compilation_cache"
    private.part(module, "reset_cache", use="turn the persistent cache on in a running program")()


def watch_cache_keys(watcher: Callable[[Any, np.ndarray, Any, str], None]) -> None:
    """Call `watcher(module, devices, options, key)` for each program that is looked up.

    `compilation_cache.get_cache_key`, seen in 0.10.2 and 0.12.0.1 with the same first arguments: it
    alone has the key and all that goes into it, before the cache is read.
    """
    original = private.part(_MODULES[0], "get_cache_key", use="record the keys of the cache")

    @functools.wraps(original)
    def get_cache_key(module: Any, devices: np.ndarray, options: Any, *rest: Any) -> str:
        key = original(module, devices, options, *rest)
        watcher(module, devices, options, key)
        return key

    cache: Any = importlib.import_module(_MODULES[0])
    cache.get_cache_key = get_cache_key


def describe_arguments(lowered: jax.stages.Lowered, types: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Remove the mesh from `lowered.args_info` for its last arguments, the user's."""
    infos, structure = jax.tree.flatten(lowered.args_info)
    hidden = len(infos) - len(types)
    for at, kind in enumerate(types, start=hidden):
        aval = core.ShapedArray(kind.shape, kind.dtype, weak_type=kind.weak_type)
        infos[at] = jax.stages.ArgInfo(aval, infos[at].donated)
    lowered.args_info = jax.tree.unflatten(structure, infos)
