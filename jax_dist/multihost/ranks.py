"""The ranks of a job, in words and in files, for a rank and for its launcher; no jax.

How many ranks are named in a sentence, which machine a rank runs on, and how far each has got.
"""

import contextlib
import functools
import os
import pathlib
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in few words.

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2 and 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    texts = [f"{span[0]}-{span[1]}" if len(span) > 1 else str(span[0]) for span in spans]
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}"


def do(ranks: Sequence[int], one: str, several: str) -> str:
    """The ranks and their verb.

    >>> do([0, 1], "is", "are")
    'ranks 0-1 are'
    """
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else several}"


# --- which machine a process runs on, and whether another one on the same machine is stopped


_STOPPED = ("T", "t")  # by a signal, and by a debugger


@functools.cache
def machine_name() -> str:
    """The same for all processes that see one another's process ids, and for no others."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux; or not permitted
        return platform.node()


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, as by SIGSTOP or a debugger. Linux tells."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in _STOPPED


def is_group_stopped(group: int) -> bool:
    """The same for a process group: whether a process in it is."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] in _STOPPED:
                return True
    return False


# --- how far each rank is, in a file that a launcher reads when it starts the job again
#
# `jax-dist launch --restarts` names the folder. A rank writes two numbers there in each step,
# which takes a microsecond, and which its death cannot take back.


PROGRESS_FOLDER = "JAX_DIST_PROGRESS"  # the variable
RESTART = "JAX_DIST_RESTART"  # tells the ranks how often they were started before
_NUMBERS = struct.Struct("<qq")


class _Progress(NamedTuple):
    """Of one rank; -1 where it has not said."""

    began: int = -1  # after which step; of the checkpoint that it restored
    reached: int = -1  # the last step that it has done


class _ProgressNote:
    """The file of this process; it is opened when it is first written."""

    def __init__(self):
        self._file: int | None = None
        self._said = _Progress()

    def say(self, **changes: int) -> None:
        """Writes what has changed of `_Progress`."""
        self._said = self._said._replace(**changes)
        folder, rank = os.environ.get(PROGRESS_FOLDER), os.environ.get("JAX_PROCESS_ID")
        if not folder or not rank:
            return
        try:
            if self._file is None:
                self._file = os.open(os.path.join(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, _NUMBERS.pack(*self._said), 0)
        except OSError:  # the launcher has gone, or its disk is full: it can do without
            return


progress: _ProgressNote = _ProgressNote()


def read_progress(folder: pathlib.Path, rank: int) -> _Progress:
    """What a rank has said."""
    try:
        return _Progress(*_NUMBERS.unpack((folder / str(rank)).read_bytes()))
    except (OSError, struct.error):
        return _Progress()
