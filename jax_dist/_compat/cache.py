"""The persistent compilation cache: where it reads, writes and compiles, and under which keys."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax import core

from jax_dist._compat import private
from jax_dist._compat.private import config_value


class _CacheWatcher(Protocol):
    """What `jax_dist.cache` does at the four places where JAX meets its persistent cache."""

    def open(self, path: str, max_size: int) -> Any | None:
        """The store of a folder, with JAX's `get(key)` and `put(key, value)`; None: JAX's own."""

    def found(self, name: str, saved: float) -> None:
        """A program was loaded, which saved so many seconds."""

    def unreadable(self, name: str, key: str, error: Exception) -> None:
        """There is an entry, which cannot be loaded; the program is compiled next."""

    def compiled(self, name: str, seconds: float, unwritten: str | None) -> None:
        """A program was compiled, and is written; or is not, for this reason."""

    def writes_everywhere(self) -> bool:
        """Whether also processes write that are not the first one."""
        ...


_CACHE_PARTS = {
    "jax._src.compilation_cache": (
        "LRUCache",
        "get_executable_and_time",
        "put_executable_and_time",
    ),
    "jax._src.compiler": ("_cache_read", "_cache_write", "_compile_and_write_cache"),
}
_WATCH = "make the persistent cache safe, and say what it does,"
_cache_watch_lock = threading.Lock()


def watch_cache(watcher: _CacheWatcher) -> None:
    """Hands what the persistent cache does in this process to `watcher`, from now on.

    JAX tells its listeners neither keys nor writes, writes from the first process only, in place,
    and never over a damaged entry; none of this can be set. The parts named in `_CACHE_PARTS`: seen
    in 0.7.2, 0.10.2 and 0.12.0.1, where they are called with the same first arguments.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    for name, parts in _CACHE_PARTS.items():
        for part in parts:
            private.part(name, part, use=_WATCH)
    cache, compiler = (importlib.import_module(name) for name in _CACHE_PARTS)
    with _cache_watch_lock:
        for module, part, watched in (
            (cache, "LRUCache", _watched_open),
            (compiler, "_cache_read", _watched_read),
            (compiler, "_cache_write", _watched_write),
            (compiler, "_compile_and_write_cache", _watched_compile),
        ):
            original = getattr(module, part)
            # Asked each time: someone who stepped in between may have put back what was there.
            if getattr(original, "watcher", None) is not watcher:
                ours = watched(getattr(original, "original", original), watcher)
                ours.watcher, ours.original = watcher, getattr(original, "original", original)
                setattr(module, part, ours)


def _watched_open(original: Callable, watcher: _CacheWatcher) -> Any:
    def lru_cache(path: str, *, max_size: int) -> Any:
        store = watcher.open(path, max_size)
        if store is not None:
            return store
        store = original(path, max_size=max_size)
        put = store.put

        def put_and_say(key: str, value: bytes) -> None:
            put(key, value)  # it does not say whether it wrote, but it raises where it could not
            say_unwritten(None)

        store.put = put_and_say
        return store

    return lru_cache


class _Written(threading.local):
    reason: str | None = None  # why the entry of this thread's program was not written


_written = _Written()


def say_unwritten(reason: str | None) -> None:
    """For a store, at the end of its `put`: why the entry was not written; None: it was."""
    _written.reason = reason


def _watched_read(original: Callable, watcher: _CacheWatcher) -> Any:
    """In place of the original, which warns of a damaged entry: an error under `-W error`."""
    del original
    cache = importlib.import_module("jax._src.compilation_cache")

    def cache_read(module_name: str, cache_key: str, *rest: Any) -> tuple[Any, int | None]:
        start = time.monotonic()
        try:
            executable, seconds = cache.get_executable_and_time(cache_key, *rest)
        except Exception as error:  # zlib, zstd, protobuf, XLA: each has its own
            if config_value("jax_raise_persistent_cache_errors"):
                raise
            watcher.unreadable(module_name, cache_key, error)
            return None, None
        if executable is not None:
            assert seconds is not None
            watcher.found(module_name, seconds - (time.monotonic() - start))
        return executable, seconds

    return cache_read


def _watched_write(original: Callable, watcher: _CacheWatcher) -> Any:
    cache = importlib.import_module("jax._src.compilation_cache")

    def cache_write(cache_key: str, seconds: float, module_name: str, *rest: Any) -> None:
        backend, executable, callbacks = rest[0], rest[1], rest[2:]  # callbacks: before 0.11
        say_unwritten(_not_to_be_written(seconds, callbacks) or "JAX could not serialize it")
        if backend.process_index() == 0 or _not_to_be_written(seconds, callbacks):
            return original(cache_key, seconds, module_name, *rest)
        if not watcher.writes_everywhere():
            return say_unwritten("only the first process writes")
        # What the original does in the first process; `put` of our stores does not raise.
        try:
            cache.put_executable_and_time(cache_key, module_name, executable, backend, int(seconds))
        except jax.errors.JaxRuntimeError:  # it has no serialized form
            if config_value("jax_raise_persistent_cache_errors"):
                raise
        return None

    return cache_write


def _not_to_be_written(seconds: float, callbacks: Sequence[Any]) -> str | None:
    """The reasons of JAX not to write an entry."""
    if not config_value("jax_compilation_cache_dir"):
        return "there is no cache directory"
    if any(callbacks):
        return f"it calls back into Python, which jax {jax.__version__} does not write"
    least = config_value("jax_persistent_cache_min_compile_time_secs")
    if seconds < least:
        return f"it compiled in less than {least:g} s"
    return None


