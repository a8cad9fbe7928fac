"""What JAX is asked to compile, and under which key it looks for it."""

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import core

from jax_dist._compat import private
from jax_dist._compat.versions import config_value
from jax_dist.errors import UnsupportedError


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


CompileWatcher: TypeAlias = Callable[[CompileRequest], AbstractContextManager[None]]

_compile_watchers: list[CompileWatcher] = []
_watching = threading.local()  # `.inside`: this thread is within a watched request
_compile_hook_lock = threading.Lock()
_compile_hooks: list[Callable] = []
_EXPLAIN = "explain the keys of the persistent cache"


@contextlib.contextmanager
def compiles_watched(watcher: CompileWatcher) -> Iterator[None]:
    """Has `watcher(request)` entered around each compilation, in all threads.

    Events say that JAX compiles, not what. `compiler.compile_or_get_cached`, through which each
    program goes, with the same seven arguments: seen in 0.7.2, 0.10.2 and 0.12.0.1. The hook stays,
    for others may have hooked it since; without a watcher it only calls on.
    """
    _hook_compiles()
    _compile_watchers.append(watcher)
    try:
        yield
    finally:
        _compile_watchers.remove(watcher)


def _hook_compiles() -> None:
    private.part("jax._src.compiler", "compile_or_get_cached", use="see what is compiled")
    compiler: Any = importlib.import_module("jax._src.compiler")
    with _compile_hook_lock:
        if compiler.compile_or_get_cached in _compile_hooks:
            return
        original = compiler.compile_or_get_cached

        @functools.wraps(original)
        def watched(backend, computation, devices, compile_options, host_callbacks, *rest, **named):
            def go_on():
                return original(
                    backend, computation, devices, compile_options, host_callbacks, *rest, **named
                )

            if not _compile_watchers or getattr(_watching, "inside", False):
                return go_on()
            request = CompileRequest(backend, computation, devices, compile_options, host_callbacks)
            _watching.inside = True
            try:
                with contextlib.ExitStack() as watchers:
                    for watcher in tuple(_compile_watchers):
                        watchers.enter_context(watcher(request))
                    return go_on()
            finally:
                _watching.inside = False

        _compile_hooks.append(watched)
        compiler.compile_or_get_cached = watched


class _Asked(Exception):
    """Carries a request out of JAX before it is compiled."""


_OUTSIDE_KEY = "xla_dump_to"  # JAX leaves it out of its keys, on 0.7.2, 0.10.2 and 0.12.0.1


def compile_request(lowered: jax.stages.Lowered) -> CompileRequest:
    """What `lowered.compile()` would ask for; nothing is compiled, and nothing remembered."""
    thread, found = threading.get_ident(), []

    @contextlib.contextmanager
    def stop(request: CompileRequest) -> Iterator[None]:
        if threading.get_ident() == thread:
            found.append(request)
            raise _Asked
        yield

    with compiles_watched(stop), contextlib.suppress(_Asked):
        # With an option of its own: JAX remembers what it compiled, and would ask for nothing.
        lowered.compile({_OUTSIDE_KEY: ""})
    return found[0]


def describe_arguments(lowered: jax.stages.Lowered, types: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Removes the mesh from `lowered.args_info` for its last arguments, the user's."""
    infos, structure = jax.tree.flatten(lowered.args_info)
    hidden = len(infos) - len(types)
    for at, kind in enumerate(types, start=hidden):
        aval = core.ShapedArray(kind.shape, kind.dtype, weak_type=kind.weak_type)
        infos[at] = jax.stages.ArgInfo(aval, infos[at].donated)
    lowered.args_info = jax.tree.unflatten(structure, infos)


class _KeyLog:
    """In place of the logger of JAX's `cache_key`: hands on all it gets, and hears the hashes."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._local = threading.local()

    @contextlib.contextmanager
    def heard(self) -> Iterator[dict[str, str]]:
        self._local.hashes = hashes = {}
        try:
            yield hashes
        finally:
            self._local.hashes = None

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # the name that logging gave it
        listening = getattr(self._local, "hashes", None) is not None
        return listening or self._logger.isEnabledFor(level)

    def debug(self, text: str, *args: Any) -> None:
        hashes = getattr(self._local, "hashes", None)
        if hashes is not None and text.startswith("get_cache_key hash of serialized"):
            hashes[args[0]] = args[1]
        self._logger.debug(text, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def cache_key(request: CompileRequest) -> tuple[str, dict[str, str]]:
    """The key that JAX takes for a request, and the hash of each of its components.

    `compilation_cache.get_cache_key`, its DEBUG lines "get_cache_key hash of serialized %s: %s",
    and the two forms of its last argument (`IgnoreCallbacks` up to 0.10.2): seen in 0.7.2, 0.10.2
    and 0.12.0.1.

    Raises:
      UnsupportedError: this jax does not tell the components.
    """
    private.part("jax._src.cache_key", "logger", use=_EXPLAIN)
    get_key = private.part("jax._src.compilation_cache", "get_cache_key", use=_EXPLAIN)
    module: Any = importlib.import_module("jax._src.cache_key")
    with _compile_hook_lock:
        if not isinstance(module.logger, _KeyLog):
            module.logger = _KeyLog(module.logger)
    ignore: Any = bool(config_value("jax_remove_custom_partitioning_ptr_from_cache_key"))
    if hasattr(module, "IgnoreCallbacks"):
        kinds = module.IgnoreCallbacks
        ignore = kinds.CUSTOM_PARTITIONING if ignore else kinds.NO
    with module.logger.heard() as hashes:
        key = get_key(request.module, request.devices, request.options, request.backend, ignore)
    if not hashes:
        raise UnsupportedError(
            f"jax {jax.__version__} does not tell the components of its cache keys"
        )
    return key, dict(hashes)


def flags_outside_key() -> frozenset[str]:
    """The XLA flags that JAX leaves out of its keys: those that only dump, and a few more.

    `cache_key.xla_flags_to_exclude_from_cache_key`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    name = "xla_flags_to_exclude_from_cache_key"
    return frozenset(private.part("jax._src.cache_key", name, use=_EXPLAIN))
