"""Several processes: their arrays, `jax.pmap` taken over in a trace, and what joins them."""

import contextlib
import dataclasses
import importlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding

from jax_dist._compat import private
from jax_dist._compat.private import Device


@dataclasses.dataclass(frozen=True, slots=True)
class TakenPmap:
    """A `jax.pmap` that is being called, in the words of `jax.pmap`, its arguments flattened."""

    fun: Callable  # of (args, kwargs), static arguments bound
    in_tree: Any  # of (args, kwargs)
    in_axes: tuple[int | None, ...]
    donated: tuple[bool, ...]
    out_axes: Any
    axis_name: Any
    devices: tuple[Device, ...] | None
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
    can no longer be corrected. There is no public hook. The four functions of
    `jax._src.pmap` that stand between the call and its shard_map: seen in 0.10.2 and 0.12.0.1, in
    one file that is the same in both.

    Raises:
      NotImplementedError: this jax has other ones.
    """
    for part in _PMAP_PARTS:
        use = "put jax.pmap right under a trace with several processes (jax_dist.pmap is)"
        private.part("jax._src.pmap", part, use=use)
    module = importlib.import_module("jax._src.pmap")
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
            donated=tuple(donated),
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


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` joined; None without it.

    It has no public name. `distributed.global_state.client`, with `key_value_set_bytes`,
    `key_value_dir_get_bytes`, `key_value_delete` and `wait_at_barrier`, was the same in 0.7.2,
    0.10.2 and 0.12.0.1.
    """
    state = _state()
    return state.client


@dataclasses.dataclass(frozen=True, slots=True)
class _Joined:
    """This process among those that `jax.distributed` has joined."""

    rank: int
    processes: int
    address: str  # where JAX's service listens: "host:port"


def joined_as() -> _Joined | None:
    """Who this process is, once `jax.distributed` has joined it to others.

    `jax.process_index` says it too, but starts the backend. `distributed.global_state` with
    `client`, `process_id`, `num_processes` and `coordinator_address`: seen in 0.7.2, 0.10.2 and
    0.12.0.1.
    """
    state = _state()
    if state.client is None:
        return None
    return _Joined(state.process_id, state.num_processes, state.coordinator_address)


def backend_started() -> bool:
    """Whether JAX has chosen its devices; processes can no longer be joined then.

    `xla_bridge.backends_are_initialized`: seen in 0.7.2, 0.10.2 and 0.12.0.1. Where it is not, JAX
    itself will say so, later.
    """
    started = private.find("jax._src.xla_bridge", "backends_are_initialized")
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
    name = "ClusterEnv.auto_detect_unset_distributed_params"
    detect = private.find("jax._src.clusters", name)
    if detect is None:
        return address, processes, rank, devices
    return detect(address, processes, rank, devices, None, timeout)


def _state() -> Any:
    return private.part("jax._src.distributed", "global_state", use="tell the processes apart")


_REWRAP = "_rewrap_with_aval_and_sharding"


def rewrap(array: jax.Array, aval: ShapedArray, sharding: NamedSharding) -> jax.Array:
    """The same buffers seen as another array: `[local, *s]` as `[global, *s]`, or back.

    The public `make_array_from_single_device_arrays` does the same at 15-47 us a leaf; a host-local
    call is then 2.2 times as slow as that of `jax.pmap`, which calls this private method itself.
    `_rewrap_with_aval_and_sharding`: seen in 0.10.2 and 0.12.0.1.
    """
    return getattr(array, _REWRAP)(aval, sharding)


def put_slices(
    aval: ShapedArray,
    sharding: NamedSharding,
    slices: Sequence[np.ndarray | jax.Array],
    devices: Sequence[Device],
) -> jax.Array:
    """An array of all processes from slices, one for each device of this process.

    The public `make_array_from_callback` does the same at 25 us more, and a call with a NumPy batch
    is then slower than that of `jax.pmap`, which calls this function itself.
    `batched_device_put` of `jax._src.interpreters.pxla`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    put = private.find("jax._src.interpreters.pxla", "batched_device_put")
    if put is not None:
        return put(aval, sharding, slices, devices)
    found = [jax.device_put(part, device) for part, device in zip(slices, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, found)
