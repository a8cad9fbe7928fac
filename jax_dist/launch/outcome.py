"""What the ranks write, and how a process and a job ended: data, exit codes, and words.

Pipes are read without waiting; lines, progress bars and logs come out whole.
"""

import contextlib
import enum
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Literal, TextIO, TypeAlias

from jax_dist.multihost.ranks import do, name_ranks


class Reason(enum.Enum):
    """Why a job ended."""

    FINISHED = enum.auto()  # all ranks ended with exit code 0
    FAILED = enum.auto()
    TIMED_OUT = enum.auto()
    INTERRUPTED = enum.auto()  # by Ctrl-C
    TERMINATED = enum.auto()  # by a second SIGTERM


def ending(exit_code: int) -> str:
    """In words; a negative code is the signal that ended the process.

    >>> ending(3), ending(-9)
    ('exit code 3', 'signal SIGKILL')
    """
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {_signal_name(-exit_code)}"


def _signal_name(number: int) -> str:
    """Such as SIGTERM; the number where it has no name, as most real-time signals.

    >>> _signal_name(15), _signal_name(40)
    ('SIGTERM', '40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _as_shell(exit_code: int) -> int:
    """The exit code by which a shell tells it.

    >>> _as_shell(3), _as_shell(-9)
    (3, 137)
    """
    return exit_code if exit_code >= 0 else 128 - exit_code


_EXIT_CODES = {
    Reason.TIMED_OUT: 124,  # as timeout(1) has it
    Reason.INTERRUPTED: _as_shell(-signal.SIGINT),
    Reason.TERMINATED: _as_shell(-signal.SIGTERM),
}


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    sent: int | None  # the signal that it had got from the launcher before
    seconds: float  # since the start of the job
    tail: tuple[str, ...]  # the last lines of its output
    traceback: tuple[str, ...] = ()  # the last one that it wrote
    stopped: bool = False  # by SIGSTOP, when the others could not go on without it

    @property
    def was_ended(self) -> bool:
        """Whether the launcher has ended it."""
        return self.sent is not None and self.exit_code == -self.sent

    @property
    def code(self) -> int:
        """As a shell tells it."""
        return _as_shell(-signal.SIGSTOP if self.stopped else self.exit_code)


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended."""

    reason: Reason
    seconds: float
    ended: tuple[Ended, ...]  # by rank
    first: Ended | None = None  # the rank that failed first
    seen: Ended | None = None  # the one that was seen first to fail, for it or by itself
    unfinished: tuple[int, ...] = ()  # the ranks that were running when it was to stop
    was_terminated: bool = False  # the ranks were told to save and leave

    @property
    def waited_for(self) -> bool:
        """Whether the rank that failed first did not fail by itself: it did not come, or left."""
        if self.first is None or self.seen is None or self.first.rank == self.seen.rank:
            return False
        return self.first.stopped or self.first.was_ended or self.first.exit_code == 0

    @property
    def exit_code(self) -> int:
        """What the launcher itself leaves with."""
        if self.reason in _EXIT_CODES:
            return _EXIT_CODES[self.reason]
        if self.first is None or self.seen is None:
            return 0
        return (self.first if self.first.stopped or not self.waited_for else self.seen).code

    def causes(self) -> Iterator[str]:
        """Who failed first, or was still running, with the last lines of its output."""
        first = self.first
        if self.reason is Reason.TIMED_OUT:
            running = do(self.unfinished, "was running", "were running")
            yield f"the time is up (--timeout), and {running}"
            for each in self.ended:
                if each.rank in self.unfinished[:_SHOWN]:
                    tail = _indented(each.tail[-_SHOWN_LINES:])
                    yield f"the end of the output of rank {each.rank}:\n{tail}"
        elif first is not None:
            how = ending(first.exit_code) + (
                ", which was passed on to it" if first.was_ended else ""
            )
            if self.waited_for:
                how = f"{_way(first)}, and the others waited for it"
            yield (
                f"rank {first.rank} failed first: {how}, "
                f"after {first.seconds:.1f} s; the end of its output:\n{_indented(first.tail)}"
            )
            if first.exit_code == -signal.SIGABRT:  # as JAX does when it loses another rank
                for each in self.ended:
                    if each.rank != first.rank and each.exit_code and each.traceback:
                        yield f"before that, rank {each.rank} raised:\n{_indented(each.traceback)}"

    def summary(self) -> str:
        """One line: ranks, seconds, exit code, and how each rank ended."""
        count = len(self.ended)
        noun = "rank" if count == 1 else "ranks"
        total = f"{count} {noun}, {self.seconds:.1f} s, exit code {self.exit_code}"
        if all(each.exit_code == 0 for each in self.ended):
            return total
        ways: dict[str, list[int]] = {}
        if self.first is not None:
            ways[_way(self.first)] = []  # it comes first
        for each in self.ended:
            ways.setdefault(_way(each), []).append(each.rank)
        told = "; ".join(f"{name_ranks(ranks)}: {way}" for way, ranks in ways.items())
        return f"{total} ({told})"


# --- what is said of a job at its end


_SHOWN = 4  # ranks whose last lines are shown
_SHOWN_LINES = 5  # of each
_SHOWN_LENGTH = 1000  # characters of a line


def _indented(tail: Sequence[str]) -> str:
    return "\n".join(f"    {line[:_SHOWN_LENGTH]}" for line in tail or ["(it wrote nothing)"])


def _way(each: Ended) -> str:
    if each.stopped:
        return "stopped (SIGSTOP)"
    if each.sent is None or each.exit_code == 0:
        return ending(each.exit_code)
    if each.was_ended:
        return f"stopped by {_signal_name(each.sent)}"
    return f"{ending(each.exit_code)} after {_signal_name(each.sent)}"


