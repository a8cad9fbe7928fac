"""`initialize`: brings the processes of a job together.

Who this process is among how many, and where they meet, comes from four sources (see `find`).
"""

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_dist import _compat
from jax_dist.errors import ArgumentError, JoinError, OpenPortWarning, refusal
from jax_dist.multihost import agreement, failures, ranks, rendezvous
from jax_dist.multihost.job import Job
from jax_dist.multihost.rendezvous import RendezvousPlan, split

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_log = logging.getLogger("jax_dist.multihost")

_EARLY_EXIT = {"cpu": 3.0}  # seconds; on a CPU it shows whether a process computes
_EARLY_EXIT_ELSEWHERE = 60.0
_HEARTBEAT_OF_JAX = 100.0  # seconds, where nobody says otherwise
_SHORTEST_TOKEN = 16  # characters
_ADDRESS_KEY = "jax_dist/job/address"


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
        raise refusal(
            JoinError,
            what=f"there is no rank {rank} among {processes} processes",
            which=[f"process_id is {rank}", f"num_processes is {processes}"],
            why="ranks are counted from 0",
            do="Give each process a process_id of its own below num_processes.",
        )
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
    is_ours = False
    with socket.socket(found[0][0]) as probe, contextlib.suppress(OSError):
        probe.bind((ip, 0))
        is_ours = True
    if (means_itself and not _is_loopback(address)) or not is_ours:
        return f"[::]:{port}" if socket.has_ipv6 else f"0.0.0.0:{port}"
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _is_loopback(address: str) -> bool:
    """Whether the address says so itself."""
    host, _ = split(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _first(given: int | None, environment: Mapping[str, str], name: str) -> int | None:
    if given is not None or not environment.get(name):
        return given
    try:
        return int(environment[name])
    except ValueError:
        raise refusal(
            JoinError,
            what=f"{name} must be a number",
            which=[f"it is {environment[name]!r}"],
            why="it says how many processes there are, or which one this is",
            do="Set it again.",
        ) from None


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
    return refusal(
        JoinError,
        what="this process does not know its place among the others",
        which=[
            f"{name} is {'not known' if value is None else repr(value)}"
            for name, value in known.items()
        ],
        why="no argument, no variable and no cluster says it",
        do=f"Give it as an argument, or set {variables}, as `jax-dist launch` does.",
    )


_job: Job | None = None  # that `initialize` has brought this process into


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    fail_fast: bool = True,
    coordinator_bind_address: str | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    early_exit_timeout: float | None = None,
    program_timeout: float = 300.0,
    shutdown_timeout: float = 300.0,
    token: str | None = None,
) -> None:
    """Brings the processes of a job together, as `jax.distributed.initialize` does.

    Call it at the start of the program, in each process, before anything computes. Who and where
    this process is, is taken from the arguments; else from JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `jax-dist launch` sets; else from torchrun's
    variables; else JAX asks its cluster (SLURM, Open MPI, Kubernetes, TPU). Where none of them says
    anything, or there is one process, it does nothing. Nor does a second call like the first.

    The processes first meet by themselves, so that a port that is taken or a process that is
    missing is an error here, and not the end of the process. They keep a connection each to rank 0
    until the end. If `jax.distributed.initialize` was called before, it only adds these.

    Args:
      coordinator_address: "host:port" of rank 0.
      num_processes: how many processes the job has.
      process_id: which of them this one is, from 0.
      local_device_ids: the devices of this process; all that it sees by default.
      fail_fast: end all processes when one fails: by an exception, a signal or a crash, or because
        it finishes while others still wait for it in JAX.
      coordinator_bind_address: "ip:port" at which rank 0 listens; by default at the interface that
        `coordinator_address` belongs to.
      initialization_timeout: the seconds to wait for all; by default 60 on one machine, else 300.
      heartbeat_timeout: the seconds after which JAX gives up a machine that no longer answers; by
        default 15 on one machine, else 60.
      early_exit_timeout: with `fail_fast`, the seconds that a process may stand still in JAX after
        another one has finished; by default 3 on CPUs, where it shows whether it computes, else 60.
      program_timeout: the seconds that `jax_dist.pmap` and `jax_dist.rewrite` wait for the other
        processes to come to the same program, before it first runs.
      shutdown_timeout: the seconds that a process which has finished waits for the others.
      token: what only the processes of this job know, 16 random characters or more; by default
        JAX_DIST_TOKEN, which `jax-dist launch` sets. Peers that do not know it are rejected. The
        service of JAX itself asks for none.

    Raises:
      JoinError: they could not be brought together; the same text in all that have met.
      RuntimeError: JAX has chosen its devices already, or this process has joined other ones.
      ValueError: the address is no "host:port", or the token is too short.

    Warns:
      OpenPortWarning: in rank 0: other machines can reach its port, and there is no token.

    >>> initialize()  # in one process
    """
    global _job
    agreement.program_timeout = program_timeout
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    asked = (coordinator_address, num_processes, process_id)
    if _job is not None:
        _check_same(*asked)
        return
    timeout, found = initialization_timeout or 300.0, None
    if _compat.joined_as() is not None:
        _check_same(*asked)
        heartbeat = heartbeat_timeout or _HEARTBEAT_OF_JAX
        plan = _plan_beside_jax(timeout)
    else:
        found = find(*asked, devices, timeout=timeout)
        is_local = found is not None and _is_loopback(found.address)
        timeout = initialization_timeout or (60.0 if is_local else 300.0)
        heartbeat = heartbeat_timeout or (15.0 if is_local else 60.0)
        plan = None if found is None else _plan(found, coordinator_bind_address, timeout, token)
    if plan is None:
        return
    if plan.rank == 0 and not plan.token and not _is_loopback(plan.bind):
        warning = refusal(
            OpenPortWarning,
            what="rank 0 accepts anyone who can reach its port",
            which=[f"it listens at {plan.bind}, without a token"],
            why="a stranger who says that it is one of the ranks would take its place",
            do="Set JAX_DIST_TOKEN to the same 32 random characters in all processes; "
            "docs/processes.md shows how on each kind of cluster.",
        )
        warnings.warn(warning, stacklevel=2)
    patience = lambda: early_exit_timeout or _default_early_exit()
    job = _job = Job(
        plan.rank,
        plan.processes,
        rendezvous.meet(plan),
        fail_fast=fail_fast,
        early_exit_timeout=patience,
        heartbeat_timeout=heartbeat,
        shutdown_timeout=shutdown_timeout,
    )
    failures.stalls = failures.Stalls(job)
    job.start()  # before JAX joins them: a process that ends meanwhile is named immediately
    if fail_fast:
        failures.install(job, patience)
    if found is not None:
        _join(found, plan, heartbeat=heartbeat, shutdown=shutdown_timeout)
    job.has_joined = True
    if os.environ.get(ranks.RESTART) and not _compat.config_value("jax_compilation_cache_dir"):
        _keep_programs()


