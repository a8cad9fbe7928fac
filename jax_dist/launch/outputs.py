"""One pipe through which a process writes."""

import os
from typing import IO, Literal, TypeAlias

from jax_dist.launch.lines import Lines

Stream: TypeAlias = Literal["stdout", "stderr"]

_CHUNK = 65536  # bytes


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
