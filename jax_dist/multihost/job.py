"""The processes of one job, as each of them sees the others while it runs.

Rank 0 has a line to each other rank, and decides; the others tell it what happens to them, and do
what it says. A thread listens, which runs also while the main thread waits in a collective.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from jax_dist.multihost.endings import FAILED, end_now, say
from jax_dist.multihost.lines import Closed, Line, Lost, Message, Stranger
from jax_dist.multihost.ranks import do
from jax_dist.multihost.standing import Progress, is_leaving_jax, stack_of_main

_TICK = 0.1  # seconds between two looks at who stands still
_LEAVE = 2.0  # seconds in which the others leave before rank 0 does, which holds JAX's service
_DOUBT = 0.2  # seconds in which another process may turn out to have failed first
# Who loses a peer in a collective may say so before the peer's line is gone: on a busy machine, a
# killed process takes a while to close all that it had open.
_LONG_DOUBT = 1.5
_LOST_PEER = ("onnection closed", "onnection reset", "roken pipe", "ocket closed", "remote process")
_OWN = 3.0  # seconds for the process that failed to end by itself, by its own atexit functions


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
        lines: Mapping[int, Line],
        *,
        fail_fast: bool,
        early_exit_timeout: Callable[[], float],
        shutdown_timeout: float,
    ):
        """
        Args:
          rank: of this process.
          processes: how many there are.
          lines: to the others, or to rank 0.
          fail_fast: whether the end of one is the end of all.
          early_exit_timeout: gives the seconds that a process may stand still, waiting in JAX,
            after another one has finished.
          shutdown_timeout: the seconds that a finished process waits for those that still work.
        """
        self.rank, self.processes = rank, processes
        self._lines = dict(lines)
        self._fail_fast = fail_fast
        self._early_exit_timeout, self._shutdown_timeout = early_exit_timeout, shutdown_timeout
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._inbox: list[Message] = []  # what rank 0 tells itself
        self._wake, self._woken = socket.socketpair()
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "failed": self._on_failed,
            "finished": self._on_finished,
            "stuck": self._on_stuck,
            "end": self._on_end,
            "some finished": self._on_some_finished,
            "leave": self._on_leave,
        }
        self._finished: dict[int, float] = {}  # rank to when; in rank 0
        self._failure: tuple[float, int, Message] | None = None  # the first one; in rank 0
        self._progress: Progress | None = None  # while others have finished
        self._is_done = False  # this process is at its end, well or not
        self._failed_itself = False  # and its traceback is on the screen
        self._may_leave = threading.Event()
        self._ending: int | None = None  # the exit code
        self._leave_at: float | None = None

    def start(self) -> None:
        """Listens from now on."""
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="jax_dist job", daemon=True).start()

    def handle(self, kind: str, handler: Callable[[int, Message], None]) -> None:
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
        line = self._lines.get(rank)
        if line is not None:
            with self._sending:
                line.send(message)

    def tell_all(self, message: Message) -> None:
        """From rank 0, to all, itself last."""
        for rank in [*self._lines, self.rank]:
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
        self.tell(0, {"is": "failed", "what": what, "traceback": traceback, "code": code})

    def finish(self, *, wait: bool = True) -> None:
        """This process is done.

        Args:
          wait: whether to wait until all are.
        """
        self._is_done = True
        self.tell(0, {"is": "finished"})
        if wait:
            self._may_leave.wait()

    def wait_until_known(self) -> int:
        """After `fail`: until the others know, and, in rank 0, have left. Gives the exit code."""
        until = time.monotonic() + _LEAVE
        while time.monotonic() < until and (
            self._ending is None or (self.rank == 0 and self._lines)
        ):
            time.sleep(_TICK / 5)
        return FAILED if self._ending is None else self._ending

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
            end = {"is": "end", "culprit": culprit, "text": text, "code": code, "stacks": stacks}
            self.tell_all(end)

    def finished(self) -> list[int]:
        """The ranks that are done, as far as rank 0 knows."""
        return sorted(self._finished)

    # ---- in the listening thread ----

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, data=(rank, line))
            while True:
                for key, _ in selector.select(_TICK if self._ticks() else None):
                    if key.data is None:
                        self._woken.recv(1 << 10)
                    else:
                        self._hear(selector, *key.data)
                while self._inbox:
                    self._act(self.rank, self._inbox.pop(0))
                self._look()

    def _ticks(self) -> bool:
        timed = (self._progress, self._leave_at, self._failure)
        return any(each is not None for each in timed) or bool(self._finished)

    def _hear(self, selector: selectors.BaseSelector, rank: int, line: Line) -> None:
        try:
            messages = line.received()
        except (Closed, Lost, Stranger) as error:
            selector.unregister(line)
            self._lines.pop(rank, None)
            line.close()
            self._on_silence(rank, ended=isinstance(error, Closed))
            return
        for message in messages:
            self._act(rank, message)

    def _act(self, rank: int, message: Message) -> None:
        handler = self._handlers.get(message["is"])
        if handler is not None:
            handler(rank, message)

    def _look(self) -> None:
        """At what time brings."""
        now = time.monotonic()
        if self._leave_at is not None and (
            now > self._leave_at or not (self._lines or self._failed_itself)
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

    def _look_at_main(self, progress: Progress) -> None:
        """Others have finished: does this process wait for them?"""
        if is_leaving_jax():
            self._is_done = True
            self.tell(0, {"is": "finished"})
        elif progress.blocked_for() > self._early_exit_timeout():
            self._progress = None
            self.tell(0, {"is": "stuck", "stack": stack_of_main()})

    def _on_silence(self, rank: int, *, ended: bool) -> None:
        """A line is gone, with the process at its end, or with the network."""
        if self._may_leave.is_set() or self._ending is not None or not self._fail_fast:
            return
        if rank in self._finished:  # it was done
            return
        if not ended:  # the process may live; JAX's heartbeats will tell
            self._finished[rank] = time.monotonic()
            self._look_who_is_done()
        elif self._failure is not None and self._failure[1] == rank:
            self._blame(*self._failure[1:])  # it has said why
        elif self.rank == 0:
            self.end_all(rank, _gone(rank), FAILED)
        else:
            end_now(f"rank {self.rank}: stopping because {_gone(rank)}", FAILED)

    def _on_failed(self, rank: int, message: Message) -> None:
        if self._failure is None:
            self._failure = (time.monotonic(), rank, message)

    def _blame(self, rank: int, message: Message) -> None:
        self._failure = None
        text = f"rank {rank} failed with {message['what']}\n{message['traceback']}"
        self.end_all(rank, text, message["code"])

    def _on_finished(self, rank: int, message: Message) -> None:
        del message
        self._finished[rank] = time.monotonic()
        self._look_who_is_done()

    def _look_who_is_done(self) -> None:
        if self.rank != 0:  # and rank 0 cannot be reached
            self._may_leave.set()
        elif len(self._finished) == self.processes:
            self.tell_all({"is": "leave"})
        else:
            self.tell_all({"is": "some finished"})

    def _on_some_finished(self, rank: int, message: Message) -> None:
        del rank, message
        if not self._is_done and self._progress is None:
            self._progress = Progress()

    def _on_stuck(self, rank: int, message: Message) -> None:
        if self._finished:
            first = min(self._finished, key=lambda each: self._finished[each])
            text = _still_waits(self.finished(), rank, message["stack"])
            self.end_all(first, text, FAILED)

    def _on_leave(self, rank: int, message: Message) -> None:
        del rank, message
        self._may_leave.set()

    def _on_end(self, rank: int, message: Message) -> None:
        """The end, as rank 0 says it; which itself leaves last, for it holds JAX's service."""
        del rank
        self._ending = message["code"]
        culprit = self._failed_itself and message["culprit"] == self.rank
        if culprit or self.rank == 0:
            self._leave_at = time.monotonic() + (_OWN if culprit else _LEAVE)
        if not culprit:
            text = f"rank {self.rank}: stopping because {message['text']}"
            if self.rank == 0:
                say(text, stacks=message["stacks"])
            else:
                end_now(text, message["code"], stacks=message["stacks"])

    def _forget(self) -> None:
        """In a fork: it must not keep the lines open when this process is gone."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()


def _doubt(failure: Message) -> float:
    """Seconds in which a failure may turn out to come from that of another process."""
    lost = any(words in failure["what"] for words in _LOST_PEER)
    return _LONG_DOUBT if lost else _DOUBT


def _gone(rank: int) -> str:
    return (
        f"rank {rank} is gone: it ended without a word, killed by a signal, crashed in native "
        "code, or by os._exit. See its output."
    )


def _still_waits(finished: Sequence[int], rank: int, stack: str) -> str:
    return (
        f"{do(finished, 'has', 'have')} finished, and rank {rank} still waits in JAX, where it has "
        f"not moved since.\nRank {rank} stands at:\n{stack}\n"
        "Every process has to make the same calls: look for batches that are shared out unevenly, "
        "or for a way out that some processes take alone."
    )


def _too_long(finished: Sequence[int], processes: int, waited: float) -> str:
    working = [rank for rank in range(processes) if rank not in finished]
    return (
        f"{do(finished, 'has', 'have')} waited {waited:.0f} s at the end for "
        f"{do(working, 'which still works', 'which still work')}. A longer shutdown_timeout of "
        "jax_dist.multihost.initialize lets it."
    )
