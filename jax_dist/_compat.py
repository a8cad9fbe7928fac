"""Every name that differs between JAX versions, and the few private symbols, with their reasons."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from jax_dist._errors import UnsupportedError

NESTED_MANUAL_AXIS_INDEX = jax.__version_info__ >= (0, 8)
"""Whether `axis_index` lowers inside a shard_map that is nested in another one.

On 0.7.2 it fails with "operates on axis 'i' which is already bound by a parent"; seen to work on
0.10.2 and 0.12.0.1. Not a name to ask for, so the version is compared.
"""


CPU_HANGS_WHEN_FULL = jax.__version_info__ < (0, 12)
"""Whether the CPU backend hangs over more than 32 executions on several devices in flight.

With 8 devices, 400 calls of a psum hang on 0.10.2 and abort on 0.7.2; on 0.12.0.1 they do not. No
version in between was tried.
"""


_REWRAP = "_rewrap_with_aval_and_sharding"


def can_rewrap() -> bool:
    """Whether `rewrap` takes the fast way. Starts the backend."""
    return hasattr(jnp.zeros(()), _REWRAP)


def rewrap(array: jax.Array, aval: ShapedArray, sharding: NamedSharding) -> jax.Array:
    """The same buffers seen as another array: `[local, *s]` as `[global, *s]`, or back.

    The public `make_array_from_single_device_arrays` does the same at 15-47 us a leaf; a host-local
    call is then 2.2 times as slow as that of `jax.pmap`, which calls this private method itself.
    `_rewrap_with_aval_and_sharding`: seen in 0.10.2 and 0.12.0.1; absent in 0.7.2.
    """
    fast = getattr(array, _REWRAP, None)
    if fast is not None:
        return fast(aval, sharding)
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, [shard.data for shard in array.addressable_shards]
    )


def put_slices(
    aval: ShapedArray,
    sharding: NamedSharding,
    slices: Sequence[np.ndarray],
    devices: Sequence[jax.Device],
) -> jax.Array:
    """An array of all processes from NumPy slices, one for each device of this process.

    The public `make_array_from_callback` does the same at 25 us more, and a call with a NumPy batch
    is then slower than that of `jax.pmap`, which calls this function itself.
    `pxla.batched_device_put`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    put = getattr(_pxla, "batched_device_put", None)
    if put is not None:
        return put(aval, sharding, slices, devices)
    found = [jax.device_put(part, device) for part, device in zip(slices, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, found)


_pxla = importlib.import_module("jax._src.interpreters.pxla")


def auto_mesh(devices: np.ndarray, names: Sequence[object]) -> Mesh:
    """A mesh of Auto axes. Spelled out: the default of `make_mesh` became Explicit in 0.9."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(devices, tuple(names), axis_types=auto)


def is_dropped(var: object) -> bool:
    """Whether an output variable of an equation stands for a value that nobody reads.

    `DropVar` has no public name; its class name was the same in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    return type(var).__name__ == "DropVar"


@dataclasses.dataclass(frozen=True, slots=True)
class JitOptions:
    """What was said to `jax.jit`, as far as a jit around it has to repeat it."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None


def jit_options(fun: Any) -> JitOptions:
    """The options of a jit object; the defaults for any other callable.

    A jit object tells what it donates (`trace(...).args_info`), but not which arguments are static.
    `_jit_info`: seen in 0.7.2, 0.10.2 and 0.12.0.1. Where a jit object has it not, there is no
    default: taking a static argument for an array would fail far from here.
    """
    if not (hasattr(fun, "lower") and hasattr(fun, "clear_cache")):
        return JitOptions()
    info = fun._jit_info
    return JitOptions(
        static_argnums=tuple(info.static_argnums),
        static_argnames=tuple(info.static_argnames),
        donate_argnums=tuple(info.donate_argnums),
        donate_argnames=tuple(info.donate_argnames),
        keep_unused=bool(info.keep_unused),
        compiler_options=dict(info.compiler_options_kvs) or None,
    )


CACHES_HOST_CALLBACKS = jax.__version_info__ >= (0, 12)
"""Whether a program with a host callback is written to the persistent cache.

Compiled anew in every process on 0.10.2; written, and found again, on 0.12.0.1. Not a name to ask
for, so the version is compared.
"""


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes along which a value may differ between devices, as far as its type says.

    Under `check_vma=False` the type says nothing, and this is empty. There is no default: "differs
    nowhere" would let a wrong sum through (it did: `aval.vma` was gone, and the result 42 times too
    large). `manual_axis_type`: seen in 0.10.2 and 0.12.0.1.
    """
    return aval.manual_axis_type.varying


def is_unreduced(aval: Any) -> bool:
    """Whether the type says that a sum over devices is still to come, or has to be undone."""
    return bool(aval.manual_axis_type.unreduced or aval.manual_axis_type.reduced)


def to_varying(value: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """The value, typed as if it could differ along `axes`. `pcast` is public since 0.9."""
    return jax.lax.pcast(value, tuple(axes), to="varying")


@dataclasses.dataclass(frozen=True, slots=True)
class ScanLayout:
    """Which inputs and outputs of a scan (and of its body, in the same order) are which."""

    constants: tuple[int, ...]
    carries_in: tuple[int, ...]
    carries_out: tuple[int, ...]


def scan_layout(params: Mapping[str, Any], inputs: int, outputs: int) -> ScanLayout:
    """Counts in 0.10.2 (`num_consts`, `num_carry`), trees in 0.12.0.1 (`ft_in`, `ft_out`)."""
    if "ft_in" in params:
        constants, carries, _ = params["ft_in"].update(range(inputs)).unpack()
        carries_out, _ = params["ft_out"].update(range(outputs)).unpack()
        return ScanLayout(tuple(constants), tuple(carries), tuple(carries_out))
    first, count = params["num_consts"], params["num_carry"]
    places = tuple(range(first, first + count))
    return ScanLayout(tuple(range(first)), places, tuple(range(count)))


def call_of(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """An equation that calls a jaxpr, as a jit does that was traced to it.

    `jax.jit` would trace again. The parameters are those of an equation that JAX has just made, in
    the same context, spread over as many operands; their names: seen in 0.10.2 and 0.12.0.1.
    """
    model = jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0).eqns[0]
    ins, outs = len(jaxpr.in_avals), len(jaxpr.out_avals)
    counts = {
        "in_shardings": ins,
        "in_layouts": ins,
        "donated_invars": ins,
        "out_shardings": outs,
        "out_layouts": outs,
    }
    spread = {name: (model.params[name][0],) * count for name, count in counts.items()}
    params = {**model.params, **spread, "jaxpr": jaxpr, "name": "as_it_is"}
    return model.replace(params=params, outvars=jaxpr.jaxpr.outvars, effects=jaxpr.effects)


CAN_REWRITE = jax.__version_info__ >= (0, 10)
"""Whether jaxprs are such as the passes know them: jit of shard_map, typed by `manual_axis_type`.

Before 0.8 a pmap is a primitive of its own; before 0.10 the types are named otherwise.
"""


def inside_jit(fun: Any) -> Callable:
    """The function in a jit object, which may remember a trace; `fun` where that says shardings."""
    if not (hasattr(fun, "lower") and hasattr(fun, "clear_cache")):
        return fun
    info: Any = fun._jit_info
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    said = any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
    return fun if said else fun.__wrapped__


def jit_like(fun: Any) -> Any:
    """`fun` if it is a jit object, else `jax.jit(fun)`."""
    return fun if hasattr(fun, "clear_cache") and hasattr(fun, "trace") else jax.jit(fun)


@dataclasses.dataclass(frozen=True, slots=True)
class TakenPmap:
    """A `jax.pmap` that is being called, in the words of `jax.pmap`, its arguments flattened."""

    fun: Callable  # of (args, kwargs), static arguments bound
    in_tree: Any  # of (args, kwargs)
    in_axes: tuple[int | None, ...]
    out_axes: Any
    axis_name: Any
    devices: tuple[jax.Device, ...] | None
    backend: str | None
    axis_size: int | None


class _Takeover(threading.local):
    run: Callable[[TakenPmap, Sequence[Any]], Any] | None = None


_takeover = _Takeover()
_takeover_lock = threading.Lock()
_originals: dict[str, Callable] = {}  # while any thread has taken over
_takeover_count = [0]
_PMAP_PARTS = (
    "_get_mesh_devices",
    "_cached_shard_map",
    "host_local_array_to_global_array",
    "global_array_to_host_local_array",
)


@contextlib.contextmanager
def pmaps_taken_over(run: Callable[[TakenPmap, Sequence[Any]], Any]) -> Iterator[None]:
    """Hands each `jax.pmap` that is called while tracing in this thread to `run`.

    `run(taken, leaves)` gives the output. With several processes, a traced `jax.pmap` takes the
    devices of its own process for all; the jaxpr then has their number in it, in each pmean, and
    cannot be put right any more. There is no public place to step in. The four functions of
    `jax._src.pmap` that stand between the call and its shard_map: seen in 0.10.2 and 0.12.0.1, in
    one file that is the same in both.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    module = importlib.import_module("jax._src.pmap")
    if not all(hasattr(module, part) for part in _PMAP_PARTS):
        raise UnsupportedError(
            f"jax.pmap under trace, with several processes, cannot be put right on jax "
            f"{jax.__version__}; use jax_dist.pmap in its place"
        )
    with _takeover_lock:
        _takeover_count[0] += 1
        if _takeover_count[0] == 1:
            _originals.update({part: getattr(module, part) for part in _PMAP_PARTS})
            for part, ours in _takeovers(dict(_originals)).items():
                setattr(module, part, ours)
    before, _takeover.run = _takeover.run, run
    try:
        yield
    finally:
        _takeover.run = before
        with _takeover_lock:
            _takeover_count[0] -= 1
            if _takeover_count[0] == 0:
                for part, original in _originals.items():
                    setattr(module, part, original)


def _takeovers(originals: Mapping[str, Callable]) -> dict[str, Callable]:
    """What stands in for the four while a rewriting traces; other threads get the originals."""

    def mesh_devices(devices, backend, local_size, axis_size, trace_state_clean):
        if _takeover.run is None or trace_state_clean:
            return originals["_get_mesh_devices"](
                devices, backend, local_size, axis_size, trace_state_clean
            )
        return devices, backend, axis_size, _takeover  # read by `cached_shard_map` alone

    def cached_shard_map(fun, in_tree, in_axes, out_axes, out_tree, donated, chosen, axis_name):
        if not (len(chosen) == 4 and chosen[-1] is _takeover):
            return originals["_cached_shard_map"](
                fun, in_tree, in_axes, out_axes, out_tree, donated, chosen, axis_name
            )
        devices, backend, axis_size, _ = chosen
        taken = TakenPmap(
            fun=fun.call_wrapped,
            in_tree=in_tree,
            in_axes=tuple(in_axes),
            out_axes=jax.tree.unflatten(out_tree, list(out_axes)),
            axis_name=axis_name,
            devices=devices,
            backend=backend,
            axis_size=axis_size,
        )
        run = _takeover.run
        assert run is not None
        return types.SimpleNamespace(jitted_f=lambda *leaves: run(taken, leaves), taken=True)

    def to_global(args, cached, *rest):
        if hasattr(cached, "taken"):
            return args
        return originals["host_local_array_to_global_array"](args, cached, *rest)

    def to_local(out, cached, *rest):
        if hasattr(cached, "taken"):
            return out
        return originals["global_array_to_host_local_array"](out, cached, *rest)

    return dict(
        zip(_PMAP_PARTS, (mesh_devices, cached_shard_map, to_global, to_local), strict=True)
    )


# ---- the persistent compilation cache: where it reads, writes and compiles ----


class CacheWatcher(Protocol):
    """What `jax_dist.cache` does at the four places where JAX meets its persistent cache."""

    def open(self, path: str, max_size: int) -> Any | None:
        """The store of a folder, with JAX's `get(key)` and `put(key, value)`; None: JAX's own."""

    def found(self, name: str, key: str, saved: float) -> None:
        """A program was loaded, which saved so many seconds."""

    def unreadable(self, name: str, key: str, error: Exception) -> None:
        """There is an entry, which cannot be loaded; the program is compiled next."""

    def compiling(self, name: str, key: str) -> None:
        """A program is about to be compiled. What this raises, the caller of the program sees."""

    def compiled(self, name: str, key: str, seconds: float, unwritten: str | None) -> None:
        """It was, and is written; or is not, for this reason."""

    def failed(self, name: str, key: str, seconds: float, error: Exception) -> None:
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
_cache_watch_lock = threading.Lock()


def watch_cache(watcher: CacheWatcher) -> None:
    """Hands what the persistent cache does in this process to `watcher`, from now on.

    JAX tells its listeners neither keys nor writes, writes from the first process only, in place,
    and never over a damaged entry; none of this can be set. The parts named in `_CACHE_PARTS`: seen
    in 0.7.2, 0.10.2 and 0.12.0.1, where they are called with the same first arguments.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    cache, compiler = (importlib.import_module(name) for name in _CACHE_PARTS)
    for module, parts in zip((cache, compiler), _CACHE_PARTS.values(), strict=True):
        if not all(hasattr(module, part) for part in parts):
            raise UnsupportedError(
                f"jax_dist.cache does not know the persistent cache of jax {jax.__version__}; "
                "set jax_compilation_cache_dir and go without what is beyond JAX's own"
            )
    with _cache_watch_lock:
        for module, part, watched in (
            (cache, "LRUCache", _watched_open),
            (compiler, "_cache_read", _watched_read),
            (compiler, "_cache_write", _watched_write),
            (compiler, "_compile_and_write_cache", _watched_compile),
        ):
            original = getattr(module, part)
            # Asked anew each time: someone who stepped in between may have put back what was there.
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
            if _flag("jax_raise_persistent_cache_errors"):
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
            if _flag("jax_raise_persistent_cache_errors"):
                raise
        return None

    return cache_write


def _not_to_be_written(seconds: float, callbacks: Sequence[Any]) -> str | None:
    """The reasons of JAX not to write an entry."""
    if not _flag("jax_compilation_cache_dir"):
        return "there is no cache directory"
    if any(callbacks):
        return f"it calls back into Python, which jax {jax.__version__} does not write"
    least = _flag("jax_persistent_cache_min_compile_time_secs")
    if seconds < least:
        return f"it compiled in less than {least:g} s"
    return None


def reset_cache() -> None:
    """Makes JAX look at the settings of its cache again, which it does once.

    `jax.experimental.compilation_cache.compilation_cache.reset_cache`: seen in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    importlib.import_module("jax.experimental.compilation_cache.compilation_cache").reset_cache()


def _flag(name: str) -> Any:
    return getattr(jax.config, name)


def _watched_compile(original: Callable, watcher: CacheWatcher) -> Any:
    def compile_and_write(*args: Any) -> Any:
        module_name, cache_key = args[5:7]
        watcher.compiling(module_name, cache_key)
        say_unwritten("JAX did not try")
        start = time.monotonic()
        try:
            executable = original(*args)
        except Exception as error:
            watcher.failed(module_name, cache_key, time.monotonic() - start, error)
            raise
        watcher.compiled(module_name, cache_key, time.monotonic() - start, _written.reason)
        return executable

    return compile_and_write


# ---- end of the persistent compilation cache ----


# ---- what JAX is asked to compile, and under which key it looks for it ----


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
    module: Any = importlib.import_module("jax._src.cache_key")
    with _compile_hook_lock:
        if not isinstance(module.logger, _KeyLog):
            module.logger = _KeyLog(module.logger)
    ignore: Any = bool(_flag("jax_remove_custom_partitioning_ptr_from_cache_key"))
    if hasattr(module, "IgnoreCallbacks"):
        kinds = module.IgnoreCallbacks
        ignore = kinds.CUSTOM_PARTITIONING if ignore else kinds.NO
    compilation_cache = importlib.import_module("jax._src.compilation_cache")
    with module.logger.heard() as hashes:
        key = compilation_cache.get_cache_key(
            request.module, request.devices, request.options, request.backend, ignore
        )
    if not hashes:
        raise UnsupportedError(
            f"jax {jax.__version__} does not tell the components of its cache keys"
        )
    return key, dict(hashes)


def flags_outside_key() -> frozenset[str]:
    """The XLA flags that JAX leaves out of its keys: those that only dump, and a few more.

    `cache_key.xla_flags_to_exclude_from_cache_key`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    module = importlib.import_module("jax._src.cache_key")
    return frozenset(module.xla_flags_to_exclude_from_cache_key)


def refuses_host_callbacks() -> bool:
    """Whether this jax never writes a program with host callbacks: it asks before it writes.

    The parameters of `_cache_write`: six in 0.7.2 and 0.10.2, five in 0.12.0.1.
    """
    write = importlib.import_module("jax._src.compiler")._cache_write
    write = getattr(write, "original", write)  # watched, it takes whatever it is given
    return "host_callbacks" in inspect.signature(write).parameters


# ---- the guards: seeing calls of jit objects, transfers and compilations of one thread ----


@dataclasses.dataclass(slots=True)
class JitCall:
    """A call of a jit object that goes through Python: its first ones, and those JAX cannot hurry.

    `leaves`, `paths` and `donated` are of the arguments that are not static, in one order.
    """

    fun: Callable
    name: str
    leaves: Sequence[Any]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    statics: dict[str, Any]  # argument to value
    traced: bool = False  # whether this call had the function traced
    unused: frozenset[int] = frozenset()  # places of leaves that the program leaves out
    notes: Any = None  # of the watcher


class CallWatcher:
    """What a thread does around its calls; this one does nothing."""

    slow = False  # whether a call seen now keeps going through Python, as long as `look` is same

    def called(self, call: JitCall) -> None:
        """Before the program is looked up, compiled and run; what is raised ends the call."""

    def returned(self, call: JitCall, outputs: Sequence[Any]) -> None:
        """After it ran; `outputs` are leaves. What is raised reaches the caller."""

    def compiles(self, name: str) -> None:
        """Before XLA compiles; what is raised ends the call, and the next one may try again."""

    def shards(
        self, place: Callable[[], Any], values: Sequence[Any], shardings: Sequence[Any]
    ) -> Any:
        """Around the placing of arguments that may not lie where the program wants them."""
        return place()

    def reads(self, array: jax.Array) -> None:
        """Before an array is copied to the host, unless by `jax.device_get`."""


class _Watching(threading.local):
    watcher: CallWatcher | None = None
    calls: tuple[JitCall, ...] = ()  # from the outermost to the innermost
    before: Any = None  # what `look` was, where it was changed
    inferring = False  # whether what is traced next is a call, in 0.7.2
    inferred: tuple[Any, Any, bool] | None = None  # options, parameters, whether newly traced
    traced = False
    tracing = 0  # how many functions are being traced, each in the one before
    slow = False  # whether the call that just ended keeps going through Python


_watching = _Watching()
_watch_lock = threading.Lock()
_watching_threads: set[int] = set()
PMAP_MODULE = "jax._src.pmap"  # of what `jax.pmap` returns; seen in 0.10.2 and 0.12.0.1
_JIT_RUNNERS = ("_run_python_pjit", "_python_pjit_helper")  # since 0.8; before
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


def calls_under_way() -> tuple[JitCall, ...]:
    """The calls of this thread that are in Python now, from the outermost to the innermost."""
    return _watching.calls


def is_tracing() -> bool:
    """Whether this thread, while watched, is tracing a function."""
    return _watching.tracing > 0


def watch_calls(watcher: CallWatcher | None, look: str | None) -> None:
    """Has `watcher` see the calls of this thread from now on; None ends it.

    Calls that JAX hurries through C++ are not seen. Each other value of `look` has every function
    come through Python once, without compiling it: it is a part of the key of JAX's C++ cache of
    calls, and of no other.

    The names: `_infer_params` and `_get_fastpath_data` in `jax._src.pjit`, `_run_python_pjit` there
    (`_python_pjit_helper` in 0.7.2), `shard_arg_handlers` in `jax._src.interpreters.pxla`,
    `ArrayImpl._value`, `config_ext.Config`; seen in 0.7.2, 0.10.2 and 0.12.0.1.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    with _watch_lock:
        watched = bool(_watching_threads)
        (_watching_threads.discard if watcher is None else _watching_threads.add)(
            threading.get_ident()
        )
        if watched != bool(_watching_threads):
            _put_hooks(ours=not watched)
    _watching.watcher = watcher
    option = _look_option()
    if look is not None:
        before = option.swap_local(look)
        _watching.before = before if _watching.before is None else _watching.before
    elif _watching.before is not None:
        option.set_local(_watching.before)
        _watching.before = None


@functools.cache
def _look_option() -> Any:
    """An own setting in the key of the C++ cache of calls; not in the keys of traces."""
    make = importlib.import_module("jax._src.config").config_ext.Config
    try:
        return make("jax_dist_look", None, include_in_jit_key=True)
    except TypeError:  # a setting has no name in 0.7.2
        return make(None, include_in_jit_key=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Hooks:
    names: tuple[tuple[Any, str, Any, Any], ...]  # object, name, JAX's, ours
    handlers: dict[Any, Any]
    our_handlers: dict[Any, Any]


@functools.cache
def _hooks() -> _Hooks:
    pjit = importlib.import_module("jax._src.pjit")
    pxla = importlib.import_module("jax._src.interpreters.pxla")
    array = importlib.import_module("jax._src.array").ArrayImpl
    runner = next((name for name in _JIT_RUNNERS if hasattr(pjit, name)), "")
    parts: list[tuple[Any, str, Callable]] = [
        (pjit, "_infer_params", _infers),
        (pjit, "_get_fastpath_data", _hurries),
        (pjit, runner, _runs if runner == _JIT_RUNNERS[0] else _runs_and_infers),
        (array, "_value", _gives_value),
    ]
    if "__buffer__" in vars(array):  # since Python 3.12; before, memory goes past all of Python
        parts.append((array, "__buffer__", _gives_buffer))
    else:
        parts += [(np, "asarray", _takes_array), (np, "array", _takes_array)]
    if not all(name in vars(home) for home, name, _ in parts):
        raise UnsupportedError(f"jax_dist.strict cannot see the calls of jax {jax.__version__}")
    handlers = dict(pxla.shard_arg_handlers)
    jax.monitoring.register_scalar_listener(_heard)  # cannot be taken back in 0.7.2
    # Our frames stand between the user's in each error under trace; hidden with those of JAX.
    traceback_util = importlib.import_module("jax._src.traceback_util")
    getattr(traceback_util, "register_exclusion", lambda _: None)(__file__)
    return _Hooks(
        names=tuple(
            (home, name, vars(home)[name], ours(vars(home)[name])) for home, name, ours in parts
        ),
        handlers=handlers,
        our_handlers={kind: _places(handler) for kind, handler in handlers.items()},
    )


def _put_hooks(*, ours: bool) -> None:
    """Puts our functions around JAX's, or takes them away: only while any thread watches."""
    hooks = _hooks()
    for home, name, original, around in hooks.names:
        setattr(home, name, around if ours else original)
    handlers = importlib.import_module("jax._src.interpreters.pxla").shard_arg_handlers
    handlers.update(hooks.our_handlers if ours else hooks.handlers)


def _infers(original: Callable) -> Callable:
    """`_infer_params` traces; with it come the options of the jit object."""

    @functools.wraps(original)
    def infer(fun: Callable, info: Any, args: Any, kwargs: Any) -> Any:
        if _watching.watcher is None:
            return original(fun, info, args, kwargs)
        of_call, _watching.inferring = _watching.inferring, False
        before, _watching.traced = _watching.traced, False
        _watching.tracing += 1
        try:
            params, leaves = original(fun, info, args, kwargs)
            _watching.inferred = (info, params, _watching.traced)
        finally:
            _watching.traced = before
            _watching.tracing -= 1
        if of_call:
            call = _watching.calls[-1]
            _watching.watcher.called(_describe(call, _watching.inferred, leaves, args, kwargs))
        return params, leaves

    return infer


def _runs(original: Callable) -> Callable:
    """Since 0.8 a call is traced first, then handed to this."""

    @functools.wraps(original)
    def run(params: Any, leaves: Any, fun: Callable, args: Any, kwargs: Any) -> Any:
        watcher, inferred = _watching.watcher, _watching.inferred
        if watcher is None or inferred is None or inferred[1] is not params:
            return original(params, leaves, fun, args, kwargs)
        slow = watcher.slow
        with _under_way(fun) as call:
            watcher.called(_describe(call, inferred, leaves, args, kwargs))
            result = original(params, leaves, fun, args, kwargs)
        _and_returned(watcher, call, result)
        _watching.slow = slow
        return result

    return run


def _runs_and_infers(original: Callable) -> Callable:
    """Before 0.8 this traces too."""

    @functools.wraps(original)
    def run(fun: Callable, info: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watching.watcher
        if watcher is None:
            return original(fun, info, *args, **kwargs)
        slow = watcher.slow
        with _under_way(fun) as call:
            _watching.inferring = True
            try:
                result = original(fun, info, *args, **kwargs)
            finally:
                _watching.inferring = False
        _and_returned(watcher, call, result)
        _watching.slow = slow
        return result

    return run


@contextlib.contextmanager
def _under_way(fun: Callable) -> Iterator[JitCall]:
    call = JitCall(fun, getattr(fun, "__name__", str(fun)), (), (), (), {})
    before, _watching.calls = _watching.calls, (*_watching.calls, call)
    try:
        yield call
    finally:
        _watching.calls = before


def _describe(
    call: JitCall, inferred: Any, leaves: Sequence[Any], args: Any, kwargs: Any
) -> JitCall:
    info, params, call.traced = inferred
    donated = params.params["donated_invars"]
    call.leaves = tuple(leaves)
    call.donated = tuple(donated)[len(donated) - len(call.leaves) :]
    call.paths = tuple(params.arg_names or (f"argument {i}" for i in range(len(call.leaves))))
    names = list(info.fun_signature.parameters) if info.fun_signature else []
    for place in info.static_argnums:
        if -len(args) <= place < len(args):
            name = names[place] if place < len(names) else f"argument {place}"
            call.statics[name] = args[place]
    for name in info.static_argnames:
        if name in kwargs:
            call.statics[name] = kwargs[name]
    return call


def _and_returned(watcher: CallWatcher, call: JitCall, result: Any) -> None:
    """`result`: outputs, their leaves, their tree, arguments, jaxpr, executable, and two more."""
    kept = getattr(result[5], "_kept_var_idx", None)
    if kept is not None:
        hoisted = len(result[7])  # constants that JAX passes as arguments, in front
        places = range(len(call.leaves))
        call.unused = frozenset(place for place in places if place + hoisted not in kept)
    watcher.returned(call, result[1])


def _hurries(original: Callable) -> Callable:
    """Where this gives None, C++ sends the calls of that key through Python for ever."""

    @functools.wraps(original)
    def fast_path(*args: Any) -> Any:
        if _watching.watcher is not None and _watching.slow:
            return None
        return original(*args)

    return fast_path


def _places(original: Callable) -> Callable:
    """C++ hands here whatever does not lie where the program wants it, if a guard forbids it."""

    @functools.wraps(original)
    def place(values: Sequence[Any], shardings: Sequence[Any], *rest: Any) -> Any:
        if _watching.watcher is None:
            return original(values, shardings, *rest)
        go_on = lambda: original(values, shardings, *rest)
        return _watching.watcher.shards(go_on, values, shardings)

    return place


def _gives_value(original: property) -> property:
    def value(self: Any) -> Any:
        if _watching.watcher is not None and self._npy_value is None and not _explicit_get():
            _watching.watcher.reads(self)
        assert original.fget is not None
        return original.fget(self)

    return property(value, doc=original.__doc__)


def _gives_buffer(original: Any) -> Callable:
    """NumPy asks here first; refused, it goes on to `_value`, so both have to refuse."""

    def __buffer__(self: Any, flags: int) -> memoryview:
        if _watching.watcher is not None and not _explicit_get():
            _watching.watcher.reads(self)
        return original(self, flags)

    return __buffer__


def _takes_array(original: Callable) -> Callable:
    """NumPy's own doors, for Python 3.11: `.item()` goes through them too."""

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        array = args[0] if args and isinstance(args[0], jax.Array) else None
        watcher = None if isinstance(array, Tracer) else _watching.watcher
        if watcher is not None and array is not None and not _explicit_get():
            watcher.reads(array)
        return original(*args, **kwargs)

    return convert


def _explicit_get() -> bool:
    """Whether this is within `jax.device_get`. `guard_lib`: in 0.7.2, 0.10.2 and 0.12.0.1."""
    config = importlib.import_module("jax._src.config")
    return config.guard_lib.thread_local_state().explicit_device_get


def _heard(event: str, value: float, **details: Any) -> None:
    """Comes before what takes the time, so that raising here stops it."""
    if _watching.watcher is None:
        return
    if event == _TRACE_EVENT:
        _watching.traced = True
    elif event == _COMPILE_EVENT:
        _watching.watcher.compiles(str(details.get("fun_name", "a function")))


def traced_types(fun: Callable) -> list[dict[str, Any]]:
    """For which types of arguments JAX has traced `fun`: path to type, one dict a trace.

    The keys of `partial_eval.trace_to_jaxpr` in 0.10.2 and 0.12.0.1, those of `_create_pjit_jaxpr`
    in 0.7.2, which know no paths. Empty where a jax has neither.
    """
    module = importlib.import_module("jax._src.interpreters.partial_eval")
    cached = getattr(module, "trace_to_jaxpr", None)
    if cached is not None and hasattr(cached, "cache_keys"):
        keys = [key for key in cached.cache_keys() if key[0]() is fun]
        return [dict(zip(key[2][1].arg_names, key[2][0].vals, strict=False)) for key in keys]
    cached = getattr(importlib.import_module("jax._src.pjit"), "_create_pjit_jaxpr", None)
    for cell in getattr(cached, "__closure__", None) or ():
        if isinstance(cell.cell_contents, weakref.WeakKeyDictionary):
            keys = cell.cell_contents.get(fun, {})
            return [{str(place): aval for place, aval in enumerate(key[3][0])} for key in keys]
    return []


# ---- end of the guards ----


def config_value(name: str) -> Any:
    """A setting of JAX, by its name; type checkers know none of them."""
    return getattr(jax.config, name)


# ---- the coordination service that joins the processes ----


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` joined; None without it.

    It has no public name. `distributed.global_state.client`, with `key_value_set_bytes`,
    `key_value_dir_get_bytes`, `key_value_delete` and `wait_at_barrier`, was the same in 0.7.2,
    0.10.2 and 0.12.0.1.
    """
    state = importlib.import_module("jax._src.distributed").global_state
    return state.client


# ---- end of the coordination service ----


# ---- what `jax-dist doctor` asks ----


def option_names() -> list[str]:
    """The names of JAX's settings, such as "jax_enable_x64".

    `jax.config` is public, and its `values` are in no documentation; the same in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    return sorted(jax.config.values)


# ---- end of what `jax-dist doctor` asks ----


# ---- joining the processes: what `jax_dist.multihost` asks before and after ----


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """This process among those that `jax.distributed` has joined."""

    rank: int
    processes: int
    address: str  # where JAX's service listens: "host:port"


def joined_as() -> Joined | None:
    """Who this process is, once `jax.distributed` has joined it to others.

    `jax.process_index` says it too, but starts the backend. `distributed.global_state` with
    `client`, `process_id`, `num_processes` and `coordinator_address`: seen in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    state = importlib.import_module("jax._src.distributed").global_state
    if state.client is None:
        return None
    return Joined(state.process_id, state.num_processes, state.coordinator_address)


def backend_started() -> bool:
    """Whether JAX has chosen its devices; processes can no longer be joined then.

    `xla_bridge.backends_are_initialized`: seen in 0.7.2, 0.10.2 and 0.12.0.1. Where it is not, JAX
    itself will say so, later.
    """
    module = importlib.import_module("jax._src.xla_bridge")
    started = getattr(module, "backends_are_initialized", None)
    return started is not None and started()


def detect_cluster(
    address: str | None,
    processes: int | None,
    rank: int | None,
    devices: Sequence[int] | None,
    timeout: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Fills in what SLURM, Open MPI, Kubernetes or a TPU's metadata say, as JAX would itself.

    JAX does this inside `jax.distributed.initialize`, too late to look at the result before the
    service starts, which ends the process by a signal where it cannot.
    `ClusterEnv.auto_detect_unset_distributed_params`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    clusters = importlib.import_module("jax._src.clusters")
    detect = getattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", None)
    if detect is None:
        return address, processes, rank, devices
    return detect(address, processes, rank, devices, None, timeout)


def initialize_options(**options: Any) -> dict[str, Any]:
    """Those that this `jax.distributed.initialize` takes; 0.7.2 has no time-out for the end."""
    known = inspect.signature(jax.distributed.initialize).parameters
    return {name: value for name, value in options.items() if name in known}


# ---- end of joining the processes ----
