"""The output of all ranks: pipes read without waiting, lines, progress bars, and logs."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Literal, TextIO, TypeAlias

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
    """Writes lines as they come, behind the rank and the time.

    What cannot be written, as on a full disk, is lost, and told once; the job goes on.

    Args:
      out: takes what the ranks write to their standard output.
      err: takes the rest, and notices.
      ranks: how many there are.
      silence: is given a stream that cannot be written to, so that it fails no more.
      only: the ranks whose output is shown; None shows all.
      coloured: the streams on which each rank has a colour.
      logs: takes a copy of each rank's output.
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
        logs: Sequence["LogFile"] = (),
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
            try:
                self._logs[rank].write("".join(f"{now} {line}\n" for line in lines))
            except OSError as error:
                self._tell(str(self._logs[rank].path.parent), error)
        if rank in self._shown:
            prefix = self._prefix(rank, stream, now)
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

    def _prefix(self, rank: int, stream: Stream, now: str) -> str:
        prefix = f"[{rank:{self._width}} {now}]"
        if stream not in self._coloured:
            return prefix
        return f"{_COLOURS[rank % len(_COLOURS)]}{prefix}{_PLAIN}"


class LogFile:
    """A file that keeps nothing back: what it took is on the disk, and the rest is not tried again.

    Raises:
      OSError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # `close` closes it

    def write(self, text: str) -> None:
        """Raises an OSError where there is no room."""
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def log_files(folder: Path, ranks: int) -> Iterator[list[LogFile]]:
    """Opens `rank-0.log`, `rank-1.log` and so on, empty. Makes the folder where it is not there.

    Raises:
      OSError: one of them cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(LogFile(folder / f"rank-{rank}.log")))
            for rank in range(ranks)
        ]