def part() -> None:
    """Before `os._exit` in a process that is done: its end is no failure."""
    if _job is not None:
        _job.finish(wait=False)


def _keep_programs() -> None:
    """Of a job that may be started again: what it has compiled, it should find then."""
    from jax_dist import cache  # only here: most jobs choose for themselves

    try:
        cache.enable()
    except ArgumentError as error:  # the folder of the user is open to others
        _log.warning("%s", error)


def _join(found: Membership, plan: RendezvousPlan, *, heartbeat: float, shutdown: float) -> None:
    options: dict[str, Any] = _compat.initialize_options(
        coordinator_bind_address=plan.bind,
        cluster_detection_method="deactivate",  # all is known
        initialization_timeout=max(1, round(plan.timeout)),
        heartbeat_timeout_seconds=max(1, round(heartbeat)),
        shutdown_timeout_seconds=max(1, round(shutdown)),
    )
    local = None if found.devices is None else list(found.devices)
    jax.distributed.initialize(found.address, found.processes, found.rank, local, **options)


def _plan(found: Membership, bind: str | None, timeout: float, token: str | None) -> RendezvousPlan:
    if _compat.backend_started():
        raise refusal(
            RuntimeError,
            what="jax_dist.multihost.initialize comes too late",
            which=["JAX has chosen its devices already"],
            why="they are those of this process alone, and JAX chooses once",
            do="Call it before anything computes, and before jax.devices() and the like.",
        )
    token = token or os.environ.get("JAX_DIST_TOKEN", "")
    if 0 < len(token) < _SHORTEST_TOKEN:
        raise refusal(
            ValueError,
            what="the token of the job can be guessed",
            which=[f"it has fewer than {_SHORTEST_TOKEN} characters"],
            why="anyone who connects once learns enough to try tokens offline",
            do="Take 32 random characters, as `openssl rand -hex 16` prints them.",
        )
    bind = bind_address(found.address, bind)
    return RendezvousPlan(found.address, bind, found.processes, found.rank, timeout, token.encode())


def _plan_beside_jax(timeout: float) -> RendezvousPlan | None:
    """For processes that `jax.distributed.initialize` has joined already; None for a single one.

    JAX's service hands the address and the token around: who has joined it, is let in here, too.
    """
    joined = _compat.joined_as()
    assert joined is not None  # asked by the caller
    if joined.processes == 1:
        return None
    client = _compat.coordination_client()
    if joined.rank == 0:
        host = joined.address.rpartition(":")[0]
        with socket.socket() as probe:  # the port of the coordinator is JAX's
            probe.bind(("", 0))
            address = f"{host}:{probe.getsockname()[1]}"
        token = secrets.token_hex(16)
        client.key_value_set(_ADDRESS_KEY, f"{address} {token}")
    else:
        given = client.blocking_key_value_get(_ADDRESS_KEY, round(1000 * timeout))
        address, token = given.split(" ")
    bind = bind_address(address, None)
    return RendezvousPlan(address, bind, joined.processes, joined.rank, timeout, token.encode())


def _check_same(address: str | None, processes: int | None, rank: int | None) -> None:
    """A second call may repeat the first one, or leave out what it said."""
    joined = _compat.joined_as()
    if joined is None:  # jax.distributed.shutdown was called
        others = [("the processes", "have parted", "jax.distributed.shutdown")]
    else:
        each = (
            ("coordinator_address", address, joined.address),
            ("num_processes", processes, joined.processes),
            ("process_id", rank, joined.rank),
        )
        others = [(name, now, before) for name, now, before in each if now not in (None, before)]
    if others:
        raise refusal(
            RuntimeError,
            what="this process has joined other ones before",
            which=[f"{name}: now {now!r}, before {before!r}" for name, now, before in others],
            why="a process joins a job once",
            do="Leave the second call out, or give it no arguments.",
        )


def _default_early_exit() -> float:
    if not _compat.backend_started():
        return _EARLY_EXIT_ELSEWHERE
    return _EARLY_EXIT.get(jax.default_backend(), _EARLY_EXIT_ELSEWHERE)
