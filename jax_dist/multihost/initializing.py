"""`initialize`: brings the processes of a job together."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_dist import _compat
from jax_dist._errors import message
from jax_dist.multihost import agreeing, clusters, failing, rendezvous
from jax_dist.multihost.clusters import Membership
from jax_dist.multihost.job import Job
from jax_dist.multihost.lines import Line
from jax_dist.multihost.stalls import Stalls

_EARLY_EXIT = {"cpu": 3.0}  # seconds; on a CPU it shows whether a process computes
_EARLY_EXIT_ELSEWHERE = 60.0
_ADDRESS_KEY = "jax_dist/job/address"


@dataclass
class _Joined:
    """What `initialize` has done in this process."""

    job: Job | None = None
    stalls: Stalls | None = None


_joined = _Joined()


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

    Raises:
      JoinError: they could not be brought together; the same text in all that have met.
      RuntimeError: JAX has chosen its devices already, or this process has joined other ones.
      ValueError: the address is no "host:port".

    >>> initialize()  # in one process
    """
    agreeing.program_timeout = program_timeout
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    asked = (coordinator_address, num_processes, process_id)
    if _joined.job is not None:
        _check_same(*asked)
        return
    if _compat.joined_as() is not None:
        _check_same(*asked)
        membership, lines = _attach(initialization_timeout or 300.0)
    else:
        timeout = initialization_timeout or 300.0
        found = clusters.find(*asked, devices, timeout=timeout)
        if found is None:
            return
        is_local = clusters.is_loopback(found.address)
        membership = found
        lines = _join(
            found,
            bind=clusters.bind_address(found.address, coordinator_bind_address),
            timeout=initialization_timeout or (60.0 if is_local else 300.0),
            heartbeat=heartbeat_timeout or (15.0 if is_local else 60.0),
            shutdown=shutdown_timeout,
        )
    if membership.processes == 1:
        return
    _joined.job = Job(
        membership.rank,
        membership.processes,
        lines,
        fail_fast=fail_fast,
        early_exit_timeout=lambda: early_exit_timeout or _default_early_exit(),
        shutdown_timeout=shutdown_timeout,
    )
    _joined.stalls = Stalls(_joined.job)
    _joined.job.start()
    if fail_fast:
        failing.install(_joined.job)


def current_stalls() -> Stalls | None:
    """How to ask the other processes where they stand, once they are joined."""
    return _joined.stalls


def part() -> None:
    """Before `os._exit` in a process that is done: its end is no failure."""
    if _joined.job is not None:
        _joined.job.finish(wait=False)


def _join(
    membership: Membership, *, bind: str, timeout: float, heartbeat: float, shutdown: float
) -> dict[int, Line]:
    if _compat.backend_started():
        raise _too_late()
    address, processes, rank = membership.address, membership.processes, membership.rank
    lines = rendezvous.meet(rendezvous.Plan(address, bind, processes, rank, timeout))
    options: dict[str, Any] = _compat.initialize_options(
        coordinator_bind_address=bind,
        cluster_detection_method="deactivate",  # all is known
        initialization_timeout=max(1, round(timeout)),
        heartbeat_timeout_seconds=max(1, round(heartbeat)),
        shutdown_timeout_seconds=max(1, round(shutdown)),
    )
    local = None if membership.devices is None else list(membership.devices)
    jax.distributed.initialize(address, processes, rank, local, **options)
    return lines


def _attach(timeout: float) -> tuple[Membership, dict[int, Line]]:
    """For processes that `jax.distributed.initialize` has joined already."""
    joined = _compat.joined_as()
    assert joined is not None  # asked by the caller
    membership = Membership(joined.address, joined.processes, joined.rank, None)
    if joined.processes == 1:
        return membership, {}
    client = _compat.coordination_client()
    if joined.rank == 0:
        host = joined.address.rpartition(":")[0]
        address = f"{host}:{_free_port()}"  # that of the coordinator is JAX's
        client.key_value_set(_ADDRESS_KEY, address)
    else:
        address = client.blocking_key_value_get(_ADDRESS_KEY, round(1000 * timeout))
    bind = clusters.bind_address(address, None)
    plan = rendezvous.Plan(address, bind, joined.processes, joined.rank, timeout)
    return membership, rendezvous.meet(plan)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _check_same(address: str | None, processes: int | None, rank: int | None) -> None:
    """A second call may repeat the first one, or leave out what it said."""
    joined = _compat.joined_as()
    if joined is None:  # jax.distributed.shutdown was called
        raise _joined_before([("the processes", "have parted", "jax.distributed.shutdown")])
    each = (
        ("coordinator_address", address, joined.address),
        ("num_processes", processes, joined.processes),
        ("process_id", rank, joined.rank),
    )
    others = [(name, now, before) for name, now, before in each if now not in (None, before)]
    if others:
        raise _joined_before(others)


def _default_early_exit() -> float:
    if not _compat.backend_started():
        return _EARLY_EXIT_ELSEWHERE
    return _EARLY_EXIT.get(jax.default_backend(), _EARLY_EXIT_ELSEWHERE)


def _too_late() -> RuntimeError:
    return RuntimeError(
        message(
            what="jax_dist.multihost.initialize comes too late",
            which=["JAX has chosen its devices already"],
            why="they are those of this process alone, and JAX chooses once",
            do="Call it before anything computes, and before jax.devices() and the like.",
        )
    )


def _joined_before(others: Sequence[tuple[str, object, object]]) -> RuntimeError:
    return RuntimeError(
        message(
            what="this process has joined other ones before",
            which=[f"{name}: now {now!r}, before {before!r}" for name, now, before in others],
            why="a process joins a job once",
            do="Leave the second call out, or give it no arguments.",
        )
    )
