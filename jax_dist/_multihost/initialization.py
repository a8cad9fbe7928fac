"""`initialize`: join the processes of a job, and end this one at once if its program fails.

A process that fails and then waits for the others at its exit keeps them waiting, too. One that is
gone is noticed by gloo, NCCL or JAX's heartbeats, and the others end.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from jax_dist import _compat, launch
from jax_dist._multihost import agreement, waiting
from jax_dist.errors import ArgumentError

_JAX_VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_MPI_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
_LOOPBACK = ("127.", "localhost:", "[::1]:")
_INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell


class JobPlace(NamedTuple):
    """The place of this process in its job; what is not known is None."""

    coordinator_address: str | None  # of rank 0: "host:port"
    num_processes: int | None
    process_id: int | None


def find_job_place(environment: Mapping[str, str]) -> JobPlace:
    """Return the place that the variables of JAX, MPI or torchrun give.

    Of these, `jax.distributed.initialize` itself reads JAX_COORDINATOR_ADDRESS only. It detects
    SLURM, Open MPI (without that address), Kubernetes and TPU, so they are left to it.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    has = lambda *names: all(environment.get(name) for name in names)
    read = lambda name: _parse_number(name, environment[name])
    # Without an address, the variables of MPI are left to JAX, which then finds one, too.
    for size, rank in (_JAX_VARIABLES, *_MPI_VARIABLES) if address else (_JAX_VARIABLES,):
        if has(size, rank):
            return JobPlace(address, read(size), read(rank))
    if not has("WORLD_SIZE", "RANK"):
        return JobPlace(address, None, None)
    if not address and has("MASTER_ADDR", "MASTER_PORT"):
        port = read("MASTER_PORT")
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1  # torchrun's own store listens at MASTER_PORT
        address = f"{environment['MASTER_ADDR']}:{port}"
    return JobPlace(address, read("WORLD_SIZE"), read("RANK"))


def _parse_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{name} must be a number, not {text!r}.") from None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    coordinator_bind_address: str | None = None,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: float = 10.0,
    shutdown_timeout: float = 20.0,
    program_timeout: float = 300.0,
) -> None:
    """Join the processes of a job, and make each end at once when its program fails.

    Call it at the start of the program, in each process, before anything computes. The arguments
    that are not given come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as
    `jax-dist launch` sets them; else from torchrun's variables; else JAX detects SLURM, Open MPI,
    Kubernetes or TPU. JAX_LOCAL_DEVICE_IDS and JAX_COORDINATOR_BIND_ADDRESS are read, too. If none
    of them names a job, or it has one process, nothing is joined. A second call, or a call after
    `jax.distributed.initialize`, joins nothing more.

    From then on an exception that nobody catches, or a `sys.exit` with a code other than 0, prints
    as usual, and then ends the process with `os._exit`, without clean-up: JAX would wait for the
    other processes there. These notice its end, by a broken connection or the missing heartbeats.

    Args:
      coordinator_address: "host:port" of rank 0.
      num_processes: number of processes of the job.
      process_id: rank of this process, from 0.
      local_device_ids: devices of this process; by default all that it sees.
      coordinator_bind_address: "ip:port" at which rank 0 listens; by default the port on all
        interfaces, or the loopback interface if `coordinator_address` is on it.
      initialization_timeout: seconds to wait for all processes.
      heartbeat_timeout: seconds after which JAX ends the job if a process no longer answers.
      shutdown_timeout: seconds that a process which has finished waits for the others. Then JAX
        ends the job: raise it if one process works on alone at the end.
      program_timeout: seconds that `jax_dist.pmap` and `jax_dist.rewrite` wait for the other
        processes to come to the same program, before it first runs.

    Raises:
      ArgumentError: the place of this process is known in part, or contradicts an earlier call.
      RuntimeError: JAX has computed already, or the processes could not be joined.

    >>> initialize()  # in one process
    """
    agreement.program_timeout = program_timeout
    requested = JobPlace(coordinator_address, num_processes, process_id)
    joined = _compat.find_joined_process()
    if joined is None and num_processes != 1:
        place, devices = _complete(requested, local_device_ids, initialization_timeout)
        if place.num_processes not in (None, 1):
            bind = coordinator_bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
            if bind is None and str(place.coordinator_address).startswith(_LOOPBACK):
                bind = place.coordinator_address
            jax.distributed.initialize(
                *place,
                devices,
                cluster_detection_method="deactivate",  # `_complete` has done it
                coordinator_bind_address=bind,
                initialization_timeout=max(1, round(initialization_timeout)),
                heartbeat_timeout_seconds=max(1, round(heartbeat_timeout)),
                shutdown_timeout_seconds=max(1, round(shutdown_timeout)),
            )
            joined = _compat.find_joined_process()
    elif joined is not None:
        actual = JobPlace(joined.address, joined.processes, joined.rank)
        for name, value, joined_value in zip(JobPlace._fields, requested, actual, strict=True):
            if value not in (None, joined_value):
                raise ArgumentError(
                    f"initialize({name}={value!r}): this process has joined a job with "
                    f"{joined_value!r}."
                )
    launch.note("joined", joined.rank if joined is not None else 0)
    if joined is not None and joined.processes > 1:
        _install_hooks(joined.rank, joined.processes)


