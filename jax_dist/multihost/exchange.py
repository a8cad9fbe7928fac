"""Leaves of trees from every process to every other, once they agree on what these are.

The values go over the coordination service, as bytes: no device takes part, so that nothing can
hang, and no dtype is lost. What is large goes over the devices, also as bytes, once it is known
that every process will take part with as many.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_dist.errors import MissingRanksError, UnsupportedError, message
from jax_dist.multihost.agreement import agree_on, fingerprint
from jax_dist.multihost.ranks import name_ranks

TIMEOUT = 60.0  # seconds
_SMALL = 1 << 18  # bytes: up to there, the service is about as fast as the devices
_PLAIN = (bool, int, float, complex, str, bytes)


class Packed(NamedTuple):
    """Leaves as they can be sent."""

    leaves: Sequence[Any]
    arrays: dict[int, np.ndarray]  # by number of the leaf; of keys, the data
    others: dict[int, Any]

    @classmethod
    def of(cls, name: str, leaves: Sequence[Any]) -> "Packed":
        """Raises an UnsupportedError where a leaf cannot be sent."""
        arrays, others = {}, {}
        for number, leaf in enumerate(leaves):
            if type(leaf) in _PLAIN:
                others[number] = leaf
            else:
                arrays[number] = _numbers(name, leaf)
        return cls(leaves, arrays, others)

    def size(self) -> int:
        """In bytes, of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def dump(self) -> bytes:
        """The arrays, one after the other."""
        return b"".join(array.tobytes() for array in self.arrays.values())

    def load(self, dumped: Any, others: dict[int, Any]) -> list[Any]:
        """The leaves of another process: arrays as NumPy arrays, keys as their data."""
        found, start = dict(others), 0
        for number, array in self.arrays.items():
            flat = np.frombuffer(dumped, np.uint8, array.nbytes, start)
            found[number] = flat.view(array.dtype).reshape(array.shape).copy()
            start += array.nbytes
        return [found[number] for number in range(len(self.leaves))]


class Contribution(NamedTuple):
    """What one process has given."""

    packed: Packed  # of this process, which has the same types
    dumped: Any  # bytes or uint8 array
    others: dict[int, Any]
    is_source: bool | None

    def leaves(self) -> list[Any]:
        """NumPy arrays, of keys the data; and what is no array."""
        return self.packed.load(self.dumped, self.others)


def exchange(
    name: str,
    tree: Any,
    leaves: Sequence[Any],
    *,
    is_source: bool | None = None,
    timeout: float = TIMEOUT,
) -> list[Contribution]:
    """What each process has, in the order of the ranks.

    Args:
      name: what the user called.
      tree: its tree; all must have the same one, up to values.
      leaves: those of it that are to be sent.
      is_source: whether only what this process has is wanted; None: that of all.
      timeout: the seconds to wait for the others.

    Raises:
      UnsupportedError: a leaf cannot be sent.
    """
    marks = fingerprint(jax.tree.map(lambda _: 0, tree))._replace(leaves=types(tree))
    try:
        packed = Packed.of(name, leaves)
    except UnsupportedError:
        agree_on(name, marks, timeout=timeout)  # else the others, who have another tree, would wait
        raise
    is_small = packed.size() <= _SMALL
    header = [[[n, *_encoded(leaf)] for n, leaf in packed.others.items()], is_source]
    told = json.dumps(header).encode() + b"\n" + (packed.dump() if is_small else b"")
    found = agree_on(name, marks, timeout=timeout, give=told)
    every = [found[rank].split(b"\n", 1) for rank in _all_of(name, found)]
    headers = [_decoded(header) for header, _ in every]
    sources = [source for _, source in headers]
    if is_small:
        dumps = [dumped for _, dumped in every]
    elif is_source is None:
        dumps = multihost_utils.process_allgather(np.frombuffer(packed.dump(), np.uint8))
    elif sources.count(True) == 1:
        buffer = np.frombuffer(packed.dump(), np.uint8)
        dumps = [multihost_utils.broadcast_one_to_all(buffer, is_source)] * len(every)
    else:
        dumps = [b""] * len(every)  # the caller will see it
    return [
        Contribution(packed, dumped, others, source)
        for dumped, (others, source) in zip(dumps, headers, strict=True)
    ]


def _all_of(name: str, found: dict[int, bytes]) -> range:
    """The ranks, if all have given something; else one has died in between."""
    every = range(jax.process_count())
    missing = [rank for rank in every if rank not in found]
    if missing:
        raise MissingRanksError(
            message(
                what=f"{name} has not heard from all processes",
                which=[f"{name_ranks(missing)} came, and gave nothing"],
                why="every process has to give its part",
                do="See the output of those ranks.",
            )
        )
    return every


def _encoded(leaf: Any) -> tuple[str, str]:
    """Type and value in letters, every bit of it."""
    kind = type(leaf)
    if kind is bytes:
        return "bytes", leaf.hex()
    if kind in (float, complex):
        return kind.__name__, struct.pack("<dd", leaf.real, leaf.imag).hex()
    return kind.__name__, leaf if kind is str else hex(leaf)


def _decoded(header: bytes) -> tuple[dict[int, Any], bool | None]:
    others, is_source = json.loads(header)
    return {number: _VALUES[kind](text) for number, kind, text in others}, is_source


_VALUES = {
    "bool": lambda text: bool(int(text, 16)),
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack("<dd", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "str": lambda text: text,
    "bytes": bytes.fromhex,
}


def types(tree: Any) -> dict[str, str]:
    """Path to what stands there, as in `{"['x']": "float32[2,4]"}`, without values.

    >>> types({"x": np.zeros((2, 4)), "seed": 7, "key": jax.random.key(0)})
    {"['key']": 'key<fry>[]', "['seed']": 'int', "['x']": 'float64[2,4]'}
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): _type(leaf) for path, leaf in paths}


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_whole(leaf: Any) -> bool:
    """Whether it is an array of all processes, not of this one alone."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def as_key_of(data: Any, keys: Any) -> jax.Array:
    """The data of keys as keys, of the same implementation."""
    data = data if isinstance(data, jax.Array) else jnp.asarray(data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def _type(leaf: Any) -> str:
    if type(leaf) in _PLAIN or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return f"{text} over all processes" if is_whole(leaf) else text


def _numbers(name: str, leaf: Any) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if is_whole(leaf):
        if not leaf.is_fully_replicated:
            raise _in_parts(name, leaf)
        leaf = leaf.addressable_data(0)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise _not_sendable(name, leaf)
    return np.ascontiguousarray(array).reshape(array.shape)


def _in_parts(name: str, leaf: Any) -> UnsupportedError:
    return UnsupportedError(
        message(
            what=f"{name} got an array that no process has as a whole",
            which=[f"it is {_type(leaf)}"],
            why="each process has to give what it has itself",
            do="Give `leaf.addressable_data(0)` of it, or gather it first with "
            "`jax_dist.multihost.process_allgather`.",
        )
    )


def _not_sendable(name: str, leaf: Any) -> UnsupportedError:
    return UnsupportedError(
        message(
            what=f"{name} got what it cannot send",
            which=[f"it is of the type {type(leaf).__name__}"],
            why="only arrays, random keys, numbers, strings and bytes are sent, bit for bit",
            do="Send it as bytes: `pickle.dumps(it)`.",
        )
    )
