"""agree(): all processes do the same thing, with the same values; compared by fingerprints.

A fingerprint is a tree in few bytes, which says how two trees differ.

Processes meet over JAX's coordination service; no device takes part. What goes over devices has to
be agreed upon first, or it hangs, crashes, or gives wrong numbers. The service has none of these
troubles. Meetings are counted: the third one of this process is with the third one of the others,
whatever each of them calls it. That is how a difference in their order shows.
"""

import dataclasses
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist import _compat
from jax_dist.errors import DisagreementError, MissingRanksError, UnsupportedError, refusal
from jax_dist.multihost.ranks import do as ranks_do
from jax_dist.multihost.ranks import name_ranks

_FOLDER = "jax_dist/meetings"  # of the keys
_TIMED_OUT = "DEADLINE_EXCEEDED"  # as the service's errors begin
_EXISTS = "ALREADY_EXISTS"

_one_at_a_time = threading.Lock()  # two threads would meet in another order in each process
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FEW = 4  # elements that are shown, not only hashed
_LONG = 80  # characters of a repr


class _Round(NamedTuple):
    """The meetings of one group of processes."""

    numbers: Iterator[int]
    to_delete: list[str]


_rounds: dict[tuple[int, ...], _Round] = {}


@dataclasses.dataclass
class _Meeting:
    """One meeting: everybody puts something down, waits for the others, and reads.

    As a context manager; the threads of a process take turns.
    """

    rank: int  # of this process, among all
    ranks: tuple[int, ...]  # of those that meet, ascending
    are_all: bool  # whether no process stays away
    name: str  # what this process calls the meeting, for messages
    timeout: float  # seconds to wait for the others
    client: Any = dataclasses.field(default_factory=_compat.coordination_client)

    def __enter__(self) -> "_Meeting":
        _one_at_a_time.acquire()
        self._round = _rounds.setdefault(self.ranks, _Round(itertools.count(1), []))
        group = "all" if self.are_all else "-".join(map(str, self.ranks))
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
        self.client.key_value_set_bytes(f"{self._key}/came/{self.rank}", own)
        if not self._wait("came", self.timeout):
            raise self._missing()
        # A process that came here has read all earlier meetings.
        if self.rank == self.ranks[0]:
            for key in self._round.to_delete:
                self.client.key_value_delete(key)
        self._round.to_delete.clear()
        return self._read("came")

    def add(self, more: bytes | None) -> dict[int, bytes]:
        """A second round, after `gather`, in which some add something."""
        if more is not None:
            self.client.key_value_set_bytes(f"{self._key}/more/{self.rank}", more)
        self._wait("more", max(self.timeout, 60.0))  # all are here; if one dies, do without it
        return self._read("more")

    def _read(self, folder: str) -> dict[int, bytes]:
        found = self.client.key_value_dir_get_bytes(f"{self._key}/{folder}/")
        return dict(sorted((int(key.rsplit("/", 1)[1]), value) for key, value in found))

    def _wait(self, folder: str, timeout: float) -> bool:
        """Whether all came in time."""
        who = None if self.are_all else list(self.ranks)
        try:
            self.client.wait_at_barrier(
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
        verdict = json.dumps([self.name, came, self.timeout])
        try:
            self.client.key_value_set(f"{self._key}/verdict", verdict)
        except jax.errors.JaxRuntimeError as error:
            if _EXISTS not in str(error):
                raise
            verdict = self.client.key_value_try_get(f"{self._key}/verdict")
        name, came, timeout = json.loads(verdict)
        missing = [rank for rank in self.ranks if rank not in came]
        return refusal(
            MissingRanksError,
            what=f"{name} waited {timeout:g} s in vain",
            which=[
                f"{name_ranks(came)} came",
                f"{name_ranks(missing)} did not" if missing else "the last one came too late",
            ],
            why="every process has to make this call",
            do="See the output of those that did not come: they failed, are slow, or took "
            "another branch. A longer timeout helps only the slow ones.",
        )


class Fingerprint(NamedTuple):
    """A tree in words that can be compared and sent."""

    containers: str  # their types, as in `dict(tuple(*,*))`
    leaves: dict[str, str]  # path to what stands there, as in `{"['x']": "float32[2,4]"}`

    def dump(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def of(cls, tree: Any, *, values: bool = False) -> "Fingerprint":
        """What has to be the same in all processes.

        Args:
          tree: of arrays, or of whatever stands for them (`jax.ShapeDtypeStruct`, tracers). Other
            leaves (numbers, strings) are taken by value: they end up in programs as they are.
          values: whether the values of arrays count too, bit for bit.

        >>> Fingerprint.of({"x": np.zeros((2, 4)), "seed": 7}).leaves
        {"['seed']": 'int 7', "['x']": 'float64[2,4]'}
        """
        flat, structure = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
        leaves = {jax.tree_util.keystr(path): describe(leaf, values=values) for path, leaf in flat}
        return cls(containers(structure), leaves)


def containers(structure: Any) -> str:
    """The types of the containers of a tree.

    Not `str(structure)`: that of a container with functions or sets differs between processes.

    The keys are in the paths.
    """
    node = structure.node_data()
    if node is None:
        return "*" if structure.num_leaves else "None"
    inside = ",".join(containers(child) for child in structure.children())
    return f"{node[0].__name__}({inside})"


def describe(leaf: Any, *, values: bool = False) -> str:
    """A leaf in few words: `float32[2,4]`, `int 7`."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        text = _ADDRESS.sub("", repr(leaf))
        if len(text) > _LONG:
            text = f"{text[:_LONG]}... {_short(hashlib.sha256(text.encode()))}"
        return text if leaf is None else f"{type(leaf).__name__} {text}"
    weak = " weak" if getattr(leaf, "weak_type", False) else ""
    text = f"{dtype}[{','.join(map(str, shape))}]{weak}"
    return f"{text} {_value(leaf)}" if values else text


def _value(leaf: Any) -> str:
    """The values in few words. Of an array cut over processes, each holds other ones."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return "cut over processes"
            leaf = leaf.addressable_data(0)
    elif not isinstance(leaf, np.ndarray | np.generic):
        return "without values"  # jax.ShapeDtypeStruct
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        return _ADDRESS.sub("", repr(array.tolist()))
    hashed = _short(hashlib.sha256(array.tobytes()))
    return f"= {array.tolist()} ({hashed})" if array.size <= _FEW else f"({hashed})"


def _short(hashed: Any) -> str:
    return f"sha256 {hashed.hexdigest()[:16]}"


def differences(groups: Sequence[tuple[Sequence[int], Fingerprint]]) -> list[str]:
    """Where the fingerprints of groups of ranks differ, path by path."""
    found = []
    for path in dict.fromkeys(path for _, each in groups for path in each.leaves):
        sides = _sides([(ranks, each.leaves.get(path, "nothing")) for ranks, each in groups])
        if len(sides) > 1:
            found.append(f"{path or 'the value'}: {', '.join(sides)}")
    sides = _sides([(ranks, each.containers) for ranks, each in groups])
    return found or [f"the containers: {', '.join(sides)}"]


def _sides(groups: Sequence[tuple[Sequence[int], str]]) -> list[str]:
    """What is the same once, with all the ranks that have it."""
    held: dict[str, list[int]] = {}
    for ranks, text in groups:
        held.setdefault(text, []).extend(ranks)
    return [f"{ranks_do(ranks, 'has', 'have')} {text}" for text, ranks in held.items()]


# --- `agree`: every process has the same, or every process hears who has what


program_timeout: float = 300.0
"""The seconds to wait for the others before a new program runs; `initialize` sets it.

Long, for a process may come late to its first program, from loading its data.
"""

_SHOWN = 20  # differences in one message


def agree(tag: str, tree: Any = None, values: bool = False, timeout: float = 60.0) -> None:  # noqa: FBT001, FBT002  # the issue says so
    """Makes sure that all processes are here, with the same tree.

    Every process calls it, in the same order. Compared are the tag, the containers of the tree and
    the paths in it, and of each leaf the shape, dtype and weak type; numbers, strings and other
    leaves that are no arrays by value. No device takes part: the processes write what they have
    into JAX's coordination service, so that a difference is found before a collective would hang
    over it. After an error the job can go on.

    It takes a few milliseconds: use it at the start, and not in each step. In one process it
    returns immediately.

    Args:
      tag: names this place in the program.
      tree: what all should have.
      values: whether the values of arrays count, too: bit for bit, so a NaN equals itself. Of an
        array that is cut over the processes they do not.
      timeout: the seconds to wait for the others.

    Raises:
      DisagreementError: in every process, with the same text: what each of them has, path by path,
        or which call each of them is at.
      MissingRanksError: a DisagreementError, too: not all came in time. Those that come later raise
        the same.

    >>> import numpy as np
    >>> agree("batch", {"x": np.zeros((2, 4)), "seed": 7})
    """
    agree_on(f"agree({tag!r})", Fingerprint.of(tree, values=values), timeout=timeout)


def agree_on(
    name: str,
    own: Fingerprint,
    *,
    timeout: float,
    ranks: Sequence[int] | None = None,
    do: str = "Look for a branch on the rank, or for data that is shared out unevenly.",
) -> None:
    """The same for a fingerprint, among some ranks; `do` is what the user is told to do.

    Raises:
      UnsupportedError: there are several processes, and no service that joins them.
    """
    joined = _compat.joined_as()
    if joined is None and _compat.backend_started() and jax.process_count() > 1:
        raise UnsupportedError(
            "Processes can meet only once jax_dist.multihost.initialize or "
            "jax.distributed.initialize has joined them."
        )
    whole = tuple(range(joined.processes if joined else 1) if ranks is None else sorted(ranks))
    if joined is None or len(whole) == 1 or joined.rank not in whole:
        return
    are_all = len(whole) == joined.processes
    with _Meeting(joined.rank, whole, are_all, name, timeout) as meeting:
        digest = hashlib.sha256(own.dump()).hexdigest()
        header = json.dumps([name, digest]).encode()
        headers = {rank: tuple(json.loads(each)) for rank, each in meeting.gather(header).items()}
        if len(set(headers.values())) > 1:
            raise _disagreement(meeting, headers, own, do)


def _disagreement(
    meeting: _Meeting, headers: Mapping[int, tuple[str, str]], own: Fingerprint, do: str
) -> DisagreementError:
    """The same text everywhere: made of what the first rank of each group has written."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, header in headers.items():
        groups.setdefault(header, []).append(rank)
    names = list(dict.fromkeys(name for name, _ in headers.values()))
    if len(names) > 1:
        whose = {name: [r for r, header in headers.items() if header[0] == name] for name in names}
        return refusal(
            DisagreementError,
            what="The processes are at different places",
            which=[f"{ranks_do(ranks, 'is', 'are')} at {name}" for name, ranks in whose.items()],
            why="each of these needs all processes, in the same order",
            do=do,
        )
    speaks = meeting.rank in [ranks[0] for ranks in groups.values()]
    written = meeting.add(own.dump() if speaks else None)
    known = [
        (ranks, Fingerprint(*json.loads(written[ranks[0]])))
        for ranks in groups.values()
        if ranks[0] in written
    ]
    found = differences(known)
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return refusal(
        DisagreementError,
        what=f"The processes disagree at {names[0]}",
        which=[*found[:_SHOWN], *more],
        why="what goes over devices must be the same in all processes",
        do=do,
    )
