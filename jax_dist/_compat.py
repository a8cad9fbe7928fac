"""The private parts of JAX that this package uses, and what differs between versions of JAX.

Nothing else in the package imports from `jax._src`. All names were seen in jax 0.10.2 and 0.12.0.1.
Where one is missing, the feature raises NotImplementedError, or does what stands in parentheses.

- `pjit`, `dispatch_registry`, `cc_shard_arg`, `_cache_miss` of a jit: no public call in C++ asks
  Python about its arguments (every call goes through Python, some 100 us later)
- `const_args` of what C++ remembers: arrays that it passes before the user's
- `_jit_info` of a jit: which arguments are static
- `batched_device_put`: `make_array_from_callback` takes 25 us more (one `device_put` a slice)
- `_rewrap_with_aval_and_sharding` of an array: public functions take 15 to 47 us more a leaf
- `CompileOnlyPyClient`: only the client of a device says that it runs no program (all do)
- `register_exclusion`, `filter_traceback`: hide frames from JAX's tracebacks (they show)
- `config._check_vma`, `manual_axis_type` of a type: types of values in a shard_map
- `_prim` of a `call_hi_primitive`: the only way to its body (it is not looked into)
- `flattree`: the trees of operands in the parameters of a scan, since 0.12.0.1
- four functions of `jax._src.pmap`: no hook sees a `jax.pmap` that is traced
- `get_file_cache`, `get_cache_key`, `_cache_read`, `_compile_and_write_cache`: listeners of the
  persistent cache learn neither names nor keys
- `distributed.global_state`: the key-value store; `jax.process_index` starts the backend
- `backends_are_initialized`: whether processes can still be joined (JAX raises later)
- `ClusterEnv`: `jax.distributed.initialize` detects too late to look at the result before its
  service starts, whose failure ends the process (it detects by itself)
"""

import collections
import contextlib
import copy
import functools
import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.sharding import AxisType, Mesh, NamedSharding

if TYPE_CHECKING:  # jaxlib ships no types, so that jax.Device is unknown
    from typing import Protocol

    class Device(Protocol):
        """A `jax.Device`."""

        id: int
        platform: str
        device_kind: str
        process_index: int

else:
    Device = jax.Device

# No attribute shows these two; no version between 0.10.2 and 0.12.0.1 was tried.
CPU_HANGS_WHEN_FULL = jax.__version_info__ < (0, 12)
"""True if the CPU backend hangs over more than 32 executions on several devices in flight."""
CACHES_HOST_CALLBACKS = jax.__version_info__ >= (0, 12)
"""True if a program with a host callback is written to the persistent cache."""


def find(module: str, name: str) -> Any | None:
    """Return an attribute of a module ("a.b": of an attribute in it), or None."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def require(module: str, name: str) -> Any:
    """Return an attribute of a module; raise NotImplementedError if this jax has none."""
    value = find(module, name)
    if value is None:
        raise NotImplementedError(
            f"jax {jax.__version__} has no {module}.{name}, which jax_dist needs here; use a jax "
            "that jax_dist was tested with"
        )
    return value


# ---- settings, devices and arrays

_PXLA = "jax._src.interpreters.pxla"
_COMPILE_ONLY = find("jaxlib._jax", "CompileOnlyPyClient") or ()


def config_value(name: str) -> Any:
    """Return a setting of JAX; type checkers know none of them."""
    return getattr(jax.config, name)


def is_compile_only(device: Device) -> bool:
    """Return whether a device is one of `jax.experimental.topologies`, which runs no program."""
    return isinstance(getattr(device, "client", None), _COMPILE_ONLY)


def hide_frames(path: str) -> None:
    """Leave files below `path` out of JAX's tracebacks and of `jax.debug.breakpoint`."""
    hide = find("jax._src.traceback_util", "register_exclusion")
    if hide is not None:
        hide(path)


def filtered_traceback(error: Exception) -> types.TracebackType | None:
    """Return the traceback as JAX shows it: without its own frames, and those of hidden files."""
    keep = find("jax._src.traceback_util", "filter_traceback")
    if keep is None or config_value("jax_traceback_filtering") == "off":
        return error.__traceback__
    return keep(error.__traceback__)


