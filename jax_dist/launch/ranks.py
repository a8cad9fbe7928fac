"""One process of a job, with all that it starts, and its end even if the launcher is killed."""

import collections
import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jax_dist.launch.outcome import Output, Stream
from jax_dist.multihost import ranks

_FIRST = "Traceback (most recent call last):"
_LONGEST = 100  # lines


class _Traceback:
    """Follows the lines of a rank, and keeps the last traceback among them.

    >>> traceback = _Traceback()
    >>> traceback.follow(["epoch 1", "Traceback (most recent call last):", "  File a.py", "E: no"])
    >>> traceback.lines[-1], traceback.is_last_word
    ('E: no', True)
    >>> traceback.follow(["epoch 2"])
    >>> traceback.is_last_word
    False
    """

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()
        self.is_last_word: bool = False  # nothing was written since
        self._unfinished: list[str] = []

    def follow(self, lines: Sequence[str]) -> None:
        """Takes what the rank has written."""
        for line in lines:
            if line.startswith(_FIRST):
                self._unfinished = [line]
            elif self._unfinished:
                self._unfinished.append(line)
            self.is_last_word = bool(self._unfinished) and not line.startswith((" ", _FIRST))
            if self.is_last_word or len(self._unfinished) > _LONGEST:
                self.lines = tuple(self._unfinished)
                self._unfinished = []


# --- what happens to the ranks when the launcher itself is killed


_PROGRAM = Path(__file__).with_name("reaper.py")


