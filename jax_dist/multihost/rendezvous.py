"""The processes of a job meet at the coordinator's address, before JAX meets there.

JAX's service ends the process by a signal if the port is taken, or a process does not come or comes
twice. Here that is an error, with the same text in each process that came. A peer that does
not know the token of the job, or speaks another protocol, is disconnected and named, and the others
continue.
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_dist.errors import JoinError, message, refusal
from jax_dist.multihost import ranks
from jax_dist.multihost.channel import Channel, Closed, Lost, Message, Stranger
from jax_dist.multihost.ranks import do, name_ranks

_log = logging.getLogger("jax_dist.multihost")

_RETRY = 0.1  # seconds between two attempts to connect
_LINGER = 1.0  # seconds in which those that come late still hear why it failed
_PATIENCE = 5.0  # the same where one has ended early; and seconds for a port to become free
_SPARE = 5.0  # seconds that the verdict of rank 0 may take
_GREETING = 10.0  # seconds in which a peer has to say who it is
_SPARE_GUESTS = 64  # that may be greeting at the same time, beside two connections of each rank
_NAMED = 5  # strangers that are told one by one


@dataclass(frozen=True)
class RendezvousPlan:
    """Who meets where."""

    address: str  # as given: "host:port"
    bind: str  # where rank 0 listens: "ip:port"
    processes: int
    rank: int
    timeout: float  # seconds
    token: bytes = b""  # what only the processes of this job know; empty: everybody does


@dataclass(frozen=True)
class Peer:
    """Another process of the job."""

    channel: Channel
    machine: str
    pid: int


@dataclass(frozen=True)
class _Hello(Message):
    """To rank 0, first of all."""

    rank: int
    processes: int  # how many it was told that there are
    machine: str  # one text for each machine, or container
    pid: int


@dataclass(frozen=True)
class _JoinedReply(Message):
    """From rank 0: all are here."""

    machine: str
    pid: int


@dataclass(frozen=True)
class _RefusedReply(Message):
    """From rank 0: they cannot be brought together."""

    text: str


def meet(plan: RendezvousPlan) -> dict[int, Peer]:
    """Waits for all processes.

    Returns:
      In rank 0, each other rank; in the others, rank 0.

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

    def __init__(self, plan: RendezvousPlan, deadline: float):
        self._plan, self._deadline = plan, deadline
        self._selector = selectors.DefaultSelector()
        self._guests: dict[Channel, float] = {}  # not known yet; until when they have time
        self._came: dict[int, Peer] = {}
        self._twice: dict[Channel, int] = {}
        self._gone: set[int] = set()
        self._counts: dict[int, int] = {0: plan.processes}
        self._strangers = 0
        self._last_stranger = ""

    def wait(self) -> dict[int, Peer]:
        with _listening(self._plan, self._deadline) as listener, self._selector:
            self._selector.register(listener, selectors.EVENT_READ)
            self._collect(listener, self._deadline)
            refusal = self._refusal()
            if refusal is not None:
                linger = _PATIENCE if self._gone else _LINGER
                self._collect(listener, time.monotonic() + linger)
                refusal = self._refusal() or refusal
            for guest in self._guests:
                guest.close()
            if refusal is not None:
                self._tell(_RefusedReply(refusal))
                raise JoinError(refusal)
        self._tell(_JoinedReply(ranks.machine_name(), os.getpid()))
        return self._came

    def _collect(self, listener: socket.socket, deadline: float) -> None:
        """Until all are here, something is wrong, or time is up."""
        was_wrong = self._refusal(final=False) is not None
        while len(self._came) < self._plan.processes - 1 or (was_wrong and not self._gone):
            now = time.monotonic()
            if now >= deadline or (not was_wrong and self._refusal(final=False) is not None):
                return
            for guest in [each for each, until in self._guests.items() if until < now]:
                self._cut_off(guest, f"it has not said who it is within {_GREETING:g} s")
            until = min([deadline, *self._guests.values()])
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.fileobj is listener:
                    self._accept(listener)
                elif key.data.fileno() >= 0:  # not closed meanwhile, to make room
                    self._hear(key.data)

    def _accept(self, listener: socket.socket) -> None:
        is_full = len(self._guests) >= 2 * self._plan.processes + _SPARE_GUESTS
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # no more files may be open
            is_full = True
        else:
            guest = Channel(connection, self._plan.token, is_host=True)
            self._guests[guest] = time.monotonic() + _GREETING
            self._selector.register(guest, selectors.EVENT_READ, data=guest)
        if is_full and self._guests:
            oldest = next(iter(self._guests))
            self._cut_off(oldest, "it has said nothing, and too many others wait")

    def _hear(self, channel: Channel) -> None:
        heard, end = [], None
        try:
            heard = channel.received()
        except (Closed, Lost, Stranger) as error:
            end = error
        if channel in self._guests:
            if isinstance(end, Stranger):
                self._cut_off(channel, str(end))
            elif end is not None:
                self._forget(channel)
            elif heard:
                self._welcome(channel, heard[0])
        elif heard or end is not None:  # a rank has nothing to say yet: it has ended, or is no rank
            self._selector.unregister(channel)
            self._gone |= {rank for rank, peer in self._came.items() if peer.channel is channel}

    def _welcome(self, guest: Channel, hello: Message) -> None:
        processes = self._plan.processes
        if not isinstance(hello, _Hello) or hello.processes < 2:
            self._cut_off(guest, "it does not say which rank it is")
        elif hello.processes == processes and not 0 <= hello.rank < processes:
            self._cut_off(guest, f"it says that it is rank {hello.rank} of {processes}")
        else:
            del self._guests[guest]
            guest.trust()
            if hello.processes != processes:
                self._counts[hello.rank] = hello.processes
            if hello.rank in self._came or hello.rank == 0:
                self._twice[guest] = hello.rank
            else:
                self._came[hello.rank] = Peer(guest, hello.machine, hello.pid)

    def _forget(self, guest: Channel) -> None:
        del self._guests[guest]
        self._selector.unregister(guest)
        guest.close()

    def _cut_off(self, guest: Channel, why: str) -> None:
        self._strangers += 1
        self._last_stranger = f"a stranger from {guest.origin} was cut off: {why}"
        if self._strangers <= _NAMED:
            _log.warning("rank 0: %s", self._last_stranger)
        if self._strangers == _NAMED:
            _log.warning("rank 0: more strangers are cut off without a word")
        self._forget(guest)

    def _refusal(self, *, final: bool = True) -> str | None:
        plan, twice = self._plan, sorted(set(self._twice.values()))
        if len(self._counts) > 1:
            counts = sorted(self._counts.items())
            return message(
                what="the processes do not agree how many they are",
                which=[f"rank {rank} was told {count}" for rank, count in counts],
                why="a job starts when all of its processes are there",
                do="Give the same num_processes to all.",
            )
        if twice:
            return message(
                what=f"two processes say that they are {name_ranks(twice)}",
                which=[f"both came to {plan.address}"],
                why=f"each of the {plan.processes} processes has a process_id of its own",
                do="Give each process another process_id; if two jobs run, give each another port.",
            )
        if self._gone:
            return _went_away(plan, sorted(self._gone))
        came = [0, *self._came]
        missing = [rank for rank in range(plan.processes) if rank not in came]
        if not final or not missing:
            return None
        waiting = f"{do(came, 'waits', 'wait')} at {plan.address}"
        return message(
            what=f"{do(missing, 'has', 'have')} not joined within {plan.timeout:g} s",
            which=[waiting, *filter(None, [self._last_stranger])],
            why=f"the job has {plan.processes} processes, and none can start without the others",
            do=f"See the output of {name_ranks(missing)}. If they are only slow to start, give a "
            "longer initialization_timeout.",
        )

    def _tell(self, message: Message) -> None:
        for channel in [*(peer.channel for peer in self._came.values()), *self._twice]:
            channel.send(message)
            if isinstance(message, _RefusedReply):
                channel.close()