def reset_cache() -> None:
    """Makes JAX look at the settings of its cache again, which it does once.

    `jax.experimental.compilation_cache.compilation_cache.reset_cache`: seen in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    module = "jax.experimental.compilation_cache.compilation_cache"
    private.part(module, "reset_cache", use="switch the persistent cache on in a running program")()


def _watched_compile(original: Callable, watcher: _CacheWatcher) -> Any:
    def compile_and_write(*args: Any) -> Any:
        say_unwritten("compiling it failed")  # what writes it says otherwise
        start = time.monotonic()
        try:
            return original(*args)
        finally:
            watcher.compiled(args[5], time.monotonic() - start, _written.reason)

    return compile_and_write


def refuses_host_callbacks() -> bool:
    """Whether this jax never writes a program with host callbacks: it asks before it writes.

    The parameters of `_cache_write`: six in 0.7.2 and 0.10.2, five in 0.12.0.1.
    """
    write = private.part("jax._src.compiler", "_cache_write", use=_WATCH)
    write = getattr(write, "original", write)  # watched, it takes whatever it is given
    return "host_callbacks" in inspect.signature(write).parameters


@dataclasses.dataclass(frozen=True, slots=True)
class CompileRequest:
    """A program that JAX is about to look up in its cache, or to compile."""

    backend: Any
    module: Any  # MLIR
    devices: np.ndarray
    options: Any  # of XLA
    host_callbacks: Sequence[Any]

    @property
    def name(self) -> str:
        """Such as "jit_step"."""
        return self.module.operation.attributes["sym_name"].value

    def key(self) -> str:
        """The key that JAX takes for it: its name, and a hash.

        `compilation_cache.get_cache_key`, and the two forms of its last argument
        (`IgnoreCallbacks` up to 0.10.2): seen in 0.7.2, 0.10.2 and 0.12.0.1.
        """
        get_key = private.part("jax._src.compilation_cache", "get_cache_key", use=_EXPLAIN)
        ignore: Any = bool(config_value("jax_remove_custom_partitioning_ptr_from_cache_key"))
        kinds = getattr(importlib.import_module("jax._src.cache_key"), "IgnoreCallbacks", None)
        if kinds is not None:
            ignore = kinds.CUSTOM_PARTITIONING if ignore else kinds.NO
        return get_key(self.module, self.devices, self.options, self.backend, ignore)


_CompileWatcher: TypeAlias = Callable[[CompileRequest], AbstractContextManager[None]]

_compile_watchers: list[_CompileWatcher] = []
_requesting = threading.local()  # `.inside`: this thread is within a watched request
_compile_hook_lock = threading.Lock()
_compile_hooks: list[Callable] = []
_EXPLAIN = "explain the keys of the persistent cache"


@contextlib.contextmanager
def compiles_watched(watcher: _CompileWatcher) -> Iterator[None]:
    """Has `watcher(request)` entered around each compilation, in all threads.

    Events say that JAX compiles, not what. `compiler.compile_or_get_cached`, through which each
    program goes, with the same seven arguments: seen in 0.7.2, 0.10.2 and 0.12.0.1. The hook stays,
    for others may have hooked it since; without a watcher it only calls on.
    """
    private.part("jax._src.compiler", "compile_or_get_cached", use="see what is compiled")
    compiler: Any = importlib.import_module("jax._src.compiler")
    with _compile_hook_lock:
        if compiler.compile_or_get_cached not in _compile_hooks:
            compiler.compile_or_get_cached = _watched_compiles(compiler.compile_or_get_cached)
            _compile_hooks.append(compiler.compile_or_get_cached)
    _compile_watchers.append(watcher)
    try:
        yield
    finally:
        _compile_watchers.remove(watcher)


def _watched_compiles(original: Callable) -> Callable:
    @functools.wraps(original)
    def watched(backend, computation, devices, compile_options, host_callbacks, *rest, **named):
        known = (backend, computation, devices, compile_options, host_callbacks)
        if not _compile_watchers or getattr(_requesting, "inside", False):
            return original(*known, *rest, **named)
        request = CompileRequest(*known)
        _requesting.inside = True
        try:
            with contextlib.ExitStack() as watchers:
                for watcher in tuple(_compile_watchers):
                    watchers.enter_context(watcher(request))
                return original(*known, *rest, **named)
        finally:
            _requesting.inside = False

    return watched


def describe_arguments(lowered: jax.stages.Lowered, types: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Removes the mesh from `lowered.args_info` for its last arguments, the user's."""
    infos, structure = jax.tree.flatten(lowered.args_info)
    hidden = len(infos) - len(types)
    for at, kind in enumerate(types, start=hidden):
        aval = core.ShapedArray(kind.shape, kind.dtype, weak_type=kind.weak_type)
        infos[at] = jax.stages.ArgInfo(aval, infos[at].donated)
    lowered.args_info = jax.tree.unflatten(structure, infos)


def flags_outside_key() -> frozenset[str]:
    """The XLA flags that JAX leaves out of its keys: those that only dump, and a few more.

    `cache_key.xla_flags_to_exclude_from_cache_key`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    name = "xla_flags_to_exclude_from_cache_key"
    return frozenset(private.part("jax._src.cache_key", name, use=_EXPLAIN))
