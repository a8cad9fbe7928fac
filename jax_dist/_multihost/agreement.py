"""`agree`: compare values between processes through the key-value store of JAX's coordinator.

No device takes part: a collective over unequal shapes hangs or gives wrong numbers, and the store
does neither. Comparisons are numbered (see `agree_on`): another order shows as different names.
"""

import collections
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist import _compat
from jax_dist.errors import DisagreementError

# Seconds to wait for the other processes before a new program runs; set by `initialize`. Long,
# since processes load their first batch at different speeds.
program_timeout: float = 300.0

_KEYS = "jax_dist/agreement"
_TIMED_OUT = "DEADLINE_EXCEEDED"  # status code in the text of JAX's error
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs between processes
_LONGEST_REPR = 80  # characters
_MOST_VALUES = 4  # elements of an array that are shown besides their hash
_MOST_DIFFERENCES = 20  # lines of a message

_lock = threading.Lock()  # threads of one process would number their comparisons differently
_comparison_counts: collections.Counter[tuple[int, ...]] = collections.Counter()  # by ranks


class MissingProcessesError(DisagreementError, TimeoutError):
    """Some processes did not call `agree` in time."""


class Fingerprint(NamedTuple):
    """Texts that describe a tree, which processes send to each other to compare their trees."""

    containers: str  # types of the containers: "dict(tuple(*,*))"
    leaves: dict[str, str]  # by path: {"['x']": "float32[2,4]"}

    @classmethod
    def take(cls, tree: Any, *, values: bool = False) -> "Fingerprint":
        """Return the fingerprint of a tree of arrays, `jax.ShapeDtypeStruct`, tracers and others.

        Other leaves, such as numbers and strings, count by value, and arrays too if `values`.
        """
        flat, structure = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
        leaves = {jax.tree_util.keystr(path): describe(leaf, values=values) for path, leaf in flat}
        return cls(containers(structure), leaves)


def containers(structure: Any) -> str:
    """Return the container types of a `PyTreeDef`, such as `dict(tuple(*,*))` with `*` for leaves.

    `str(structure)` contains static data of the nodes, as functions and sets, whose texts differ
    between processes.
    """
    node = structure.node_data()  # the class of the container and its static data
    if node is None:
        return "*" if structure.num_leaves else "None"
    children = ",".join(containers(child) for child in structure.children())
    return f"{node[0].__name__}({children})"


def describe(leaf: Any, *, values: bool = False) -> str:
    """Return a short text for a leaf, such as `float32[2,4]` or `int 7`."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        # The order of a set differs between processes, as the hashes of strings do.
        ordered = sorted(leaf, key=repr) if isinstance(leaf, set | frozenset) else leaf
        text = _ADDRESS.sub("", repr(ordered))
        if len(text) > _LONGEST_REPR:
            text = f"{text[:_LONGEST_REPR]}... {_digest(text.encode())}"
        return text if leaf is None else f"{type(leaf).__name__} {text}"
    weak = " weak" if getattr(leaf, "weak_type", False) else ""
    text = f"{dtype}[{','.join(map(str, shape))}]{weak}"
    return f"{text} {_describe_values(leaf)}" if values else text


def _describe_values(leaf: Any) -> str:
    """Return a hash of the values; of few, also themselves: "= [0, 1] (sha256 1a2b...)"."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return "sharded over processes"
            leaf = leaf.addressable_data(0)
    elif not isinstance(leaf, np.ndarray | np.generic):
        return "without values"  # a jax.ShapeDtypeStruct
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        return _ADDRESS.sub("", repr(array.tolist()))
    digest = _digest(array.tobytes())
    return f"= {array.tolist()} ({digest})" if array.size <= _MOST_VALUES else f"({digest})"


def _digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def agree(tag: str, tree: Any = None, values: bool = False, timeout: float = 60.0) -> None:  # noqa: FBT001, FBT002  # part of the public signature
    """Raise in every process if not all processes are here with the same tree.

    Every process calls it, in the same order. It compares the tag, the containers and paths of the
    tree, and of each array the shape, dtype and weak type; numbers, strings and other leaves by
    value. No device takes part, so a difference is an error here and not a hang in a collective.
    After the error the job can go on. A call takes some milliseconds: use it at the start, not in
    each step. In one process it returns immediately.

    Args:
      tag: name of this place in the program.
      tree: what all processes should have.
      values: whether the values of arrays count too, bit for bit, so that a NaN equals itself.
        Those of an array that is sharded over the processes do not.
      timeout: seconds to wait for the others.

    Raises:
      DisagreementError: the processes have different trees, or are at different calls. The text
        lists the differing leaves and ranks, and is the same in every process.
      TimeoutError: some processes did not come in time (a DisagreementError too).

    >>> import numpy as np
    >>> agree("batch", {"x": np.zeros((2, 4)), "seed": 7})
    """
    agree_on(f"agree({tag!r})", Fingerprint.take(tree, values=values), timeout=timeout)


