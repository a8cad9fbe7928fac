"""How far each rank is, in a file that a launcher reads when it starts the job again.

`jax-dist launch --restarts` names the folder. A rank writes two numbers there in each step, which
takes a microsecond, and which its death cannot take back.
"""

import os
import pathlib
import struct
from typing import NamedTuple

FOLDER = "JAX_DIST_PROGRESS"  # the variable
_NUMBERS = struct.Struct("<qq")


class Progress(NamedTuple):
    """Of one rank; -1 where it has not said."""

    restored: int = -1  # the step of the checkpoint that it began from
    reached: int = -1  # the last step that it has done


class _Note:
    """The file of this process; it is opened when it is first written."""

    def __init__(self):
        self._file: int | None = None
        self._said = Progress()

    def say(self, **changes: int) -> None:
        self._said = self._said._replace(**changes)
        folder, rank = os.environ.get(FOLDER), os.environ.get("JAX_PROCESS_ID")
        if not folder or not rank:
            return
        try:
            if self._file is None:
                self._file = os.open(os.path.join(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, _NUMBERS.pack(*self._said), 0)
        except OSError:  # the launcher has gone, or its disk is full: it can do without
            return


_note = _Note()


def restored(step: int) -> None:
    """This process goes on from the checkpoint of that step; 0: it begins."""
    _note.say(restored=step, reached=step)


def reached(step: int) -> None:
    """This process has done that step."""
    _note.say(reached=step)


def read(folder: pathlib.Path, rank: int) -> Progress:
    """What a rank has said."""
    try:
        return Progress(*_NUMBERS.unpack((folder / str(rank)).read_bytes()))
    except (OSError, struct.error):
        return Progress()
