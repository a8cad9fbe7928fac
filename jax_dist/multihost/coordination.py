"""The meeting of processes over JAX's coordination service: no device takes part.

What goes over devices has to be agreed upon first, or it hangs, crashes, or gives wrong numbers.
The service has none of these troubles. Meetings are counted: the third one of this process is with
the third one of the others, whatever each of them calls it. That is how a difference in their order
shows.
"""

import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jax_dist import _compat
from jax_dist.errors import MissingRanksError, UnsupportedError, message
from jax_dist.multihost.ranks import name_ranks

_FOLDER = "jax_dist/meetings"  # of the keys
_TIMED_OUT = "DEADLINE_EXCEEDED"  # as the service's errors begin
_EXISTS = "ALREADY_EXISTS"

_one_at_a_time = threading.Lock()  # two threads would meet in another order in each process


class ProcessPlace(NamedTuple):
    """This process among those that meet."""

    rank: int  # among all processes
    ranks: tuple[int, ...]  # of those that meet, ascending


class _Round:
    """The meetings of one group of processes."""

    def __init__(self):
        self.numbers = itertools.count(1)
        self.to_delete: list[str] = []


_rounds: dict[tuple[int, ...], _Round] = {}


def place(ranks: Sequence[int] | None = None) -> ProcessPlace | None:
    """Where this process stands; None where it would meet nobody.

    Args:
      ranks: of the processes that meet; all by default.

    Raises:
      UnsupportedError: there are several processes, and no service that joins them.
    """
    joined = _compat.joined_as()
    if joined is None:
        if _compat.backend_started() and jax.process_count() > 1:
            raise UnsupportedError(
                "Processes can meet only once jax_dist.multihost.initialize or "
                "jax.distributed.initialize has joined them."
            )
        return None
    whole = range(joined.processes) if ranks is None else sorted(ranks)
    if len(whole) == 1 or joined.rank not in whole:
        return None
    return ProcessPlace(joined.rank, tuple(whole))


class Meeting:
    """One meeting: everybody puts something down, waits for the others, and reads.

    As a context manager; the threads of a process take turns.
    """

    def __init__(self, here: ProcessPlace, name: str, timeout: float):
        """
        Args:
          here: who meets.
          name: what this process calls the meeting, for messages.
          timeout: the seconds to wait for the others.
        """
        self._here, self._name, self._timeout = here, name, timeout
        self._client: Any = _compat.coordination_client()

    def __enter__(self) -> "Meeting":
        _one_at_a_time.acquire()
        self._round = _rounds.setdefault(self._here.ranks, _Round())
        group = "-".join(map(str, self._here.ranks)) if self._is_part() else "all"
        self._key = f"{_FOLDER}/{group}/{next(self._round.numbers)}"
        return self

    def __exit__(self, *_: object) -> None:
        self._round.to_delete.append(self._key)
        _one_at_a_time.release()

    def gather(self, own: bytes) -> dict[int, bytes]:
        """What each rank gives.

        Raises:
          MissingRanksError: some did not come in time. Those that come later raise the same.
        """
        self._client.key_value_set_bytes(f"{self._key}/came/{self._here.rank}", own)
        if not self._wait("came", self._timeout):
            raise self._missing()
        # A process that came here has read all earlier meetings.
        if self._here.rank == self._here.ranks[0]:
            for key in self._round.to_delete:
                self._client.key_value_delete(key)
        self._round.to_delete.clear()
        return self._read("came")

    def add(self, more: bytes | None) -> dict[int, bytes]:
        """A second round, after `gather`, in which some add something."""
        if more is not None:
            self._client.key_value_set_bytes(f"{self._key}/more/{self._here.rank}", more)
        self._wait("more", max(self._timeout, 60.0))  # all are here; if one dies, do without it
        return self._read("more")

    def _is_part(self) -> bool:
        joined = _compat.joined_as()
        return joined is not None and len(self._here.ranks) < joined.processes

    def _read(self, folder: str) -> dict[int, bytes]:
        found = self._client.key_value_dir_get_bytes(f"{self._key}/{folder}/")
        return dict(sorted((int(key.rsplit("/", 1)[1]), value) for key, value in found))

    def _wait(self, folder: str, timeout: float) -> bool:
        """Whether all came in time."""
        who = list(self._here.ranks) if self._is_part() else None
        try:
            self._client.wait_at_barrier(
                f"{self._key}/{folder}", max(1, round(1000 * timeout)), process_ids=who
            )
        except jax.errors.JaxRuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
            return False
        return True

    def _missing(self) -> MissingRanksError:
        """The same for all: who finds out first writes it down, the others read it."""
        came = list(self._read("came"))
        verdict = json.dumps([self._name, came, self._timeout])
        try:
            self._client.key_value_set(f"{self._key}/verdict", verdict)
        except jax.errors.JaxRuntimeError as error:
            if _EXISTS not in str(error):
                raise
            verdict = self._client.key_value_try_get(f"{self._key}/verdict")
        name, came, timeout = json.loads(verdict)
        missing = [rank for rank in self._here.ranks if rank not in came]
        return MissingRanksError(
            message(
                what=f"{name} waited {timeout:g} s in vain",
                which=[
                    f"{name_ranks(came)} came",
                    f"{name_ranks(missing)} did not" if missing else "the last one came too late",
                ],
                why="every process has to make this call",
                do="See the output of those that did not come: they failed, are slow, or took "
                "another branch. A longer timeout helps only the slow ones.",
            )
        )