@contextlib.contextmanager
def _listening(plan: RendezvousPlan, deadline: float) -> Iterator[socket.socket]:
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
                listener.settimeout(0)  # who connects may have gone before it is accepted
                break
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                if is_taken:
                    heard = _ask_who_listens(plan)
                    if heard is not None:
                        raise JoinError(heard) from None
                    if time.monotonic() <= patience:
                        time.sleep(_RETRY)
                        continue
                raise refusal(
                    JoinError,
                    what=f"rank 0 cannot listen at {plan.bind}",
                    which=["another program listens there already" if is_taken else str(error)],
                    why="the processes of a job meet at this address",
                    do="Choose another port, or end that program; it may be left over from an "
                    "earlier run."
                    if is_taken
                    else "Give the address of the machine on which rank 0 runs, as the others see "
                    "it.",
                ) from None
        yield listener


def _ask_who_listens(plan: RendezvousPlan) -> str | None:
    """What the process at our port says, if it is another rank 0 of this job."""
    try:
        with socket.create_connection(split(plan.address), timeout=1.0) as connection:
            heard = _say_hello(plan, connection).receive(_LINGER + 2.0)
    except (OSError, Closed, Lost, Stranger):
        return None
    return heard.text if isinstance(heard, _RefusedReply) else None


def _say_hello(plan: RendezvousPlan, connection: socket.socket) -> Channel:
    channel = Channel(connection, plan.token, is_host=False)
    channel.send(_Hello(plan.rank, plan.processes, ranks.machine_name(), os.getpid()))
    return channel


