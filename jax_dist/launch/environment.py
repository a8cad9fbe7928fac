"""Who a rank is, in JAX's, SLURM's and torchrun's words; and the coordinator's port."""

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback interface that no other program gets as long as the block runs.

    On Linux it is bound here, though nobody listens, and so the system gives it to nobody. Rank 0,
    which is told, can bind it as well, since gRPC asks for SO_REUSEADDR, as servers do. On other
    systems the port was free a moment ago, which is all that can be said.

    >>> with reserved_port() as port:
    ...     1024 < port < 65536
    True
    """
    with socket.socket() as holder:
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((_LOOPBACK, 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


# --- what a rank finds in its environment: who it is, in the words of three launchers


# Where this launcher runs inside a job itself, these speak of that job. JAX looks for Open MPI
# first, and a port or a device given to one process fits no two.
_NOT_INHERITED = frozenset(
    {
        "JAX_COORDINATOR_PORT",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_PARTITION_INDEX",
        "JAX_SLICE_INDEX",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "SLURM_GTIDS",
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "SLURM_TASK_PID",
    }
)
_NOT_INHERITED_FAMILIES = ("OMPI_", "PMIX_", "PMI_", "SLURM_STEP_", "TORCHELASTIC_")

_FORCED_DEVICES = "--xla_force_host_platform_device_count"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


def rank_environment(
    inherited: Mapping[str, str],
    *,
    rank: int,
    ranks: int,
    port: int,
    launcher: int,
    token: str,
    cpu_devices: int | None = None,
    gpus: int = 1,
) -> dict[str, str]:
    """The environment of one rank.

    `jax.distributed.initialize()` reads JAX's own variables for the address; it knows none for the
    number of processes or the rank, and finds these in SLURM's. Those of torchrun are for programs
    that read them.

    Args:
      inherited: the environment of the launcher.
      rank: which process it is for.
      ranks: how many there are.
      port: of the coordinator, on the loopback interface.
      launcher: process id of the launcher.
      token: what only the ranks of this job know.
      cpu_devices: how many CPU devices to simulate.
      gpus: how many GPUs are for each rank, where none are simulated; other accelerators are left
        to JAX.

    >>> found = rank_environment({}, rank=1, ranks=2, port=4000, launcher=1, token="secret")
    >>> found["JAX_COORDINATOR_ADDRESS"], found["SLURM_PROCID"], found["RANK"]
    ('127.0.0.1:4000', '1', '1')
    """
    kept = {name: value for name, value in inherited.items() if not _is_of_another_job(name)}
    return {
        # Else a line that was printed lies in a buffer until the end, and is lost by a kill.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code then shows where Python was
        "SLURM_JOB_ID": str(launcher),  # kept inside a real job: runs are named after it
        **kept,
        **_for_jax(rank, ranks, port),
        **_as_slurm(rank, ranks),
        **_as_torchrun(rank, ranks, port),
        **_around_proxies(kept),
        **(_gpus(rank, gpus) if cpu_devices is None else cpu_environment(kept, cpu_devices)),
        "JAX_DIST_LAUNCHER": str(launcher),
        "JAX_DIST_TOKEN": token,
    }


def cpu_environment(inherited: Mapping[str, str], devices: int) -> dict[str, str]:
    """What makes a process simulate CPU devices, whatever it inherits.

    >>> cpu_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --a"}, 2)
    {'XLA_FLAGS': '--a', 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
    """
    flags = inherited.get("XLA_FLAGS", "").split()
    return {
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(_FORCED_DEVICES)),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }


def _gpus(rank: int, count: int) -> dict[str, str]:
    """Counted among those that CUDA_VISIBLE_DEVICES leaves, if it is set."""
    own = range(rank * count, (rank + 1) * count)
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own))}


def _is_of_another_job(name: str) -> bool:
    return name in _NOT_INHERITED or name.startswith(_NOT_INHERITED_FAMILIES)


def _for_jax(rank: int, ranks: int, port: int) -> dict[str, str]:
    address = f"{_LOOPBACK}:{port}"
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # else it listens on all interfaces
        "JAX_NUM_PROCESSES": str(ranks),
        "JAX_PROCESS_ID": str(rank),
    }


def _as_slurm(rank: int, ranks: int) -> dict[str, str]:
    """What srun sets and JAX reads, and what programs commonly read besides."""
    return {
        "SLURM_STEP_NODELIST": _LOOPBACK,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": _LOOPBACK,
        "SLURM_NODELIST": _LOOPBACK,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NPROCS": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
    }


def _around_proxies(inherited: Mapping[str, str]) -> dict[str, str]:
    """gRPC asks a proxy even for the loopback interface. Only if there is one: JAX would warn."""
    if not any(inherited.get(name) or inherited.get(name.upper()) for name in _PROXIES):
        return {}
    excepted = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    excepted = ",".join([*filter(None, [excepted]), _LOOPBACK, "localhost"])
    return {"no_proxy": excepted, "NO_PROXY": excepted}
