"""What happens to the ranks when the launcher itself is killed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_PROGRAM = Path(__file__).with_name("orphans.py")


class Orphanage:
    """A small program that kills the groups it knows of when this process dies, however it dies.

    Linux can end a process with its parent, but not what that process has started; other systems
    cannot even do that. So both are left to a program that waits for the end of a pipe.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the launcher's group must not end this
        )

    def add(self, group: int) -> None:
        """From now on it is killed when this process dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It is gone; its number may belong to others."""
        self._tell(f"-{group}\n")

    def __enter__(self) -> "Orphanage":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None  # it was asked for
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed; the job can do without it
            os.write(self._process.stdin.fileno(), line.encode())
