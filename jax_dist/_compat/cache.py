"""The persistent compilation cache: where it reads, writes and compiles."""

import dataclasses
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from jax_dist._compat import private
from jax_dist._compat.versions import config_value


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What XLA is given to compile."""

    backend: Any
    module: Any  # MLIR

    @property
    def platform(self) -> str:
        """Such as "cpu"."""
        return self.backend.platform

    def custom_calls(self) -> frozenset[str]:
        """The names of the functions outside XLA that it calls."""
        found, operations = set(), [self.module.operation]
        while operations:
            operation = operations.pop()
            if operation.name.endswith(".custom_call"):
                found.add(operation.attributes["call_target_name"].value)
            for region in operation.regions:
                for block in region.blocks:
                    operations += [inner.operation for inner in block.operations]
        return frozenset(found)


def custom_call_targets(platform: str) -> frozenset[str] | None:
    """The functions registered for custom calls so far; None if that cannot be known.

    `jax.ffi.register_ffi_target` has no counterpart that lists. `jaxlib.xla_client`'s
    `custom_call_targets`: seen in 0.7.2, 0.10.2 and 0.12.0.1. It knows those of CPUs; plugins, as
    for GPUs, keep their own.
    """
    if platform != "cpu":
        return None
    listed = private.find("jaxlib.xla_client", "custom_call_targets")
    # Through 0.7.2 the two interfaces of XLA have a table each, under these names.
    return None if listed is None else frozenset({*listed("cpu"), *listed("Host")})


class CacheWatcher(Protocol):
    """What `jax_dist.cache` does at the four places where JAX meets its persistent cache."""

    def open(self, path: str, max_size: int) -> Any | None:
        """The store of a folder, with JAX's `get(key)` and `put(key, value)`; None: JAX's own."""

    def found(self, name: str, key: str, saved: float) -> None:
        """A program was loaded, which saved so many seconds."""

    def unreadable(self, name: str, key: str, error: Exception) -> None:
        """There is an entry, which cannot be loaded; the program is compiled next."""

    def compiling(self, name: str, key: str, program: "CompiledProgram") -> None:
        """A program is about to be compiled. What this raises, the caller of the program sees."""

    def compiled(self, name: str, key: str, seconds: float, unwritten: str | None) -> None:
        """It was, and is written; or is not, for this reason."""

    def failed(
        self, name: str, key: str, program: "CompiledProgram", seconds: float, error: Exception
    ) -> None:
        """It was not."""

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


def watch_cache(watcher: CacheWatcher) -> None:
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


def _watched_open(original: Callable, watcher: CacheWatcher) -> Any:
    def lru_cache(path: str, *, max_size: int) -> Any:
        store = watcher.open(path, max_size)
        return _telling(original(path, max_size=max_size)) if store is None else store

    return lru_cache


def _telling(store: Any) -> Any:
    """JAX's own store; it does not say whether it wrote, but it raises where it could not."""
    put = store.put

    def put_and_say(key: str, value: bytes) -> None:
        put(key, value)
        say_unwritten(None)

    store.put = put_and_say
    return store


class _Written(threading.local):
    reason: str | None = None  # why the entry of this thread's program was not written


_written = _Written()


def say_unwritten(reason: str | None) -> None:
    """For a store, at the end of its `put`: why the entry was not written; None: it was."""
    _written.reason = reason


def _watched_read(original: Callable, watcher: CacheWatcher) -> Any:
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
            watcher.found(module_name, cache_key, seconds - (time.monotonic() - start))
        return executable, seconds

    return cache_read


def _watched_write(original: Callable, watcher: CacheWatcher) -> Any:
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


def _watched_compile(original: Callable, watcher: CacheWatcher) -> Any:
    def compile_and_write(*args: Any) -> Any:
        program = CompiledProgram(*args[:2])
        module_name, cache_key = args[5:7]
        watcher.compiling(module_name, cache_key, program)
        say_unwritten("JAX did not try")
        start = time.monotonic()
        try:
            executable = original(*args)
        except Exception as error:
            watcher.failed(module_name, cache_key, program, time.monotonic() - start, error)
            raise
        watcher.compiled(module_name, cache_key, time.monotonic() - start, _written.reason)
        return executable

    return compile_and_write


def refuses_host_callbacks() -> bool:
    """Whether this jax never writes a program with host callbacks: it asks before it writes.

    The parameters of `_cache_write`: six in 0.7.2 and 0.10.2, five in 0.12.0.1.
    """
    write = private.part("jax._src.compiler", "_cache_write", use=_WATCH)
    write = getattr(write, "original", write)  # watched, it takes whatever it is given
    return "host_callbacks" in inspect.signature(write).parameters
