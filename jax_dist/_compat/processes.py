"""Joining the processes, and the service that has joined them."""

import ctypes
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from jax_dist._compat import private


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` joined; None without it.

    It has no public name. `distributed.global_state.client`, with `key_value_set_bytes`,
    `key_value_dir_get_bytes`, `key_value_delete` and `wait_at_barrier`, was the same in 0.7.2,
    0.10.2 and 0.12.0.1.
    """
    state = _state()
    return state.client


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
    state = _state()
    if state.client is None:
        return None
    return Joined(state.process_id, state.num_processes, state.coordinator_address)


def leave_coordination() -> None:
    """Has JAX end this process without a word to the others, which are being ended.

    At its exit, JAX would wait for them. `distributed.global_state` with `client`, `service` and
    `preemption_sync_manager`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    state = _state()
    for name in ("preemption_sync_manager", "client", "service"):
        part = getattr(state, name, None)
        if part is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # its destructor would wait, too
            setattr(state, name, None)


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


def initialize_options(**options: Any) -> dict[str, Any]:
    """Those that this `jax.distributed.initialize` takes; 0.7.2 has no time-out for the end."""
    known = inspect.signature(jax.distributed.initialize).parameters
    return {name: value for name, value in options.items() if name in known}