def agree_on(
    name: str, fingerprint: Fingerprint, *, timeout: float, ranks: Sequence[int] | None = None
) -> None:
    """Raise DisagreementError in each of the `ranks` (None: all) if their fingerprints differ.

    All of these ranks call it. The texts go through JAX's key-value store; the number of the call
    is part of the keys, so the third call of one rank is compared with the third of the others.
    """
    joined = _compat.find_joined_process()
    if joined is None:
        if _compat.backend_started() and jax.process_count() > 1:
            raise RuntimeError(f"{name} needs joined processes: call multihost.initialize first.")
        return
    group = tuple(range(joined.processes) if ranks is None else sorted(ranks))
    if len(group) == 1 or joined.rank not in group:
        return
    with _lock:
        _comparison_counts[group] += 1
        number = _comparison_counts[group]
        members = "all" if len(group) == joined.processes else "-".join(map(str, group))
        key_prefix = f"{_KEYS}/{members}"  # "jax_dist/agreement/0-2"
        comparison = Comparison(joined.client, joined.rank, group, key_prefix, number)
        comparison.compare(name, fingerprint, timeout)


class Comparison(NamedTuple):
    """A comparison of fingerprints between the processes of a group."""

    client: Any  # of JAX's coordination service, with a key-value store and barriers
    rank: int  # of this process
    ranks: tuple[int, ...]  # of the group, ascending
    key_prefix: str  # start of the keys of this group
    number: int  # counts the comparisons of this group, from 1

    def compare(self, name: str, fingerprint: Fingerprint, timeout: float) -> None:
        """Raise DisagreementError if a rank is missing or has another name or fingerprint."""
        text = json.dumps(fingerprint)
        header = json.dumps([name, hashlib.sha256(text.encode()).hexdigest()])
        all_arrived = self._exchange("headers", header, timeout)
        headers = self._read("headers")
        if not all_arrived:
            missing = [rank for rank in self.ranks if rank not in headers]
            who = f"missing {format_ranks(missing)}" if missing else "the last process came late"
            raise MissingProcessesError(
                f"{name} timed out after {timeout:g} s; {who}. See the output of the missing "
                "processes: they failed, are slow, or took another branch."
            )
        # All ranks are here, so all have read what they wrote for the comparison before.
        if self.rank == self.ranks[0] and self.number > 1:
            self.client.key_value_delete(f"{self.key_prefix}/{self.number - 1}/")
        groups = _group_ranks(headers)
        if len(groups) == 1:
            return
        names = _group_ranks({rank: json.loads(header)[0] for rank, header in headers.items()})
        if len(names) > 1:
            calls = "; ".join(f"{format_ranks(ranks)}: {name}" for name, ranks in names.items())
            raise DisagreementError(
                f"Processes made different calls: {calls}. All processes must make the same calls "
                "in the same order."
            )
        # Fingerprints may be long, so only the first of the ranks that have the same one sends it.
        is_sender = any(ranks[0] == self.rank for ranks in groups.values())
        self._exchange("details", text if is_sender else None, max(timeout, 60.0))
        details = self._read("details")
        fingerprints = {}
        for ranks in groups.values():
            if ranks[0] in details:  # it has not failed in the meantime
                tree = Fingerprint(*json.loads(details[ranks[0]]))
                fingerprints |= dict.fromkeys(ranks, tree)
        raise DisagreementError(_format_differences(name, fingerprints))

    def _exchange(self, part: str, text: str | None, timeout: float) -> bool:
        """Write a text (None: nothing), and return whether all ranks got here in time."""
        key = f"{self.key_prefix}/{self.number}/{part}"
        if text is not None:
            self.client.key_value_set(f"{key}/{self.rank}", text)
        try:
            self.client.wait_at_barrier(key, max(1, round(1000 * timeout)), list(self.ranks))
        except jax.errors.JaxRuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
            return False
        return True

    def _read(self, part: str) -> dict[int, str]:
        """Return the texts that ranks wrote, by rank in ascending order."""
        pairs = self.client.key_value_dir_get(f"{self.key_prefix}/{self.number}/{part}/")
        return dict(sorted((int(key.rsplit("/", 1)[1]), text) for key, text in pairs))


def _format_differences(name: str, fingerprints: Mapping[int, Fingerprint]) -> str:
    """Return the message that lists the differing leaves with the ranks that have each version."""
    texts_by_place = {}  # for each leaf, the text of each rank
    for path in dict.fromkeys(path for tree in fingerprints.values() for path in tree.leaves):
        texts_by_place[path or "the value"] = {
            rank: tree.leaves.get(path, "nothing") for rank, tree in fingerprints.items()
        }
    texts_by_place["containers"] = {rank: tree.containers for rank, tree in fingerprints.items()}
    lines = []
    for place, texts in texts_by_place.items():
        groups = _group_ranks(texts)
        if len(groups) > 1:
            versions = [f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items()]
            lines.append(f"  {place}: {'; '.join(versions)}")
    if len(lines) > _MOST_DIFFERENCES:
        lines[_MOST_DIFFERENCES:] = [f"  and {len(lines) - _MOST_DIFFERENCES} more"]
    return "\n".join([f"{name} differs between processes:", *lines])


def _group_ranks(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each text: {"a": [0, 2], "b": [1]} of {0: "a", 1: "b", 2: "a"}."""
    groups = collections.defaultdict(list)
    for rank, text in texts.items():
        groups[text].append(rank)
    return dict(groups)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as a short text, such as "ranks 0-2, 5" or "rank 3"."""
    ranks = sorted(ranks)
    spans: list[list[int]] = []  # first and last rank of each run of successive ranks
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"
