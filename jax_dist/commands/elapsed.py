"""How long something takes, while it takes long."""

import threading
import time
from typing import TextIO

_TICK = 1.0  # seconds


class Elapsed:
    """Says what goes on; on a terminal, with the seconds that have passed.

    Args:
      stream: where it is written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._watched = stream.isatty()
        self._began = time.monotonic()
        self._what = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, what: str) -> None:
        """Something new begins."""
        self.close()
        self._what, self._began = what, time.monotonic()
        if not self._watched:
            print(what, file=self._stream, flush=True)
            return
        self._write("")
        self._ended.clear()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What goes on has ended."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._write("\n")

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            self._write("")

    def _write(self, end: str) -> None:
        seconds = int(time.monotonic() - self._began)
        passed = f": {seconds} s" if seconds else ""
        self._stream.write(f"\r{self._what}{passed}\x1b[K{end}")
        self._stream.flush()
