"""A pipe through which a process writes, and its lines as a person would see them."""

import os
from typing import IO, Literal, TypeAlias

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
