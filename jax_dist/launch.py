"""Run a command in several processes on this machine, joined as one JAX job.

The ranks find their place in their environment, in the variables of JAX, SLURM and torchrun. When
one fails, the others may wait for it in a collective: they are ended. This module never loads JAX.
"""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, TypeAlias

import psutil

from jax_dist._usage import counted

Stream: TypeAlias = Literal["stdout", "stderr"]
Write: TypeAlias = Callable[[int, Stream, str], None]  # of the rank, the stream, and a line
Event: TypeAlias = Literal["joined", "waiting", "finished", "failed"]
Reason: TypeAlias = Literal["finished", "failed", "timeout", "interrupted", "terminated"]

NOTES = "JAX_DIST_LAUNCH"  # variable: the directory in which ranks leave notes for the launcher
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0  # between SIGTERM and SIGKILL, and for the last lines of output
_EXIT_CODES: dict[Reason, int] = {"timeout": 124, "interrupted": 130, "terminated": 143}
# SIGHUP comes when a terminal closes; Windows has none.
END_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]


def note(event: Event, rank: int, *, holds: bool = True) -> None:
    """Tell the launcher and the other ranks, if this is a rank, what has become of it."""
    with contextlib.suppress(KeyError, OSError):  # no launcher, or it is gone
        path = pathlib.Path(os.environ[NOTES], f"{event}-{rank}")
        path.touch() if holds else path.unlink(missing_ok=True)


def find_ranks(event: Event, notes: pathlib.Path | None = None) -> tuple[int, ...]:
    """Return the ranks that left a note of an event, in the directory of this job by default."""
    paths = (notes or pathlib.Path(os.environ[NOTES])).iterdir()
    names = (path.name.split("-") for path in paths)
    return tuple(sorted(int(rank) for name, rank in names if name == event))


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job."""

    reason: Reason
    codes: tuple[int, ...]  # exit code of each rank; negative: the signal that ended it
    first: int | None  # the rank that failed first
    running: tuple[int, ...]  # ranks that were running when the job was to end
    joined: int  # number of ranks that called `multihost.initialize`
    finished: tuple[int, ...]  # of these, the ranks whose program came to its end
    seconds: float

    @property
    def exit_code(self) -> int:
        """Return the exit code of the launcher: that of the reason, or of the first failed rank."""
        of_first = 0 if self.first is None else shell_code(self.codes[self.first])
        return _EXIT_CODES.get(self.reason, of_first)

    def describe(self) -> Iterator[str]:
        """Yield lines for the user: the cause of a failure, and a summary."""
        if self.reason == "timeout":
            yield f"the time limit is over; still running: {', '.join(map(str, self.running))}"
        elif self.first is not None:
            yield f"rank {self.first} failed first: {format_code(self.codes[self.first])}"
            if self.codes[self.first] == -signal.SIGABRT and 0 < len(self.finished) < self.joined:
                yield (
                    f"only in rank {', '.join(map(str, self.finished))} the program had ended "
                    "before; JAX ends such a job after the shutdown_timeout of initialize"
                )
        count = len(self.codes)
        if self.reason == "finished" and count > 1 and not self.joined:
            yield (
                "no rank called jax_dist.multihost.initialize; unless the program calls "
                f"jax.distributed.initialize itself, these were {count} separate jobs"
            )
        yield f"{counted(count, 'rank')}, {self.seconds:.1f} s, exit code {self.exit_code}"


def shell_code(code: int) -> int:
    """Return an exit code of `subprocess` as that of a shell: 3 for 3, 137 for -9 (SIGKILL)."""
    return code if code >= 0 else 128 - code


def format_code(code: int) -> str:
    """Return an exit code in words: "exit code 3" for 3, "signal SIGKILL" for -9."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}"  # most real-time signals have no name