# --- the output of all ranks: pipes read without waiting, lines, progress bars, and logs


Stream: TypeAlias = Literal["stdout", "stderr"]

_CHUNK = 65536  # bytes
_LONGEST = 65536  # bytes of a line; what is longer is cut
_PATIENCE = 5.0  # seconds


class Output:
    """The end of a pipe that is read, without ever waiting for it."""

    def __init__(self, stream: Stream, pipe: IO[bytes]) -> None:
        self.stream: Stream = stream
        self._pipe = pipe
        self._lines = Lines()
        os.set_blocking(pipe.fileno(), False)

    @property
    def is_open(self) -> bool:
        return not self._pipe.closed

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self, now: float) -> list[str]:
        """The lines that have ended since; at the end of the pipe, also one that nobody ended."""
        data = self._data()
        if data is None:
            return []
        if data:
            return self._lines.feed(data, now)
        self._pipe.close()
        return self._lines.close()

    def overdue(self, now: float) -> list[str]:
        """What has waited too long for the end of its line."""
        return self._lines.overdue(now)

    def drain(self, now: float) -> list[str]:
        """All that is in the pipe; then it is closed, even if somebody could still write."""
        lines = []
        while self.is_open and (data := self._data()):
            lines += self._lines.feed(data, now)
        self._pipe.close()
        return lines + self._lines.close()

    def _data(self) -> bytes | None:
        """None: nothing yet; empty: nobody will write any more."""
        try:
            return os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return None


class Lines:
    r"""Gathers bytes, and gives whole lines.

    A progress bar goes back to the start of its line by a carriage return; of such a line, the last
    state is given. What has no end for 5 seconds is given as it stands, so that a slow bar is seen.

    >>> lines = Lines()
    >>> lines.feed(b"10%\r20%\rdone\nnext", now=0.0)
    ['done']
    >>> lines.overdue(now=6.0)
    ['next']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0  # when the rest began

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that end in `data`, which came at `now`, in seconds."""
        if not self._rest:
            self._since = now
        *whole, rest = (self._rest + data).split(b"\n")
        if whole:
            self._since = now
        while len(rest) > _LONGEST:
            whole.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return [_last_state(line) for line in whole]

    def overdue(self, now: float) -> list[str]:
        """What has waited too long for its end."""
        return self.close() if self._rest and now - self._since >= _PATIENCE else []

    def close(self) -> list[str]:
        """What is left at the end, which nobody ended."""
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest.strip(b"\r") else []


def _last_state(line: bytes) -> str:
    states = [state for state in line.split(b"\r") if state.strip()]
    return (states[-1] if states else b"").decode(errors="replace")


# --- the output of all ranks on one terminal, and of each in a file


_COLOURS = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[31m")
_PLAIN = "\x1b[0m"


class Printer:
    """Writes lines as they come, behind the rank and the time, and into `logs`, one for each rank.

    What cannot be written, as on a full disk, is lost, and told once; the job goes on. `silence` is
    given a stream that cannot be written to, so that it fails no more; `only` are the ranks whose
    output is shown (None: all); `coloured` the streams on which each rank has a colour.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        ranks: int,
        silence: Callable[[TextIO], None] = lambda stream: None,
        only: Sequence[int] | None = None,
        coloured: Sequence[Stream] = (),
        logs: Sequence[io.FileIO] = (),
    ):
        self._streams: dict[Stream, TextIO] = {"stdout": out, "stderr": err}
        self._width = len(str(ranks - 1))
        self._shown = range(ranks) if only is None else only
        self._silence = silence
        self._coloured = coloured
        self._logs = logs
        self._told: set[str] = set()  # what cannot be written

    def lines(self, rank: int, stream: Stream, lines: Sequence[str]) -> None:
        now = datetime.now().isoformat(timespec="milliseconds").partition("T")[2]
        if self._logs:
            log = self._logs[rank]
            data = "".join(f"{now} {line}\n" for line in lines).encode(errors="backslashreplace")
            try:
                while data:
                    data = data[log.write(data) :]
            except OSError as error:  # there is no room; the rest is not tried again
                self._tell(str(Path(os.fsdecode(log.name)).parent), error)
        if rank in self._shown:
            prefix = f"[{rank:{self._width}} {now}]"
            if stream in self._coloured:
                prefix = f"{_COLOURS[rank % len(_COLOURS)]}{prefix}{_PLAIN}"
            self._write(stream, [f"{prefix} {line}\n" for line in lines])

    def notice(self, text: str) -> None:
        self._write("stderr", [f"jax-dist launch: {text}\n"])

    def _write(self, stream: Stream, lines: Sequence[str]) -> None:
        try:
            self._streams[stream].writelines(lines)
            self._streams[stream].flush()  # on a terminal, both streams are to stay in order
        except BrokenPipeError:  # `| head`: who has seen enough ends the job
            raise
        except OSError as error:
            self._silence(self._streams[stream])
            self._tell({"stdout": "standard output", "stderr": "standard error"}[stream], error)

    def _tell(self, where: str, error: OSError) -> None:
        if where not in self._told:
            self._told.add(where)
            self.notice(f"cannot write to {where}: {error.strerror}; the job goes on")


@contextlib.contextmanager
def log_files(folder: Path, ranks: int) -> Iterator[list[io.FileIO]]:
    """Opens `rank-0.log`, `rank-1.log` and so on, empty. Makes the folder where it is not there.

    Raises:
      OSError: one of them cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # they keep nothing back: what they took is on the disk
        paths = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        yield [stack.enter_context(open(path, "wb", buffering=0)) for path in paths]