def _complete(
    requested: JobPlace, local_device_ids: int | Sequence[int] | None, timeout: float
) -> tuple[JobPlace, list[int] | None]:
    """Return the place of this process, empty outside of a job, and its device ids (None: all).

    What was not requested comes from environment variables, or else from JAX's detection.
    """
    known = find_job_place(os.environ)
    place = JobPlace(
        requested.coordinator_address or known.coordinator_address,
        known.num_processes if requested.num_processes is None else requested.num_processes,
        known.process_id if requested.process_id is None else requested.process_id,
    )
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    if devices is None and os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        ids = os.environ["JAX_LOCAL_DEVICE_IDS"].split(",")
        devices = [_parse_number("JAX_LOCAL_DEVICE_IDS", text) for text in ids]
    if None in place:
        detected = _compat.detect_cluster(*place, devices, max(1, round(timeout)))
        place, devices = JobPlace(*detected[:3]), detected[3]
    address = place.coordinator_address
    if address is not None and not re.search(r":\d+$", address):
        raise ArgumentError(f"coordinator_address={address!r} has no port, as in 10.0.0.1:1234.")
    missing = [name for name, value in place._asdict().items() if value is None]
    if 0 < len(missing) < len(place) and place.num_processes != 1:
        raise ArgumentError(
            f"initialize cannot tell {' and '.join(missing)} of this process. Pass all of "
            f"{', '.join(JobPlace._fields)}, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID."
        )
    return place, None if devices is None else list(devices)


_last_exit: "_ExitCall | None" = None  # by the main thread


class _ExitCall(NamedTuple):
    """A call of `sys.exit`: it raises SystemExit, which the program may still catch."""

    status: Any  # the argument of `sys.exit`
    main_frame: types.FrameType  # that of the main program, the outermost of the main thread
    position: int  # its instruction during the call, as an index into its bytecode

    def has_ended_program(self) -> bool:
        """Return, at the end of the program, whether its SystemExit has not been caught."""
        # Else the main program would have gone on, and have ended at a later instruction.
        return self.main_frame.f_lasti == self.position


def _install_hooks(rank: int, ranks: int) -> None:
    """Make uncaught exceptions, and `sys.exit` with a code other than 0, end this process at once.

    Python calls `sys.excepthook` for an uncaught exception, but nothing for a SystemExit. So
    `sys.exit` is made to store its call, and `_leave`, which Python runs at the end of the program,
    finds out whether the program has ended by that call.
    """
    if getattr(sys.exit, "__module__", "") == __name__:  # they are installed
        return
    print_exception = sys.excepthook

    def print_and_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if not is_interactive:
            launch.note("failed", rank)
        try:
            print_exception(kind, error, trace)
        finally:
            if not is_interactive:
                code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
                _end(f"rank {rank} ends after this {kind.__name__}", code)

    def store_call_and_exit(status: Any = None, /) -> NoReturn:
        global _last_exit
        if threading.current_thread() is threading.main_thread():
            main_frame = sys._getframe()
            while main_frame.f_back is not None:
                main_frame = main_frame.f_back
            _last_exit = _ExitCall(status, main_frame, main_frame.f_lasti)
        raise SystemExit(status)

    sys.excepthook = print_and_end
    sys.exit = store_call_and_exit
    # It is called before the exit function of JAX, registered earlier, which waits for the others.
    atexit.register(_leave, rank)
    waiting.watch(rank, ranks)


def _leave(rank: int) -> None:
    """Tell `jax-dist launch` that the program has ended; at once, if that was by `sys.exit(1)`."""
    call = _last_exit
    if call is None or not call.has_ended_program() or call.status in (None, 0):
        launch.note("finished", rank)
        return
    launch.note("failed", rank)
    code = call.status if isinstance(call.status, int) else 1
    _end(f"rank {rank} ends after sys.exit({call.status!r})", code & 0xFF)


def _end(text: str, code: int) -> NoReturn:
    """Print a last line, and end this process without any clean-up."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, or a closed one
        sys.stdout.flush()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    os._exit(code)