def auto_mesh(devices: np.ndarray, names: Sequence[object]) -> Mesh:
    """Return a mesh of Auto axes; the default of `make_mesh` is Explicit."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def rewrap(array: jax.Array, aval: ShapedArray, sharding: NamedSharding) -> jax.Array:
    """Return the same buffers as another array: `[local, *s]` as `[global, *s]`, or back."""
    private: Any = array
    return private._rewrap_with_aval_and_sharding(aval, sharding)


def put_slices(
    aval: ShapedArray,
    sharding: NamedSharding,
    slices: Sequence[np.ndarray | jax.Array],
    devices: Sequence[Device],
) -> jax.Array:
    """Return a global array of slices, one for each device of this process, as `jax.pmap` does."""
    put = find(_PXLA, "batched_device_put")
    if put is not None:
        return put(aval, sharding, slices, devices)
    rows = [jax.device_put(part, device) for part, device in zip(slices, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, rows)


def remove_mesh_of_arguments(lowered: jax.stages.Lowered) -> None:
    """Remove the mesh from `lowered.args_info`."""
    without_mesh = lambda info: jax.stages.ArgInfo(info._aval.update(sharding=None), info.donated)
    lowered.args_info = jax.tree.map(without_mesh, lowered.args_info)


def pass_first_argument(lowered: jax.stages.Lowered, values: Sequence[Any]) -> jax.stages.Lowered:
    """Have a lowered program pass its first argument, these arrays, as JAX does constants."""
    private: Any = lowered
    (_, *args), kwargs = private.args_info
    private.args_info = (tuple(args), kwargs)
    private._lowering = lowering = copy.copy(private._lowering)  # JAX keeps the original
    lowering.const_args = [*lowering.const_args, *values]
    return lowered


# ---- calls that JAX dispatches in C++
#
# A look at the arguments before each call costs 6 to 10 % of a call of one argument; this 1 to 2 %.


class CallResult(NamedTuple):
    """Result of a cache miss, as Python code returns it to C++, which requires a tuple of three."""

    results: Any  # of the user's function
    fast_path_data: Any = None  # JAX's, to run the next such call in C++; None: Python runs it too
    is_stale: bool = False  # whether JAX will compile the program again, by its profile (PGLE)


def make_cached_call(
    name: str,
    on_miss: Callable[..., CallResult],
    *,
    without_jit: Callable,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return a function in C++ that caches how to run each signature (types and static values).

    For a signature that is not cached it returns the results of `on_miss(*args, **kwargs)`, and
    caches its `fast_path_data`, if any. `without_jit` runs under `jax.disable_jit`, and once more
    under `jax.debug_nans` if a result holds a NaN. `name` shows in profiles.
    """
    if not _has_cpp_cache():

        def call_in_python(*args: Any, **kwargs: Any) -> Any:
            if config_value("jax_disable_jit"):
                return without_jit(*args, **kwargs)
            return on_miss(*args, **kwargs).results

        return call_in_python
    call = _new_cached_call(name, on_miss, without_jit, static_argnums, static_argnames)
    call._fun = without_jit  # JAX reads this attribute if it finds a NaN
    return call


def run_jit(jitted: Any, captured: tuple, args: tuple, kwargs: dict[str, Any]) -> CallResult:
    """Call a jit object for a `make_cached_call`, which need not call it again for such arguments.

    `captured` are arrays that C++ is to pass in each later call, as it does with constants of a
    program. If there are any, the tuple of them is the first argument of the jit object.
    """
    args = (captured, *args) if captured else args
    if not _has_cpp_cache():
        return CallResult(jitted(*args, **kwargs))
    results, fast_path_data, is_stale = jitted._cache_miss(*args, **kwargs)
    if captured and fast_path_data is not None:
        fast_path_data = fast_path_data._replace(const_args=[*captured])
    return CallResult(results, fast_path_data, is_stale)


@functools.cache
def _has_cpp_cache() -> bool:
    """Return whether this jax has the private functions of a cached call; starts no backend."""
    on_miss = lambda *_: CallResult("called")
    try:  # the functions may take other arguments in a later jax
        cached_call = _new_cached_call("trial", on_miss, on_miss, (), ())
        return hasattr(jax.jit(on_miss), "_cache_miss") and cached_call(1) == "called"
    except (NotImplementedError, TypeError):
        return False


def _new_cached_call(name: str, on_miss: Callable, without_jit: Callable, *static: Any) -> Any:
    pjit, shard_arg = require("jaxlib._jax", "pjit"), require(_PXLA, "cc_shard_arg")
    registry = require("jax._src.tree_util", "dispatch_registry")
    cache_key = object()  # calls of equal keys would share a cache
    return pjit(name, without_jit, on_miss, *map(tuple, static), cache_key, registry, shard_arg)


