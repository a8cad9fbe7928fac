"""The processes of one job, as each of them sees the others while it runs.

Rank 0 has a channel to each other rank, and decides; the others tell it what happens to them, and
do what it says. A thread listens, which runs also while the main thread waits in a collective.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax_dist.multihost import ranks
from jax_dist.multihost.channel import (
    Closed,
    End,
    Failed,
    Finished,
    Leave,
    Lost,
    Message,
    Ping,
    Pong,
    SomeFinished,
    Stranger,
    Stuck,
)
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

_Kind = TypeVar("_Kind", bound=Any)  # of message

_TICK = 0.1  # seconds between two looks at who stands still
_WATCH = 1.0  # seconds between two looks at who is stopped
_LEAVE = 2.0  # seconds in which the others leave before rank 0 does, which holds JAX's service
_DOUBT = 0.2  # seconds in which another process may turn out to have failed first
# Who loses a peer in a collective may say so before the peer's line is gone: on a busy machine, a
# killed process takes a while to close all that it had open.
_LONG_DOUBT = 1.5
_LOST_PEER = ("onnection closed", "onnection reset", "roken pipe", "ocket closed", "remote process")
_OWN = 5.0  # seconds for the process that failed to end by itself, by its own atexit functions
# Of JAX's heartbeat timeout, after which it ends all processes but the one that is stopped. The
# last heartbeat may have come long before it was.
_STOPPED = 0.35


class Job:
    """This process among the others.

    Attributes:
      rank: of this process.
      processes: how many there are.
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
        self._peers = dict(peers)  # those that have not ended
        self._fail_fast = fail_fast
        self._early_exit_timeout, self._shutdown_timeout = early_exit_timeout, shutdown_timeout
        self._stopped_timeout = _STOPPED * heartbeat_timeout
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._inbox: list[Message] = []  # what rank 0 tells itself
        self._wake, self._woken = socket.socketpair()
        self._handlers: dict[type, Callable[[int, Any], None]] = {}  # of those who watch for stalls
        self._finished: dict[int, float] = {}  # rank to when; in rank 0
        self._failure: tuple[float, int, Failed] | None = None  # the first one; in rank 0
        self._progress: Stall | None = None  # while others have finished
        self._heard = dict.fromkeys(peers, time.monotonic())  # rank to when
        self._stopped: dict[int, float] = {}  # rank to since when
        self._watched_at = time.monotonic()
        self._has_joined = False  # JAX, too
        self._is_done = False  # this process is at its end, well or not
        self._failed_itself = False  # and its traceback is on the screen
        self._waits_at_exit = False
        self._ends_itself = False  # by its own exit code, though the job ends badly
        self._may_leave = threading.Event()
        self._ending: int | None = None  # the exit code
        self._leave_at: float | None = None

    def start(self) -> None:
        """Listens from now on."""
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="jax_dist job", daemon=True).start()

    def joined(self) -> None:
        """JAX has joined the processes, too; before that, the end of one is that of all."""
        self._has_joined = True

    def handle(self, kind: type[_Kind], handler: Callable[[int, _Kind], None]) -> None:
        """Calls `handler(rank, message)` in the listening thread for messages of this kind."""
        self._handlers[kind] = handler

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
        self._is_done, self._failed_itself = True, in_main
        self.tell(0, Failed(what, traceback, code))

    def finish(self, *, wait: bool = True) -> bool:
        """This process is done.

        Args:
          wait: whether to wait until all are.

        Returns:
          Whether the job ends well: no other process waits in JAX for this one.
        """
        self._is_done, self._waits_at_exit = True, wait
        self.tell(0, Finished())
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

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called."""
        return self._failed_itself

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
            self.tell_all(End(culprit, text, code, stacks))

    def finished(self) -> list[int]:
        """The ranks that are done, as far as rank 0 knows."""
        return sorted(self._finished)

    # ---- in the listening thread ----

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, peer in self._peers.items():
                selector.register(peer.channel, selectors.EVENT_READ, data=rank)
            while True:
                for key, _ in selector.select(_TICK if self._ticks() else _WATCH):
                    if key.data is None:
                        self._woken.recv(1 << 10)
                    else:
                        self._hear(selector, key.data)
                while self._inbox:
                    self._act(self.rank, self._inbox.pop(0))
                self._look()

    def _ticks(self) -> bool:
        timed = (self._progress, self._leave_at, self._failure)
        return any(each is not None for each in timed) or bool(self._finished)

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
            case Ping():
                self.tell(rank, Pong())
            case Failed():
                if self._failure is None:
                    self._failure = (time.monotonic(), rank, message)
            case Finished():
                self._finished[rank] = time.monotonic()
                self._look_who_is_done()
            case SomeFinished():
                if not self._is_done and self._progress is None:
                    self._progress = Stall()
            case Stuck():
                self._on_stuck(rank, message)
            case Leave():
                self._may_leave.set()
            case End():
                self._on_end(message)
            case _:
                handler = self._handlers.get(type(message))
                if handler is not None:
                    handler(rank, message)

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
            self._look_at_main(self._progress)
        if self._finished and self._ending is None and not self._may_leave.is_set():
            waited = now - min(self._finished.values())
            if waited > self._shutdown_timeout:
                self.end_all(None, _too_long(self.finished(), self.processes, waited), FAILED)
        if now > self._watched_at + _WATCH:
            self._watched_at = now
            self._look_who_is_stopped(now)

    def _look_who_is_stopped(self, now: float) -> None:
        """JAX would end all others, and the first to end would take the blame."""
        for rank, peer in list(self._peers.items()):
            if self.rank == 0:
                self.tell(rank, Ping())
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

    def _look_at_main(self, progress: Stall) -> None:
        """Others have finished: does this process wait for them?"""
        if is_leaving_jax():
            self._is_done = True
            self.tell(0, Finished())
        elif progress.blocked_for() > self._early_exit_timeout():
            self._progress = None
            self.tell(0, Stuck(stack_of_main()))

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
            silent, seconds = self._most_silent()
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
        ends_fast = self._fail_fast or not self._has_joined
        return ends_fast and not is_over and rank not in self._finished

    def _most_silent(self) -> tuple[int, float]:
        """Of those that rank 0 pings: the rank, and the seconds since it said anything."""
        if self.rank != 0 or not self._peers:
            return 0, 0.0
        silent = min(self._peers, key=lambda rank: self._heard[rank])
        return silent, time.monotonic() - self._heard[silent]

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
            self.tell_all(Leave())
        else:
            self.tell_all(SomeFinished())

    def _on_stuck(self, rank: int, message: Stuck) -> None:
        if self._finished:
            first = min(self._finished, key=lambda each: self._finished[each])
            text = _still_waits(first, self.finished(), rank, message.stack)
            self.end_all(first, text, FAILED)

    def _on_end(self, message: End) -> None:
        """The end, as rank 0 says it; which itself leaves last, for it holds JAX's service."""
        self._ending = message.code
        is_culprit = message.culprit == self.rank
        # Its traceback is on the screen, or it has an exit code of its own that nobody else knows.
        self._ends_itself = is_culprit and (self._failed_itself or self._waits_at_exit)
        if self._ends_itself:
            self._leave_at = time.monotonic() + _OWN
        elif self.rank == 0:  # and the culprit may be on its way to an exit code of its own
            patience = _LEAVE + (_OWN if message.culprit in self._finished else 0.0)
            self._leave_at = time.monotonic() + patience
        if not (is_culprit and self._failed_itself):
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


def _still_waits(first: int, finished: Sequence[int], rank: int, stack: str) -> str:
    others = [each for each in finished if each != first]
    too = f" (so {do(others, 'has', 'have')})" if others else ""
    return (
        f"rank {first} has finished{too}, and rank {rank} still waits in JAX, where it has "
        f"not moved since.\nRank {rank} stands at:\n{stack}\n"
        "Every process has to make the same calls: look for batches that are shared out unevenly, "
        "or for a way out that some processes take alone."
    )


def _too_long(finished: Sequence[int], processes: int, waited: float) -> str:
    working = [rank for rank in range(processes) if rank not in finished]
    return (
        f"the end does not come: {do(finished, 'has', 'have')} waited {waited:.0f} s for "
        f"{do(working, 'which still works', 'which still work')}. A longer shutdown_timeout of "
        "jax_dist.multihost.initialize lets it."
    )