def _visit(plan: RendezvousPlan, deadline: float) -> Peer:
    trouble = "nothing listens there"
    strange_since = lost_since = None
    while True:
        channel = None
        try:
            channel = _say_hello(plan, socket.create_connection(split(plan.address), timeout=2.0))
            channel.greet(_GREETING)
            heard = channel.receive(max(1.0, deadline + _SPARE - time.monotonic()))
        except (Closed, Lost, Stranger, TimeoutError, OSError) as error:
            heard = None
            if channel is None:
                trouble, strange_since = str(error), None
            elif channel.is_open and not isinstance(error, TimeoutError):  # it was rank 0
                lost_since = lost_since or time.monotonic()
            else:
                trouble = str(error) or "it closes the connection"
                if isinstance(error, TimeoutError):
                    trouble = "it listens, and says nothing"
                strange_since = strange_since or time.monotonic()
        if isinstance(heard, _JoinedReply):
            assert channel is not None
            return Peer(channel, heard.machine, heard.pid)
        if channel is not None:
            channel.close()
        if isinstance(heard, _RefusedReply):
            raise JoinError(heard.text)
        now = time.monotonic()
        if lost_since is not None and now > lost_since + _PATIENCE:
            raise JoinError(_went_away(plan, [0]))
        if strange_since is not None and now > strange_since + 2 * _PATIENCE:
            raise refusal(
                JoinError,
                what=f"rank {plan.rank} meets a stranger at {plan.address}",
                which=[trouble],
                why="rank 0 of this job should listen there, called by "
                "jax_dist.multihost.initialize too",
                do="Choose another port, or end what listens there. See the output of rank 0.",
            )
        if now > deadline:
            raise refusal(
                JoinError,
                what=f"rank {plan.rank} has not reached rank 0 within {plan.timeout:g} s",
                which=[f"{plan.address}: {trouble}"],
                why="the processes of a job meet there",
                do="See the output of rank 0. If it runs, see that this machine can reach its "
                "address. If it is only slow to start, give a longer initialization_timeout.",
            )
        time.sleep(_RETRY)


def _went_away(plan: RendezvousPlan, ranks: Sequence[int]) -> str:
    return message(
        what=f"{do(ranks, 'has', 'have')} ended before all were there",
        which=[f"{do(ranks, 'was', 'were')} at {plan.address} already"],
        why=f"the job has {plan.processes} processes, and none can start without the others",
        do=f"See the output of {name_ranks(ranks)}.",
    )