class JitOptions(NamedTuple):
    """The options of a jit object that a jit around it has to repeat."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None

    @classmethod
    def read(cls, fun: Any) -> "JitOptions":
        """Return the options of a jit object; the defaults for any other callable."""
        if not _is_jit(fun):
            return cls()
        info, names = fun._jit_info, cls._fields[:4]
        return cls(
            *(tuple(getattr(info, name)) for name in names),
            keep_unused=bool(info.keep_unused),
            compiler_options=dict(info.compiler_options_kvs) or None,
        )


def inside_jit(fun: Any) -> Callable:
    """Return the function in a jit object, which may hold a trace; `fun` if it has shardings."""
    if not _is_jit(fun):
        return fun
    info: Any = fun._jit_info
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    has_shardings = any(isinstance(s, jax.sharding.Sharding) for s in shardings)
    return fun if has_shardings else fun.__wrapped__


def jit_like(fun: Any) -> Any:
    """Return `fun` if it is a jit object, else `jax.jit(fun)`."""
    return fun if _is_jit(fun) else jax.jit(fun)


def _is_jit(fun: Any) -> bool:
    return hasattr(fun, "trace") and hasattr(fun, "clear_cache")


# ---- equations and types, whose parameters JAX does not document


def name_of(eqn: JaxprEqn) -> str:
    """Return the name of a primitive; one that no primitive of JAX has, if it is a user's."""
    return _name_of(eqn.primitive)


@functools.cache
def _name_of(primitive: Primitive) -> str:
    is_of_jax = primitive in primitives_of_jax()  # a user's may have any name
    return primitive.name if is_of_jax else f"{primitive.name} (not of jax)"


def primitives_of_jax() -> frozenset[Primitive]:
    """Return the primitives that are globals of loaded modules of JAX; there is no list of all."""
    return _primitives_in_modules(len(sys.modules))  # more modules may come


@functools.lru_cache(maxsize=1)
def _primitives_in_modules(_count: int) -> frozenset[Primitive]:
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    spaces = [list(getattr(module, "__dict__", {}).values()) for module in modules]
    return frozenset(value for values in spaces for value in values if isinstance(value, Primitive))


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation prints, calls back or writes to a reference."""
    # The effect of a collective only names its mesh axis.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carries."""
    if "ft_in" in params:  # trees in 0.12.0.1, counts in 0.10.2
        constants, carries, _ = params["ft_in"].unpack()
        return len(constants), len(carries)
    return params["num_consts"], params["num_carry"]


