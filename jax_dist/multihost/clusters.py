"""Who this process is among how many, and where they meet: from four sources, in this order."""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_dist import _compat
from jax_dist.errors import JoinError, message
from jax_dist.multihost.rendezvous import split

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Membership:
    """Of this process in its job."""

    address: str  # "host:port"
    processes: int
    rank: int
    devices: tuple[int, ...] | None  # of this process; None: all that it sees


def find(
    address: str | None,
    processes: int | None,
    rank: int | None,
    devices: Sequence[int] | None,
    *,
    timeout: float,
    environment: Mapping[str, str] = os.environ,
) -> Membership | None:
    """Arguments first, then JAX's variables, then torchrun's, then what JAX itself finds.

    Returns:
      None where there is one process only.

    Raises:
      JoinError: something is known, but not all.
    """
    if processes == 1:
        return None
    address = address or environment.get("JAX_COORDINATOR_ADDRESS")
    processes = _first(processes, environment, "JAX_NUM_PROCESSES")
    rank = _first(rank, environment, "JAX_PROCESS_ID")
    if devices is None and environment.get("JAX_LOCAL_DEVICE_IDS"):
        devices = [int(each) for each in environment["JAX_LOCAL_DEVICE_IDS"].split(",")]
    if processes is None and rank is None and all(name in environment for name in _TORCHRUN):
        processes, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
        address = address or _torchrun_address(environment)
    if None in (address, processes, rank):
        address, processes, rank, devices = _compat.detect_cluster(
            address, processes, rank, devices, round(timeout)
        )
    if processes == 1 or (address, processes, rank) == (None, None, None):
        return None
    if address is None or processes is None or rank is None:
        raise _incomplete(address, processes, rank)
    if not 0 <= rank < processes:
        raise _out_of_range(rank, processes)
    split(address)  # raises, if it is none
    return Membership(address, processes, rank, None if devices is None else tuple(devices))


def bind_address(address: str, given: str | None) -> str:
    """Where rank 0 listens: at the interface that the others are told, and no other.

    A loopback address that a name stands for may be the machine's view of itself alone; then, and
    where the address belongs to no interface of this machine, rank 0 listens at all of them.
    """
    given = given or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if given:
        return given
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return f"[::]:{port}"
    ip = str(found[0][4][0])
    means_itself = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    if (means_itself and not is_loopback(address)) or not _is_ours(found[0][0], ip):
        return f"[::]:{port}" if socket.has_ipv6 else f"0.0.0.0:{port}"
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def is_loopback(address: str) -> bool:
    """Whether the address says so itself."""
    host, _ = split(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _is_ours(family: int, ip: str) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def _first(given: int | None, environment: Mapping[str, str], name: str) -> int | None:
    if given is not None or not environment.get(name):
        return given
    try:
        return int(environment[name])
    except ValueError:
        raise _no_number(name, environment[name]) from None


def _torchrun_address(environment: Mapping[str, str]) -> str:
    """torchrun's own store may listen at its port; then the one above is taken."""
    port = int(environment.get("JAX_COORDINATOR_PORT") or environment["MASTER_PORT"])
    is_taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_taken and "JAX_COORDINATOR_PORT" not in environment:
        port = port + 1 if port < 65535 else port - 1
    return f"{environment['MASTER_ADDR']}:{port}"


def _incomplete(address: str | None, processes: int | None, rank: int | None) -> JoinError:
    known = {"coordinator_address": address, "num_processes": processes, "process_id": rank}
    variables = "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    return JoinError(
        message(
            what="this process does not know its place among the others",
            which=[
                f"{name} is {'not known' if value is None else repr(value)}"
                for name, value in known.items()
            ],
            why="no argument, no variable and no cluster says it",
            do=f"Give it as an argument, or set {variables}, as `jax-dist launch` does.",
        )
    )


def _out_of_range(rank: int, processes: int) -> JoinError:
    return JoinError(
        message(
            what=f"there is no rank {rank} among {processes} processes",
            which=[f"process_id is {rank}", f"num_processes is {processes}"],
            why="ranks are counted from 0",
            do="Give each process a process_id of its own below num_processes.",
        )
    )


def _no_number(name: str, value: str) -> JoinError:
    return JoinError(
        message(
            what=f"{name} must be a number",
            which=[f"it is {value!r}"],
            why="it says how many processes there are, or which one this is",
            do="Set it again.",
        )
    )
