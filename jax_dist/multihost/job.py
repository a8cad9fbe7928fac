"""The processes of one job, as each of them sees the others while it runs.

Rank 0 has a channel to each other rank, and decides; the others tell it what happens to them, and
do what it says. A thread listens, which runs also while the main thread waits in a collective.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax_dist.multihost import ranks
from jax_dist.multihost.channel import Closed, Lost, Message, Stranger
from jax_dist.multihost.main_thread import (
    FAILED,
    Stall,
    end_now,
    is_leaving_jax,
    say,
    stack_of_main,
)
from jax_dist.multihost.ranks import do
from jax_dist.multihost.rendezvous import Peer

_TICK = 0.1  # seconds between two looks at who stands still
_WATCH = 1.0  # seconds between two looks at who is stopped
_LEAVE = 2.0  # seconds in which the others leave before rank 0 does, which holds JAX's service
_DOUBT = 0.2  # seconds in which another process may turn out to have failed first
# Who loses a peer in a collective may say so before the peer's line is gone: on a busy machine, a
# killed process takes a while to close all that it had open.
_LONG_DOUBT = 1.5
_LOST_PEER = ("onnection closed", "onnection reset", "roken pipe", "ocket closed", "remote process")
SAME_CALLS = (
    "Every process has to make the same calls: look for batches that are shared out unevenly, or "
    "for a way out that some processes take alone."
)
_OWN = 5.0  # seconds for the process that failed to end by itself, by its own atexit functions
# Of JAX's heartbeat timeout, after which it ends all processes but the one that is stopped. The
# last heartbeat may have come long before it was.
_STOPPED = 0.35


@dataclass(frozen=True)
class Failed(Message):
    """To rank 0: this process has failed."""

    what: str  # as in "ValueError: its text"
    traceback: str
    code: int  # the exit code


@dataclass(frozen=True)
class _Finished(Message):
    """To rank 0: this process is done, and waits for the others."""


@dataclass(frozen=True)
class _SomeFinished(Message):
    """From rank 0: say so if you wait in JAX for those that have finished."""


@dataclass(frozen=True)
class _Stuck(Message):
    """To rank 0: this process waits in JAX, and has not moved since others have finished."""

    stack: str


@dataclass(frozen=True)
class _Leave(Message):
    """From rank 0: all are done."""


@dataclass(frozen=True)
class _End(Message):
    """From rank 0: all shall end."""

    culprit: int | None  # the rank to blame
    text: str  # behind "stopping because"
    code: int  # the exit code
    stacks: bool  # whether to show what each thread is doing


@dataclass(frozen=True)
class _Ping(Message):
    """From rank 0, now and then."""


@dataclass(frozen=True)
class _Pong(Message):
    """The answer: this process runs."""


class Job:
    """This process among the others.

    Attributes:
      rank: of this process.
      processes: how many there are.
      has_joined: whether JAX has joined the processes, too; before, the end of one is that of all.
      has_failed: whether the main thread has failed, and its traceback is on the screen.
      hear_else: called in the listening thread with a rank and its message of another kind.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        peers: Mapping[int, Peer],
        *,
        fail_fast: bool,
        early_exit_timeout: Callable[[], float],
        heartbeat_timeout: float,
        shutdown_timeout: float,
    ):
        """
        Args:
          rank: of this process.
          processes: how many there are.
          peers: the others, or rank 0.
          fail_fast: whether the end of one is the end of all.
          early_exit_timeout: gives the seconds that a process may stand still, waiting in JAX,
            after another one has finished.
          heartbeat_timeout: the seconds after which JAX gives up a process that does not answer.
          shutdown_timeout: the seconds that a finished process waits for those that still work.
        """
        self.rank: int = rank
        self.processes: int = processes
        self.has_joined: bool = False
        self.has_failed: bool = False
        self.hear_else: Callable[[int, Message], None] = lambda rank, message: None
        self._peers = dict(peers)  # those that have not ended
        self._fail_fast = fail_fast
        self._early_exit_timeout, self._shutdown_timeout = early_exit_timeout, shutdown_timeout
        self._stopped_timeout = _STOPPED * heartbeat_timeout
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._inbox: list[Message] = []  # what rank 0 tells itself
        self._wake, self._woken = socket.socketpair()
        self._finished: dict[int, float] = {}  # rank to when; in rank 0
        self._failure: tuple[float, int, Failed] | None = None  # the first one; in rank 0
        self._progress: Stall | None = None  # while others have finished
        self._heard = dict.fromkeys(peers, time.monotonic())  # rank to when
        self._stopped: dict[int, float] = {}  # rank to since when
        self._watched_at = time.monotonic()
        self._is_done = False  # this process is at its end, well or not
        self._waits_at_exit = False
        self._ends_itself = False  # by its own exit code, though the job ends badly
        self._may_leave = threading.Event()
        self._ending: int | None = None  # the exit code
        self._leave_at: float | None = None

    def start(self) -> None:
        """Listens from now on."""
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="jax_dist job", daemon=True).start()

    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self._pid

    def tell(self, rank: int, message: Message) -> None:
        """Sends to one rank: rank 0, or from there to any."""
        if rank == self.rank:
            self._inbox.append(message)
            self._wake.send(b"!")
            return
        peer = self._peers.get(rank)
        if peer is not None:
            with self._sending:
                peer.channel.send(message)

    def tell_all(self, message: Message) -> None:
        """From rank 0, to all, itself last."""
        for rank in [*self._peers, self.rank]:
            self.tell(rank, message)

    def fail(self, what: str, traceback: str, code: int = FAILED, *, in_main: bool = True) -> None:
        """This process has failed: the others shall end, too.

        Args:
          what: as in `ValueError: its text`.
          traceback: of the exception.
          code: the exit code.
          in_main: whether the main thread has failed, which then goes to its end by itself.
        """
        self._is_done, self.has_failed = True, in_main
        self.tell(0, Failed(what, traceback, code))

    def finish(self, *, wait: bool = True) -> bool:
        """This process is done.

        Args:
          wait: whether to wait until all are.

        Returns:
          Whether the job ends well: no other process waits in JAX for this one.
        """
        self._is_done, self._waits_at_exit = True, wait
        self.tell(0, _Finished())
        if wait:
            self._may_leave.wait()
        return self._ending is None

    def wait_until_known(self) -> int:
        """After `fail`: until the others know, and, in rank 0, have left. Gives the exit code."""
        until = time.monotonic() + _LEAVE
        while time.monotonic() < until and (
            self._ending is None or (self.rank == 0 and self._peers)
        ):
            time.sleep(_TICK / 5)
        return FAILED if self._ending is None else self._ending

    @property
    def is_ending(self) -> bool:
        """Whether this process has been told to end, and why."""
        return self._ending is not None

    def end_all(self, culprit: int | None, text: str, code: int, *, stacks: bool = False) -> None:
        """In rank 0: ends the job, once.

        Args:
          culprit: the rank to blame, if there is one.
          text: what the others are told, after "stopping because".
          code: the exit code of all.
          stacks: whether all show their stacks.
        """
        if self._ending is None:
            self._ending = code
            self.tell_all(_End(culprit, text, code, stacks))

    # ---- in the listening thread ----

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, peer in self._peers.items():
                selector.register(peer.channel, selectors.EVENT_READ, data=rank)
            while True:
                is_timed = self._progress or self._leave_at or self._failure or self._finished
                for key, _ in selector.select(_TICK if is_timed else _WATCH):
                    if key.data is None:
                        self._woken.recv(1 << 10)
                    else:
                        self._hear(selector, key.data)
                while self._inbox:
                    self._act(self.rank, self._inbox.pop(0))
                self._look()

    def _hear(self, selector: selectors.BaseSelector, rank: int) -> None:
        channel = self._peers[rank].channel
        try:
            heard = channel.received()
        except (Closed, Lost, Stranger) as error:
            selector.unregister(channel)
            del self._peers[rank]
            channel.close()
            self._on_silence(rank, ended=isinstance(error, Closed))
            return
        self._heard[rank] = time.monotonic()
        for message in heard:
            self._act(rank, message)

    def _act(self, rank: int, message: Message) -> None:
        match message:
            case _Ping():
                self.tell(rank, _Pong())
            case Failed():
                if self._failure is None:
                    self._failure = (time.monotonic(), rank, message)
            case _Finished():
                self._finished[rank] = time.monotonic()
                self._look_who_is_done()
            case _SomeFinished():
                if not self._is_done and self._progress is None:
                    self._progress = Stall()
            case _Stuck():
                if self._finished:
                    self._on_stuck(rank, message.stack)
            case _Leave():
                self._may_leave.set()
            case _End():
                self._on_end(message)
            case _:
                self.hear_else(rank, message)

    def _look(self) -> None:
        """At what time brings."""
        now = time.monotonic()
        if self._leave_at is not None and (
            now > self._leave_at or not (self._peers or self._ends_itself)
        ):
            end_now("", FAILED if self._ending is None else self._ending)
        if self._failure is not None and now > self._failure[0] + _doubt(self._failure[2]):
            self._blame(*self._failure[1:])
        if self._progress is not None and not self._is_done:
            if is_leaving_jax():
                self._is_done = True
                self.tell(0, _Finished())
            elif self._progress.blocked_for() > self._early_exit_timeout():  # it waits for them
                self._progress = None
                self.tell(0, _Stuck(stack_of_main()))
        if self._finished and not self._may_leave.is_set():
            waited = now - min(self._finished.values())
            if waited > self._shutdown_timeout:
                finished = sorted(self._finished)
                working = [rank for rank in range(self.processes) if rank not in finished]
                text = (
                    f"the end does not come: {do(finished, 'has', 'have')} waited {waited:.0f} s "
                    f"for {do(working, 'which still works', 'which still work')}. A longer "
                    "shutdown_timeout of jax_dist.multihost.initialize lets it."
                )
                self.end_all(None, text, FAILED)
        if now > self._watched_at + _WATCH:
            self._watched_at = now
            self._look_who_is_stopped(now)

    def _look_who_is_stopped(self, now: float) -> None:
        """JAX would end all others, and the first to end would take the blame."""
        for rank, peer in list(self._peers.items()):
            if self.rank == 0:
                self.tell(rank, _Ping())
            if peer.machine != ranks.machine_name() or not ranks.is_stopped(peer.pid):
                self._stopped.pop(rank, None)
                continue
            seconds = now - self._stopped.setdefault(rank, now)
            if seconds > self._stopped_timeout and self._needs(rank):
                self._lose(
                    rank,
                    f"rank {rank} has been stopped for {seconds:.0f} s: by SIGSTOP, Ctrl-Z or a "
                    "debugger. The others cannot go on without it.",
                )

    def _on_silence(self, rank: int, *, ended: bool) -> None:
        """A channel is closed, with the process at its end, or with the network."""
        if not self._needs(rank):
            return
        if not ended:  # the process may live; JAX's heartbeats will tell
            self._finished[rank] = time.monotonic()
            self._look_who_is_done()
        elif self._failure is not None and self._failure[1] == rank:
            self._blame(*self._failure[1:])  # it has said why
        else:
            silent, seconds = 0, 0.0
            if self.rank == 0 and self._peers:  # which rank 0 pings
                silent = min(self._peers, key=lambda rank: self._heard[rank])
                seconds = time.monotonic() - self._heard[silent]
            if seconds > self._stopped_timeout:  # JAX has given it up, and ended this one
                self._lose(
                    silent,
                    f"rank {silent} has not answered for {seconds:.0f} s: its machine is gone, or "
                    f"it is stopped. JAX ends the others then, and rank {rank} was the first to "
                    "go.",
                )
            else:
                self._lose(
                    rank,
                    f"rank {rank} is gone: it ended without a word, killed by a signal, crashed "
                    "in native code, or by os._exit. See its output.",
                )

    def _needs(self, rank: int) -> bool:
        """Whether the job cannot go on without that rank."""
        is_over = self._may_leave.is_set() or self._ending is not None
        ends_fast = self._fail_fast or not self.has_joined
        return ends_fast and not is_over and rank not in self._finished

    def _lose(self, rank: int, text: str) -> None:
        """Ends the job, because that rank is missing."""
        if self.rank == 0:
            self.end_all(rank, text, FAILED)
        else:
            end_now(f"rank {self.rank}: stopping because {text}", FAILED)

    def _blame(self, rank: int, message: Failed) -> None:
        self._failure = None
        text = f"rank {rank} failed with {message.what}\n{message.traceback}"
        self.end_all(rank, text, message.code)

    def _look_who_is_done(self) -> None:
        if self.rank != 0:  # and rank 0 cannot be reached
            self._may_leave.set()
        elif len(self._finished) == self.processes:
            self.tell_all(_Leave())
        else:
            self.tell_all(_SomeFinished())

    def _on_stuck(self, rank: int, stack: str) -> None:
        """In rank 0: others have finished, without the calls that this rank waits in."""
        first = min(self._finished, key=lambda each: self._finished[each])
        others = [each for each in sorted(self._finished) if each != first]
        too = f" (so {do(others, 'has', 'have')})" if others else ""
        text = (
            f"rank {first} has finished{too}, and rank {rank} still waits in JAX, where it has "
            f"not moved since.\nRank {rank} stands at:\n{stack}\n{SAME_CALLS}"
        )
        self.end_all(first, text, FAILED)

    def _on_end(self, message: _End) -> None:
        """The end, as rank 0 says it; which itself leaves last, for it holds JAX's service."""
        self._ending = message.code
        is_culprit = message.culprit == self.rank
        # Its traceback is on the screen, or it has an exit code of its own that nobody else knows.
        self._ends_itself = is_culprit and (self.has_failed or self._waits_at_exit)
        if self._ends_itself:
            self._leave_at = time.monotonic() + _OWN
        elif self.rank == 0:  # and the culprit may be on its way to an exit code of its own
            patience = _LEAVE + (_OWN if message.culprit in self._finished else 0.0)
            self._leave_at = time.monotonic() + patience
        if not (is_culprit and self.has_failed):
            text = f"rank {self.rank}: stopping because {message.text}"
            if self._leave_at is None:
                end_now(text, message.code, stacks=message.stacks)
            say(text, stacks=message.stacks)
        if self._ends_itself:
            self._may_leave.set()

    def _forget(self) -> None:
        """In a fork: it must not keep the channels open when this process is gone."""
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()


def _doubt(failure: Failed) -> float:
    """Seconds in which a failure may turn out to come from that of another process."""
    lost = any(words in failure.what for words in _LOST_PEER)
    return _LONG_DOUBT if lost else _DOUBT