def scan_with_constants(params: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the parameters of a scan equation that change with `count` more constants in front.

    The operands of a scan are (constants, carries, xs). jax 0.10.2 stores how many are constants
    (`num_consts`); jax 0.12.0.1 stores three trees, whose leaves are None (`ft_in`).
    """
    if "ft_in" not in params:
        return {"num_consts": params["num_consts"] + count}
    constants, carries, xs = params["ft_in"].unpack()
    pack, nones = (require("jax._src.flattree", name) for name in ("pack", "nones"))
    return {"ft_in": pack((nones(len(constants) + count), carries, xs))}


_PER_OPERAND = ("in_shardings", "in_layouts", "donated_invars")


def _jit_equation() -> JaxprEqn:
    return jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0).eqns[0]


@functools.cache
def jit_operand_params() -> dict[str, Any]:
    """Return the defaults of those parameters of a jit that hold one value for each operand."""
    params = _jit_equation().params
    return {name: params[name][0] for name in _PER_OPERAND}


def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the mesh axes along which a value may differ between devices, by its type.

    Empty under `check_vma=False`. Without a default: "replicated" would let a wrong sum through.
    """
    return aval.manual_axis_type.varying


def typed_collectives(*, check_vma: bool) -> Any:
    """Return the context in which a shard_map of this `check_vma` traces its body."""
    return require("jax._src.config", "_check_vma")(check_vma)


def call_of(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """Return an equation that calls a jaxpr, as a jit does; `jax.jit` would trace again."""
    model = _jit_equation()
    counts = dict.fromkeys(_PER_OPERAND, len(jaxpr.in_avals))
    counts |= dict.fromkeys(("out_shardings", "out_layouts"), len(jaxpr.out_avals))
    spread = {name: (model.params[name][0],) * count for name, count in counts.items()}
    params = {**model.params, **spread, "jaxpr": jaxpr, "name": "rewritten"}
    return model.replace(params=params, outvars=jaxpr.jaxpr.outvars, effects=jaxpr.effects)


def expand(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr of what an equation computes if a user defined its primitive, else None.

    JAX binds such a primitive (`jax.experimental.hijax`) by `call_hi_primitive`; its method
    `expand` computes the same. None also if that uses a mapped axis, for none is in scope here.
    """
    primitive: Any = eqn.params.get("_prim")
    if name_of(eqn) != "call_hi_primitive" or not hasattr(primitive, "expand"):
        return None
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    expand_leaves = lambda *leaves: primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))
    try:
        return jax.make_jaxpr(expand_leaves)(*types)
    except Exception:  # noqa: BLE001  # it runs the user's functions
        return None


# ---- the persistent compilation cache

_CACHE, _COMPILER = "jax._src.compilation_cache", "jax._src.compiler"
_cache_lock = threading.Lock()


def watch_cache(watcher: Any) -> None:
    """Have JAX's persistent cache call the methods of `watcher`, from now on in this process.

    `watcher` is a `jax_dist.cache._Watcher`, which opens the directory and counts programs. JAX has
    no hook: three of its functions are replaced, which open the directory, read, and write.
    """
    cache: Any = importlib.import_module(_CACHE)
    compiler: Any = importlib.import_module(_COMPILER)
    with _cache_lock:
        if hasattr(compiler, "_jax_dist_watcher"):
            return
        get_file_cache = require(_CACHE, "get_file_cache")
        require(_COMPILER, "_cache_read")
        compile_and_write = require(_COMPILER, "_compile_and_write_cache")

        def open_directory(path: str) -> Any:
            store = watcher.open_store(path)
            return get_file_cache(path) if store is None else (store, path)

        compiler._jax_dist_watcher = watcher
        cache.get_file_cache = open_directory
        compiler._cache_read = functools.partial(_read, watcher, cache)
        replacement = functools.partial(_compile_and_write, watcher, cache, compile_and_write)
        compiler._compile_and_write_cache = replacement


def _read(watcher: Any, cache: Any, name: str, key: str, *rest: Any) -> Any:
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


def _compile_and_write(watcher: Any, cache: Any, original: Callable, *arguments: Any) -> Any:
    """Compile and write a program by JAX's function, `original`, and report it to `watcher`.

    JAX writes in the first process only. If the directory is that of `jax_dist.cache.enable`, the
    program is written here in the other processes.
    """
    backend, _, _, _, host_callbacks, name, key = arguments
    start = time.monotonic()
    seconds, unwritten_reason = 0.0, "compiling it failed"
    try:
        with watcher.compiling(name, key):
            executable = original(*arguments)
        seconds = time.monotonic() - start
        unwritten_reason = _reason_not_to_write(watcher, seconds, host_callbacks)
        if unwritten_reason is None and jax.process_index() != 0:
            try:
                cache.put_executable_and_time(key, name, executable, backend, int(seconds))
            except jax.errors.JaxRuntimeError:  # it has no serialized form
                if config_value("jax_raise_persistent_cache_errors"):
                    raise
        return executable
    finally:
        watcher.on_compiled(name, key, seconds or time.monotonic() - start, unwritten_reason)


def _reason_not_to_write(watcher: Any, seconds: float, host_callbacks: Any) -> str | None:
    if not config_value("jax_compilation_cache_dir"):
        return "there is no cache directory"
    if host_callbacks and not CACHES_HOST_CALLBACKS:
        return f"it calls back into Python, which jax {jax.__version__} does not write"
    least = config_value("jax_persistent_cache_min_compile_time_secs")
    if seconds < least:
        return f"it compiled in less than {least:g} s"
    is_writer = jax.process_index() == 0 or watcher.is_enabled()
    return None if is_writer else "only the first process writes"


def reset_cache() -> None:
    """Have JAX read the settings of its cache again, which it does once."""
    require("jax.experimental.compilation_cache.compilation_cache", "reset_cache")()


def watch_cache_keys(watcher: Callable[[Any, np.ndarray, Any, str], None]) -> None:
    """Call `watcher(module, devices, options, key)` for each program that is looked up."""
    original = require(_CACHE, "get_cache_key")

    def get_cache_key(module: Any, devices: np.ndarray, options: Any, *rest: Any) -> str:
        key = original(module, devices, options, *rest)
        watcher(module, devices, options, key)
        return key

    cache: Any = importlib.import_module(_CACHE)
    cache.get_cache_key = get_cache_key


# ---- a jax.pmap that is traced


class InterceptedPmap(NamedTuple):
    """A `jax.pmap` that is being called, with its options, and its arguments flattened."""

    fun: Callable  # of (args, kwargs), static arguments bound
    in_tree: Any  # of (args, kwargs)
    in_axes: tuple[int | None, ...]
    donated: tuple[bool, ...]
    out_axes: Any
    axis_name: Any
    devices: tuple[Device, ...] | None
    backend: str | None
    axis_size: int | None

    def jitted_f(self, *leaves: Any) -> Any:
        """Do in place of the shard_map what `intercept_pmaps` was told to; JAX calls it."""
        return _interception.run(self, leaves)


class _Interception(threading.local):
    run: Any = None  # of the innermost `intercept_pmaps`


_Choice = collections.namedtuple("_Choice", "devices backend axis_size")  # options of a `jax.pmap`

_interception = _Interception()
_interception_lock = threading.Lock()
_interception_count = [0]  # of all threads
_originals: dict[str, Callable] = {}


@contextlib.contextmanager
def intercept_pmaps(run: Callable[[InterceptedPmap, Sequence[Any]], Any]) -> Iterator[None]:
    """Have `run(intercepted, leaves)` give the output of each `jax.pmap` traced in this thread.

    With several processes, a traced `jax.pmap` takes the devices of its own process for all; their
    number is then in the jaxpr, in each pmean, and can no longer be corrected. Replaces the four
    functions between the call and its shard_map, as long as a thread is in here.
    """
    module = importlib.import_module("jax._src.pmap")
    with _interception_lock:
        if _interception_count[0] == 0:
            _originals.update({name: require(module.__name__, name) for name in _REPLACEMENTS})
            vars(module).update(_REPLACEMENTS)
        _interception_count[0] += 1
    before, _interception.run = _interception.run, run
    try:
        yield
    finally:
        _interception.run = before
        with _interception_lock:
            _interception_count[0] -= 1
            if _interception_count[0] == 0:
                vars(module).update(_originals)


def _choose_devices(*args: Any) -> Any:
    devices, backend, _, axis_size, is_outside_of_traces = args
    if _interception.run is None or is_outside_of_traces:
        return _originals["_get_mesh_devices"](*args)
    return _Choice(devices, backend, axis_size)


def _make_shard_map(*args: Any) -> Any:
    fun, in_tree, in_axes, out_axes, out_tree, donated, devices, axis_name = args
    if not isinstance(devices, _Choice):
        return _originals["_cached_shard_map"](*args)
    out_axes = jax.tree.unflatten(out_tree, list(out_axes))
    return InterceptedPmap(
        fun.call_wrapped, in_tree, tuple(in_axes), tuple(donated), out_axes, axis_name, *devices
    )


def _convert(name: str, arrays: Any, mapped: Any, *rest: Any) -> Any:
    if isinstance(mapped, InterceptedPmap):
        return arrays
    return _originals[name](arrays, mapped, *rest)


_REPLACEMENTS: dict[str, Callable] = {"_get_mesh_devices": _choose_devices}
_REPLACEMENTS["_cached_shard_map"] = _make_shard_map
for _name in ("host_local_array_to_global_array", "global_array_to_host_local_array"):
    _REPLACEMENTS[_name] = functools.partial(_convert, _name)


# ---- several processes


class JoinedProcess(NamedTuple):
    """This process among those that `jax.distributed` has joined."""

    rank: int
    processes: int
    address: str  # of JAX's service: "host:port"
    client: Any  # of that service


def find_joined_process() -> JoinedProcess | None:
    """Return this process among the others, or None if `jax.distributed` has not joined it."""
    job = require("jax._src.distributed", "global_state")
    if job.client is None:
        return None
    return JoinedProcess(job.process_id, job.num_processes, job.coordinator_address, job.client)


def backend_started() -> bool:
    """Return whether JAX has chosen its devices, after which processes cannot be joined."""
    is_started = find("jax._src.xla_bridge", "backends_are_initialized")
    return is_started is not None and is_started()


def detect_cluster(
    address: str | None, processes: int | None, rank: int | None, devices: Any, timeout: int
) -> tuple[str | None, int | None, int | None, Any]:
    """Fill in what SLURM, Open MPI, Kubernetes or a TPU's metadata define, as JAX would itself."""
    detect = find("jax._src.clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    if detect is None:
        return address, processes, rank, devices
    return detect(address, processes, rank, devices, None, timeout)
