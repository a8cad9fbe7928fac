"""The processes of a job meet at the coordinator's address, before JAX meets there.

JAX's service ends the process by a signal where the port is taken, a process does not come or comes
twice. Here the same is an error, with the same text in each process that came.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_dist._errors import JoinError, message
from jax_dist.multihost.lines import Closed, Line, Lost, Message, Stranger
from jax_dist.multihost.ranks import do, name_ranks

_RETRY = 0.1  # seconds between two attempts to connect
_LINGER = 1.0  # seconds in which those that come late still hear why it failed
_PATIENCE = 5.0  # seconds for a port to become free, for an earlier run that is about to end
_SPARE = 5.0  # seconds that the verdict of rank 0 may take


@dataclass(frozen=True)
class Plan:
    """Who meets where."""

    address: str  # as given: "host:port"
    bind: str  # where rank 0 listens: "ip:port"
    processes: int
    rank: int
    timeout: float  # seconds


def meet(plan: Plan) -> dict[int, Line]:
    """Waits for all processes.

    Returns:
      In rank 0, a line to each other rank; in the others, the line to rank 0.

    Raises:
      JoinError: they could not be brought together.
    """
    deadline = time.monotonic() + plan.timeout
    if plan.rank == 0:
        return _Host(plan, deadline).wait()
    return {0: _visit(plan, deadline)}


def split(address: str) -> tuple[str, int]:
    """`"[::1]:80"` as `("::1", 80)`.

    Raises:
      ValueError: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"coordinator_address must be 'host:port', not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Host:
    """Rank 0, while the others come."""

    def __init__(self, plan: Plan, deadline: float):
        self._plan, self._deadline = plan, deadline
        self._selector = selectors.DefaultSelector()
        self._came: dict[int, Line] = {}
        self._twice: set[int] = set()
        self._counts: dict[int, int] = {0: plan.processes}

    def wait(self) -> dict[int, Line]:
        with _listening(self._plan, self._deadline) as listener, self._selector:
            self._selector.register(listener, selectors.EVENT_READ)
            self._collect(listener, self._deadline)
            refusal = self._refusal()
            if refusal is not None:
                self._collect(listener, time.monotonic() + _LINGER)
                refusal = self._refusal() or refusal
                self._tell({"is": "refused", "text": refusal})
                raise JoinError(refusal)
        self._tell({"is": "joined"})
        return self._came

    def _collect(self, listener: socket.socket, deadline: float) -> None:
        """Until all are here, something is wrong, or time is up."""
        was_wrong = self._refusal(final=False) is not None
        while len(self._came) < self._plan.processes - 1 or was_wrong:
            left = deadline - time.monotonic()
            if left <= 0 or (not was_wrong and self._refusal(final=False) is not None):
                return
            for key, _ in self._selector.select(left):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    line = Line(connection)
                    self._selector.register(line, selectors.EVENT_READ, data=line)
                else:
                    self._hear(key.data)

    def _hear(self, line: Line) -> None:
        try:
            heard = line.received()
        except (Closed, Lost, Stranger):
            self._forget(line)
            return
        for hello in heard:
            self._selector.unregister(line)
            self._welcome(line, hello)

    def _forget(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()

    def _welcome(self, line: Line, hello: Message) -> None:
        rank = hello["rank"]
        if hello["processes"] != self._plan.processes:
            self._counts[rank] = hello["processes"]
        if rank in self._came or rank == 0:
            self._twice.add(rank)
            rank = -1 - len(self._came)  # to be told, too
        self._came[rank] = line

    def _refusal(self, *, final: bool = True) -> str | None:
        plan = self._plan
        if len(self._counts) > 1:
            return _counts_differ(self._counts)
        if self._twice:
            return _came_twice(plan, sorted(self._twice))
        came = [0, *self._came]
        missing = [rank for rank in range(plan.processes) if rank not in came]
        return _did_not_come(plan, came, missing) if final and missing else None

    def _tell(self, message: Message) -> None:
        for line in self._came.values():
            line.send(message)
            if message["is"] == "refused":
                line.close()


@contextlib.contextmanager
def _listening(plan: Plan, deadline: float) -> Iterator[socket.socket]:
    host, port = split(plan.bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    patience = min(deadline, time.monotonic() + _PATIENCE)
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        while True:
            try:
                listener.bind((host, port))
                listener.listen(max(128, plan.processes))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise JoinError(_cannot_listen(plan, error)) from None
                heard = _ask_who_listens(plan)
                if heard is not None or time.monotonic() > patience:
                    raise JoinError(heard or _port_taken(plan)) from None
            time.sleep(_RETRY)
        yield listener


def _ask_who_listens(plan: Plan) -> str | None:
    """What the process at our port says, if it is another rank 0 of this job."""
    try:
        with socket.create_connection(split(plan.address), timeout=1.0) as connection:
            line = Line(connection)
            line.send({"is": "hello", "rank": plan.rank, "processes": plan.processes})
            heard = line.receive(_LINGER + 2.0)
    except (OSError, Closed, Lost, Stranger):
        return None
    return heard["text"] if heard["is"] == "refused" else None


def _visit(plan: Plan, deadline: float) -> Line:
    trouble = "nothing listens there"
    strange_since = None
    while True:
        try:
            connection = socket.create_connection(split(plan.address), timeout=2.0)
        except OSError as error:
            trouble, strange_since = str(error), None
        else:
            line = Line(connection)
            line.send({"is": "hello", "rank": plan.rank, "processes": plan.processes})
            try:
                heard = line.receive(max(1.0, deadline + _SPARE - time.monotonic()))
            except (Closed, Lost, Stranger, TimeoutError) as error:
                line.close()
                trouble = _strangeness(error)
                strange_since = strange_since or time.monotonic()
            else:
                if heard["is"] == "refused":
                    line.close()
                    raise JoinError(heard["text"])
                return line
        now = time.monotonic()
        if strange_since is not None and now > strange_since + 2 * _PATIENCE:
            raise JoinError(_stranger(plan, trouble))
        if now > deadline:
            raise JoinError(_no_coordinator(plan, trouble))
        time.sleep(_RETRY)


def _strangeness(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it listens, and says nothing"
    if isinstance(error, Stranger):
        return "what answers is no process of jax_dist"
    return "it closes the connection"


def _port_taken(plan: Plan) -> str:
    return message(
        what=f"rank 0 cannot listen at {plan.bind}",
        which=["another program listens there already"],
        why="the processes of a job meet at this address",
        do="Choose another port, or end that program; it may be left over from an earlier run.",
    )


def _cannot_listen(plan: Plan, error: OSError) -> str:
    return message(
        what=f"rank 0 cannot listen at {plan.bind}",
        which=[str(error)],
        why="the processes of a job meet at this address",
        do="Give the address of the machine on which rank 0 runs, as the others see it.",
    )


def _did_not_come(plan: Plan, came: Sequence[int], missing: Sequence[int]) -> str:
    return message(
        what=f"{do(missing, 'has', 'have')} not joined within {plan.timeout:g} s",
        which=[f"{do(came, 'waits', 'wait')} at {plan.address}"],
        why=f"the job has {plan.processes} processes, and none can start without the others",
        do=f"See the output of {name_ranks(missing)}. If they are only slow to start, give a "
        "longer initialization_timeout.",
    )


def _came_twice(plan: Plan, ranks: Sequence[int]) -> str:
    return message(
        what=f"two processes say that they are {name_ranks(ranks)}",
        which=[f"both came to {plan.address}"],
        why=f"each of the {plan.processes} processes has a process_id of its own",
        do="Give each process another process_id; if two jobs run, give each another port.",
    )


def _counts_differ(counts: dict[int, int]) -> str:
    return message(
        what="the processes do not agree how many they are",
        which=[f"rank {rank} was told {count}" for rank, count in sorted(counts.items())],
        why="a job starts when all of its processes are there",
        do="Give the same num_processes to all.",
    )


def _no_coordinator(plan: Plan, trouble: str) -> str:
    return message(
        what=f"rank {plan.rank} has not reached rank 0 within {plan.timeout:g} s",
        which=[f"{plan.address}: {trouble}"],
        why="the processes of a job meet there",
        do="See the output of rank 0. If it runs, see that this machine can reach its address. If "
        "it is only slow to start, give a longer initialization_timeout.",
    )


def _stranger(plan: Plan, trouble: str) -> str:
    return message(
        what=f"rank {plan.rank} meets a stranger at {plan.address}",
        which=[trouble],
        why="rank 0 of this job should listen there, called by jax_dist.multihost.initialize too",
        do="Choose another port, or end what listens there. See the output of rank 0.",
    )
