"""Every name that differs between JAX versions, and the few private symbols, with their reasons."""

import contextlib
import dataclasses
import importlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from jax_dist._errors import UnsupportedError

NESTED_MANUAL_AXIS_INDEX = jax.__version_info__ >= (0, 8)
"""Whether `axis_index` lowers inside a shard_map that is nested in another one.

On 0.7.2 it fails with "operates on axis 'i' which is already bound by a parent"; seen to work on
0.10.2 and 0.12.0.1. Not a name to ask for, so the version is compared.
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