class _Rank:
    """A command that runs in a session, and so in a process group, of its own."""

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], write: Write
    ) -> None:
        self.number = number
        self.code: int | None = None  # None while it runs
        self._write = write
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
        )
        self._readers = []
        for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            reader = threading.Thread(target=self._read, args=(stream, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)

    def poll(self) -> int | None:
        """Return the exit code, or None if the rank runs; kill the children that it left."""
        code = self._process.poll()
        if self.code is None and code is not None:
            self.send(signal.SIGKILL)
            self.code = code  # ends `send`: the process number may soon be that of another process
        return self.code

    def send(self, number: int) -> None:
        """Send a signal to the process group of the rank, if it runs."""
        if self.code is None:
            # It may have ended just now, which macOS reports as a missing permission.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def end(self) -> int:
        """Kill the rank if it runs, wait for its last output, and return its exit code."""
        self.send(signal.SIGKILL)
        self.code = self._process.wait()
        for reader in self._readers:  # a process that left the group may hold the pipe open
            reader.join(_GRACE_SECONDS)
        return self.code

    def _read(self, stream: Stream, pipe: IO[str]) -> None:
        """Pass each line of a stream to `write`, in a thread of its own."""
        with pipe:
            for line in pipe:
                self._write(self.number, stream, line.rstrip("\n"))


@dataclass
class _Job:
    """The ranks, and what becomes of them."""

    ranks: list[_Rank]
    notes: pathlib.Path
    signals: list[int]  # received, to be passed on; grows meanwhile
    grace: float
    timeout: float | None
    start: float = field(default_factory=time.monotonic)
    reason: Reason = "finished"
    first: int | None = None
    running: tuple[int, ...] = ()
    schedule: list[tuple[float, int]] = field(default_factory=list)  # time and signal
    was_terminated: bool = False

    def watch(self) -> None:
        """Wait until no rank runs."""
        while any(rank.poll() is None for rank in self.ranks):
            self._check_failed()
            self._check_timeout()
            while self.signals:
                self._pass_on(self.signals.pop(0))
            while self.schedule and time.monotonic() >= self.schedule[0][0]:
                self._send(self.schedule.pop(0)[1])
            time.sleep(_POLL_SECONDS)
        self._check_failed()
        if self.reason == "finished" and any(rank.code for rank in self.ranks):
            self.reason = "terminated"  # after SIGTERM, by ranks without a handler for it

    def _check_failed(self) -> None:
        """Begin to stop the job if a rank has failed, and remember which one failed first."""
        expected = (None, 0, -signal.SIGTERM) if self.was_terminated else (None, 0)
        failed = [rank for rank in self.ranks if rank.poll() not in expected]
        if failed and self.reason == "finished":
            self.first = min(failed, key=self._failure_order).number
            self._stop("failed", (self.grace, signal.SIGTERM))

    def _failure_order(self, rank: _Rank) -> tuple[int, int]:
        """Return a sort key for ranks that were seen to fail together: first the likely cause.

        First those that a signal killed, then by the times of their notes, last what JAX aborted.
        """
        assert rank.code is not None
        if rank.code == -signal.SIGABRT:  # JAX aborts a rank because of another one
            return 2, 0
        if rank.code < 0:
            return 0, 0
        try:
            return 1, (self.notes / f"failed-{rank.number}").stat().st_mtime_ns
        except FileNotFoundError:  # without `initialize`, which leaves notes, it waits for nobody
            return 1, 0

    def _check_timeout(self) -> None:
        is_over = self.timeout is not None and time.monotonic() > self.start + self.timeout
        if is_over and self.reason == "finished":
            self._stop("timeout", (0.0, signal.SIGTERM))

    def _pass_on(self, number: int) -> None:
        """Handle a signal that the launcher got; a second one is more severe."""
        if number == signal.SIGINT and self.reason == "interrupted":  # the second Ctrl-C
            self._send(signal.SIGKILL)
        elif number == signal.SIGINT:  # the first Ctrl-C
            self._stop("interrupted", (0.0, signal.SIGINT), (self.grace, signal.SIGTERM))
        elif self.was_terminated:  # the second SIGTERM or SIGHUP
            self._stop("terminated", (0.0, signal.SIGTERM))
        else:  # the first SIGTERM: the ranks may take their time to save their state
            self.was_terminated = True
            self._send(signal.SIGTERM)

    def _stop(self, reason: Reason, *steps: tuple[float, int]) -> None:
        """Schedule signals to the ranks that run, as (seconds from now, signal), and SIGKILL."""
        self.reason = reason
        self.running = tuple(rank.number for rank in self.ranks if rank.code is None)
        last_seconds, _ = steps[-1]
        steps = (*steps, (last_seconds + _GRACE_SECONDS, signal.SIGKILL))
        self.schedule = [(time.monotonic() + seconds, number) for seconds, number in steps]

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.send(number)


def run(
    command: Sequence[str],
    ranks: int,
    write: Write,
    *,
    cpu_devices: int | None = None,
    gpus: int = 1,
    timeout: float | None = None,
    grace: float = 1.0,
    environment: Mapping[str, str] | None = None,
    pass_on_signals: bool = False,
) -> JobOutcome:
    """Run a command several times in parallel, as the ranks of one job, and wait for all.

    When a rank fails, the others get `grace` seconds, then SIGTERM, then SIGKILL. Their children
    end with them, except those in a session of their own. `timeout` is in seconds, for all.

    Args:
      write: called with each line of output, by several threads.
      cpu_devices: simulated CPU devices of each rank; None: `gpus` real ones.
      environment: what the ranks inherit; by default that of this process.
      pass_on_signals: whether SIGINT, SIGTERM and SIGHUP are for the ranks, not for this program.

    Raises:
      OSError: the command cannot be started.
    """
    inherited = os.environ if environment is None else environment
    port = _choose_port()
    signals: list[int] = []
    collecting = handle_signals(signals.append) if pass_on_signals else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="jax-dist-launch-") as notes, collecting:
        started: list[_Rank] = []
        try:
            for number in range(ranks):
                variables = rank_environment(
                    inherited, number, ranks, port, cpu_devices=cpu_devices, gpus=gpus
                )
                started.append(_Rank(number, command, {**variables, NOTES: notes}, write))
            job = _Job(started, pathlib.Path(notes), signals, grace, timeout)
            job.watch()
        finally:
            codes = tuple(rank.end() for rank in started)
        return JobOutcome(
            reason=job.reason,
            codes=codes,
            first=job.first,
            running=job.running,
            joined=len(find_ranks("joined", job.notes)),
            finished=find_ranks("finished", job.notes),
            seconds=time.monotonic() - job.start,
        )


