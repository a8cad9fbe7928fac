"""The output of all ranks on one terminal, and of each in a file."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

from jax_dist.launch.outputs import Stream

_COLOURS = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[31m")
_PLAIN = "\x1b[0m"


class Printer:
    """Writes lines as they come, behind the rank and the time.

    Args:
      out: takes what the ranks write to their standard output.
      err: takes the rest, and notices.
      ranks: how many there are.
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
        only: Sequence[int] | None = None,
        coloured: Sequence[Stream] = (),
        logs: Sequence[TextIO] = (),
    ):
        self._streams: dict[Stream, TextIO] = {"stdout": out, "stderr": err}
        self._width = len(str(ranks - 1))
        self._shown = range(ranks) if only is None else only
        self._coloured = coloured
        self._logs = logs

    def lines(self, rank: int, stream: Stream, lines: Sequence[str]) -> None:
        now = datetime.now().isoformat(timespec="milliseconds").partition("T")[2]
        if self._logs:
            _write(self._logs[rank], [f"{now} {line}\n" for line in lines])
        if rank in self._shown:
            prefix = self._prefix(rank, stream, now)
            _write(self._streams[stream], [f"{prefix} {line}\n" for line in lines])

    def notice(self, text: str) -> None:
        _write(self._streams["stderr"], [f"jax-dist launch: {text}\n"])

    def _prefix(self, rank: int, stream: Stream, now: str) -> str:
        prefix = f"[{rank:{self._width}} {now}]"
        if stream not in self._coloured:
            return prefix
        return f"{_COLOURS[rank % len(_COLOURS)]}{prefix}{_PLAIN}"


@contextlib.contextmanager
def log_files(folder: Path, ranks: int) -> Iterator[list[TextIO]]:
    """Opens `rank-0.log`, `rank-1.log` and so on, empty. Makes the folder where it is not there.

    Raises:
      OSError: one of them cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(open(folder / f"rank-{rank}.log", "w", encoding="utf-8"))
            for rank in range(ranks)
        ]


def _write(stream: TextIO, lines: Sequence[str]) -> None:
    stream.writelines(lines)
    stream.flush()  # each time: on a terminal, both streams are to stay in order