class Orphanage:
    """A small program that kills the groups it knows of when this process dies, however it dies.

    Linux can end a process with its parent, but not what that process has started; other systems
    cannot even do that. So both are left to a program that waits for the end of a pipe.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the launcher's group must not end this
        )

    def add(self, group: int) -> None:
        """From now on it is killed when this process dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It is gone; its number may belong to others."""
        self._tell(f"-{group}\n")

    def __enter__(self) -> "Orphanage":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None  # it was asked for
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed; the job can do without it
            os.write(self._process.stdin.fileno(), line.encode())


# --- one process of a job, with all that it starts


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_TAIL_LINES = 20
_GRACE_SECONDS = 2.0  # that a command by itself has to leave in, when told to
_RAISED_SECONDS = 10.0
# The last word of a rank that jax_dist.multihost ends. The one that failed may leave after it.
_BLAMES = re.compile(r"rank \d+: stopping because (?:a step took .+? )?rank (\d+) ")
# Of one that has waited for the others in vain.
_NOT_JOINED = re.compile(r"jax_dist\.errors\.JoinError: (?:rank \d+ has not reached )?rank (\d+) ")


class StartError(RuntimeError):
    """A command that cannot be started."""


class Rank:
    """A command that runs in a session, and so in a process group, of its own.

    The orphanage learns of the group, to end it should the launcher die.

    Raises:
      StartError: the command cannot be started.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        orphanage: Orphanage,
    ):
        self.number = number
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.ended_at: float | None = None  # seconds; when that was seen
        self.sent: int | None = None  # the last signal that it got from the launcher
        self.traceback: _Traceback = _Traceback()
        self.was_stopped = False  # when the others could not go on without it
        self.could_not_join: bool = False
        self.blames: int | None = None  # the rank that it says it ended for
        self._heard_at = 0.0
        self._exit_code: int | None = None
        self._orphanage = orphanage
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the launcher, which passes it on
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        except OSError as error:
            raise StartError(f"{command[0]} cannot be started: {error.strerror}") from error
        orphanage.add(self._process.pid)
        assert self._process.stdout is not None  # both were asked for
        assert self._process.stderr is not None
        self.outputs: tuple[Output, Output] = (
            Output("stdout", self._process.stdout),
            Output("stderr", self._process.stderr),
        )

    @property
    def is_buried(self) -> bool:
        return self._process.returncode is not None

    def heard(self, stream: Stream, lines: Sequence[str], now: float) -> None:
        """Takes note of what it has written."""
        self._heard_at = now
        self.tail.extend(lines)
        if stream == "stdout":
            return
        self.traceback.follow(lines)
        for line in lines:
            waited = _NOT_JOINED.match(line)
            blames = waited or _BLAMES.match(line)
            self.could_not_join |= waited is not None
            self.blames = int(blames[1]) if blames else self.blames

    def is_silent_after_raising(self, now: float) -> bool:
        """Whether it seems to have ended by an exception, and runs still."""
        return self.traceback.is_last_word and now >= self._heard_at + _RAISED_SECONDS

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        if self._exit_code is not None:
            return self._exit_code
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            self._exit_code = self._process.poll()
            return self._exit_code
        # It is not waited for: as long as it is not, its group keeps its number.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, self._process.pid, how)
        if ended is not None:
            exited = ended.si_code == os.CLD_EXITED
            self._exit_code = ended.si_status if exited else -ended.si_status
        return self._exit_code

    def is_stopped(self) -> bool:
        """Whether it, or what it has started, was stopped by a signal. Linux tells."""
        return ranks.is_group_stopped(self._process.pid)

    def send(self, number: int) -> None:
        """Sends a signal to the whole group, as a terminal does."""
        if self.exit_code() is None:
            self.sent = number
            self._send(number)

    def bury(self) -> None:
        """Ends what is left of the group. Its number may belong to another one from then on."""
        if not self.is_buried:
            self._send(signal.SIGKILL)
            self._process.wait()
            self._exit_code = self._process.returncode
            self._orphanage.remove(self._process.pid)

    def _send(self, number: int) -> None:
        # Just ended; macOS knows no permission to signal what has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def die_with(parent: int) -> None:
    """Linux ends this process itself when its parent dies. May run between fork and exec."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


# --- a command by itself, run to its end


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    timeout: float | None,
    at_end: Callable[[], None] = lambda: None,
) -> int | None:
    """The exit code of a command, and None if it was stopped after `timeout` seconds.

    All that it starts ends with it, and with this process, even if that is killed. The file
    `output` gets its standard output and error. Where it ended by itself, `at_end` is called before
    what it has left is ended.

    Raises:
      OSError: the command cannot be started.
    """
    with Orphanage() as orphanage, open(output, "wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
        orphanage.add(process.pid)
        try:
            code = process.wait(timeout)
            at_end()
            return code
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what it has started, which may live on where itself has ended.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            orphanage.remove(process.pid)


# --- the coordinator's port


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
    """The environment of one rank of some.

    `jax.distributed.initialize()` reads JAX's own variables for the address; it knows none for the
    number of processes or the rank, and finds these in SLURM's. Those of torchrun are for programs
    that read them.

    `port` is the coordinator's, on the loopback interface; `launcher` a process id; `token` what
    only the ranks of this job know. `gpus` are for each rank, where no CPU devices are simulated;
    other accelerators are left to JAX.

    >>> found = rank_environment({}, rank=1, ranks=2, port=4000, launcher=1, token="secret")
    >>> found["JAX_COORDINATOR_ADDRESS"], found["SLURM_PROCID"], found["RANK"]
    ('127.0.0.1:4000', '1', '1')
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_FAMILIES)
    }
    around_proxies = {}  # gRPC asks one even for the loopback interface
    if any(kept.get(name) or kept.get(name.upper()) for name in _PROXIES):  # else JAX would warn
        excepted = kept.get("no_proxy") or kept.get("NO_PROXY") or ""
        excepted = ",".join([*filter(None, [excepted]), _LOOPBACK, "localhost"])
        around_proxies = {"no_proxy": excepted, "NO_PROXY": excepted}
    # Counted among those that CUDA_VISIBLE_DEVICES leaves, if it is set.
    own_gpus = ",".join(map(str, range(rank * gpus, (rank + 1) * gpus)))
    return {
        # Else a line that was printed lies in a buffer until the end, and is lost by a kill.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code then shows where Python was
        "SLURM_JOB_ID": str(launcher),  # kept inside a real job: runs are named after it
        **kept,
        **_place(rank, ranks, port),
        **around_proxies,
        **(
            {"JAX_LOCAL_DEVICE_IDS": own_gpus}
            if cpu_devices is None
            else cpu_environment(kept, cpu_devices)
        ),
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


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """In JAX's words, srun's, and torchrun's: what these set, JAX reads, and programs read."""
    host = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "MASTER_ADDR")
    hosts = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    number = ("JAX_PROCESS_ID", "SLURM_PROCID", "SLURM_LOCALID", "RANK", "LOCAL_RANK")
    count = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "SLURM_NPROCS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "JAX_COORDINATOR_ADDRESS": f"{_LOOPBACK}:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"{_LOOPBACK}:{port}",  # else it listens everywhere
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
        **dict.fromkeys(host, _LOOPBACK),
        **dict.fromkeys(hosts, "1"),
        **dict.fromkeys(number, str(rank)),
        **dict.fromkeys(count, str(ranks)),
    }