@contextlib.contextmanager
def handle_signals(handler: Callable[[int], object]) -> Iterator[None]:
    """Call `handler` with the signals that end a program; those that are ignored stay ignored."""
    previous = {}
    for number in END_SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not set from Python
            previous[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: pathlib.Path,
    timeout: float | None,
) -> int | None:
    """Run one command, and return its exit code, or None if it was stopped at its time limit.

    Its process group ends with it. The file `output` gets both of its streams.
    """
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


_LOOPBACK = "127.0.0.1"
# Where the launcher runs inside a job, these speak of that job. JAX looks for Open MPI first.
_NOT_INHERITED = ("JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX")
_NOT_INHERITED_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "SLURM_STEP_", "TORCHELASTIC_")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")
_FORCED_DEVICES = "--xla_force_host_platform_device_count"


def rank_environment(
    inherited: Mapping[str, str],
    rank: int,
    ranks: int,
    port: int,
    *,
    cpu_devices: int | None = None,
    gpus: int = 1,
) -> dict[str, str]:
    """Return the environment variables of one rank of a job on this machine.

    `jax.distributed.initialize` takes the address from JAX's variable, and the number of processes
    and the rank from SLURM's; torchrun's are for programs that read them.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",  # a kill would lose the lines in the buffer
        "PYTHONFAULTHANDLER": "1",  # a crash in native code shows the Python stack
        "SLURM_JOB_ID": "0",
    }
    for name, value in inherited.items():
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES):
            variables[name] = value
    address = f"{_LOOPBACK}:{port}"
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    variables |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port)}
    variables |= {"SLURM_STEP_NODELIST": _LOOPBACK, "SLURM_STEP_NUM_NODES": "1"}
    names = ("JAX_PROCESS_ID", "SLURM_PROCID", "SLURM_LOCALID", "RANK", "LOCAL_RANK")
    variables |= dict.fromkeys(names, str(rank))
    names = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    variables |= dict.fromkeys(names, str(ranks))
    if any(variables.get(name) or variables.get(name.upper()) for name in _PROXIES):
        # gRPC would connect to the loopback interface by the proxy.
        direct_hosts = variables.get("no_proxy") or variables.get("NO_PROXY")
        hosts = ",".join(filter(None, [direct_hosts, _LOOPBACK, "localhost"]))
        variables |= {"no_proxy": hosts, "NO_PROXY": hosts}
    if cpu_devices is None:
        devices = range(rank * gpus, (rank + 1) * gpus)
        return variables | {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices))}
    flags = variables.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(_FORCED_DEVICES)]
    variables |= {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return variables | {"JAX_NUM_CPU_DEVICES": str(cpu_devices)}


def _choose_port() -> int:
    """Return a random port that is free, and that the system does not give to connections.

    JAX listens at it some seconds later. A port from `bind` to 0 might be given away until then.
    """
    try:
        taken = {link.laddr[1] for link in psutil.net_connections("tcp") if link.laddr}
    except psutil.AccessDenied:  # macOS
        taken = set()
    return random.choice([port for port in range(20_000, 32_000) if port not in taken])
