"""JAX's multihost_utils by their names: broadcast, gather, barrier and comparison.

Every process must call them in the same order; where one does not, all get an error and none a
hang. Values come back exactly, whatever their dtype.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_dist.errors import (
    DisagreementError,
    MissingRanksError,
    UnequalError,
    UnsupportedError,
    refusal,
)
from jax_dist.multihost.agreement import Fingerprint, agree_on
from jax_dist.multihost.ranks import do, name_ranks

_BROADCAST = "broadcast_one_to_all"

TIMEOUT = 60.0  # seconds


def broadcast_one_to_all(
    tree: Any,
    is_source: bool | None = None,  # noqa: FBT001  # as JAX has it
    *,
    timeout: float = TIMEOUT,
) -> Any:
    """Gives every process the values of one of them, exactly.

    Unlike the function of this name in `jax.experimental.multihost_utils`, it keeps all 64 bits of
    int64 and float64 whatever `jax_enable_x64` says, NaNs bit for bit, random keys as keys, and
    sends strings, bytes and Python numbers; and where the processes have different trees or shapes,
    every one of them raises an error, and none hangs.

    Args:
      tree: of arrays, random keys, numbers, strings and bytes; in all processes the same, but for
        the values.
      is_source: whether this process is the one; rank 0 is, if not given.
      timeout: the seconds to wait for the others.

    Returns:
      The tree of the source, with NumPy arrays in it, and what is no array as it was.

    Raises:
      DisagreementError: in every process: the trees, shapes or dtypes differ, or not exactly one
        process is the source.
      MissingRanksError: not all processes came in time.
      UnsupportedError: there is something else in the tree, or an array that is cut over processes.

    >>> broadcast_one_to_all({"seed": 2**40 + 1, "name": "run 7"})
    {'name': 'run 7', 'seed': 1099511627777}
    """
    leaves, structure = jax.tree.flatten(tree)
    mine = jax.process_index() == 0 if is_source is None else bool(is_source)
    (values,) = _exchange(_BROADCAST, tree, leaves, is_source=mine, timeout=timeout)
    found = zip(leaves, values, strict=True)
    return jax.tree.unflatten(
        structure, [as_key_of(value, leaf) if is_key(leaf) else value for leaf, value in found]
    )


# --- from all processes to all, bit for bit


_GATHER = "process_allgather"


def process_allgather(
    tree: Any,
    tiled: bool = False,  # noqa: FBT001, FBT002  # as JAX has it
    *,
    timeout: float = TIMEOUT,
) -> Any:
    """Gives every process the values of all of them, in the order of the ranks.

    Unlike the function of this name in `jax.experimental.multihost_utils`, it keeps all 64 bits,
    NaNs and random keys, takes strings, takes arrays of all processes whatever `tiled` says; where
    shapes differ, every process raises an error, and none reads memory that is not its own.

    Args:
      tree: of arrays, random keys, numbers, strings and bytes; in all processes the same, but for
        the values.
      tiled: whether to join arrays along their first dimension, rather than to stack them along a
        new one. Scalars are stacked in any case.
      timeout: the seconds to wait for the others.

    Returns:
      The tree with NumPy arrays, `[processes, *s]`, or `[processes * n, *s]` if tiled. One process
      is no exception: `[1, *s]` or `[n, *s]`. Of an array of all processes, the whole array.

    Raises:
      DisagreementError: in every process: the trees, shapes or dtypes differ.
      MissingRanksError: not all processes came in time.
      UnsupportedError: there is something else in the tree.

    >>> process_allgather({"loss": 0.5, "host": "a"})
    {'host': array(['a'], dtype='<U1'), 'loss': array([0.5])}
    """
    leaves, structure = jax.tree.flatten(tree)
    own = [leaf for leaf in leaves if not is_whole(leaf)]
    of_own = zip(own, *_exchange(_GATHER, tree, own, timeout=timeout), strict=True)
    found = [
        _replicated(leaf) if is_whole(leaf) else _joined(*next(of_own), tiled=tiled)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, found)


def _joined(leaf: Any, *values: Any, tiled: bool) -> Any:
    if isinstance(leaf, bytes):  # an array of them would lose zeros at their ends
        gathered = np.empty(len(values), object)
        gathered[:] = values
        return gathered
    is_tiled = tiled and np.ndim(leaf) > 0
    gathered = np.concatenate(values) if is_tiled else np.stack([np.asarray(v) for v in values])
    return as_key_of(gathered, leaf) if is_key(leaf) else gathered


def _replicated(leaf: jax.Array) -> Any:
    if is_key(leaf):
        return as_key_of(_replicated(jax.random.key_data(leaf)), leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)


# --- processes that wait for one another


def sync_global_devices(name: str, timeout: float = TIMEOUT) -> None:
    """Returns once every process has come here, and its devices have done what they had to do.

    Unlike the function of this name in `jax.experimental.multihost_utils`, it says which names the
    processes gave where these differ, and does not wait for ever. After an error the job can go on.

    Args:
      name: of this place in the program, the same in all processes.
      timeout: the seconds to wait for the others.

    Raises:
      DisagreementError: in every process: they gave different names.
      MissingRanksError: a DisagreementError, too: not all came in time. Those that come later raise
        the same.

    >>> sync_global_devices("the data is on disk")
    """
    place, nothing = f"sync_global_devices({name!r})", Fingerprint.of(None)
    agree_on(place, nothing, timeout=timeout)
    # A device does one thing after the other: what is computed now comes last.
    jax.block_until_ready([_last(jax.device_put(np.float32(0), d)) for d in jax.local_devices()])
    jax.effects_barrier()
    agree_on(f"{place}, devices", nothing, timeout=timeout)


@jax.jit
def _last(x: jax.Array) -> jax.Array:
    return x + 1


# --- the same values in every process, or an error in every process


def assert_equal(tree: Any, fail_message: str = "") -> None:
    """Checks that all processes have the same tree, with the same values.

    Unlike the function of this name in `jax.experimental.multihost_utils`, a NaN equals a NaN,
    leaves may be of any type, and those that differ are named; if shapes differ, it says so and
    does not crash. After an error the job can continue.

    Args:
      tree: of arrays, or of anything else that has a repr. Of an array that is cut over processes,
        only shape and dtype are compared.
      fail_message: is put in front of the error.

    Raises:
      UnequalError: an AssertionError, in every process, with the same text.
      MissingRanksError: not all processes came in time.

    >>> assert_equal({"x": np.full(3, np.nan), "name": "run 7"})
    """
    alike = jax.tree.map(_one_form, tree)
    what = f"assert_equal({fail_message!r})" if fail_message else "assert_equal"
    try:
        agree_on(
            what,
            Fingerprint.of(alike, values=True),
            timeout=TIMEOUT,
            do="Compute it in the same way everywhere, or broadcast it: "
            "jax_dist.multihost.broadcast_one_to_all.",
        )
    except TimeoutError:
        raise
    except DisagreementError as error:
        raise UnequalError(str(error)) from None


def _one_form(leaf: Any) -> Any:
    """What is equal becomes the same bits: 0 and -0, and all NaNs."""
    if isinstance(leaf, float):
        return leaf + 0.0
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            return leaf
        leaf = leaf.addressable_data(0)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    array = np.asarray(leaf) + np.zeros((), leaf.dtype)  # -0 + 0 is 0
    return np.where(np.isnan(array), np.full((), np.nan, array.dtype), array)


# --- leaves of trees from every process to every other, once they agree on what these are

# The values go over the coordination service, as bytes: no device takes part, so that nothing can
# hang, and no dtype is lost. What is large goes over the devices, also as bytes, once it is known
# that every process will take part with as many.


_SMALL = 1 << 18  # bytes: up to there, the service is about as fast as the devices
_PLAIN = (bool, int, float, complex, str, bytes)


def _exchange(
    name: str,
    tree: Any,
    leaves: Sequence[Any],
    *,
    is_source: bool | None = None,
    timeout: float = TIMEOUT,
) -> list[list[Any]]:
    """What each process has, in the order of the ranks: NumPy arrays, of keys the data; and others.

    Args:
      name: what the user called.
      tree: its tree; all must have the same one, up to values.
      leaves: those of it that are to be sent.
      is_source: whether only what this process has is wanted, and returned; None: that of all.
      timeout: the seconds to wait for the others.

    Raises:
      DisagreementError: not exactly one process is the source.
      UnsupportedError: a leaf cannot be sent.
    """
    marks = Fingerprint.of(jax.tree.map(lambda _: 0, tree))._replace(leaves=types(tree))
    others = {n: leaf for n, leaf in enumerate(leaves) if type(leaf) in _PLAIN}
    try:
        arrays = {n: _numbers(name, leaf) for n, leaf in enumerate(leaves) if n not in others}
    except UnsupportedError:
        agree_on(name, marks, timeout=timeout)  # else the others, who have another tree, would wait
        raise
    own = b"".join(array.tobytes() for array in arrays.values())
    is_small = len(own) <= _SMALL
    header = [[[n, *_encoded(leaf)] for n, leaf in others.items()], is_source]
    told = json.dumps(header).encode() + b"\n" + (own if is_small else b"")
    found = agree_on(name, marks, timeout=timeout, give=told)
    missing = [rank for rank in range(jax.process_count()) if rank not in found]
    if missing:  # one has died in between
        raise refusal(
            MissingRanksError,
            what=f"{name} has not heard from all processes",
            which=[f"{name_ranks(missing)} came, and gave nothing"],
            why="every process has to give its part",
            do="See the output of those ranks.",
        )
    every = [found[rank].split(b"\n", 1) for rank in sorted(found)]
    headers = [json.loads(header) for header, _ in every]
    wanted = list(range(len(every)))
    if is_source is not None:
        wanted = [rank for rank in wanted if headers[rank][1]]
        if len(wanted) != 1:
            raise refusal(
                DisagreementError,
                what=f"{name}: not exactly one process is the source",
                which=[f"{do(wanted, 'says', 'say')} so" if wanted else "none says so"],
                why="all get the values of that one",
                do="Give `is_source=True` in one process, and `is_source=False` in all others.",
            )
    if is_small:
        dumps = [dumped for _, dumped in every]
    elif is_source is None:
        dumps = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))
    else:
        buffer = np.frombuffer(own, np.uint8)
        dumps = [multihost_utils.broadcast_one_to_all(buffer, is_source)] * len(every)
    return [_loaded(headers[rank][0], arrays, dumps[rank]) for rank in wanted]


def _loaded(header: list[Any], arrays: dict[int, np.ndarray], dumped: Any) -> list[Any]:
    """The leaves of another process, whose arrays have the types of ours."""
    found = {number: _VALUES[kind](text) for number, kind, text in header}
    start = 0
    for number, array in arrays.items():
        flat = np.frombuffer(dumped, np.uint8, array.nbytes, start)
        found[number] = flat.view(array.dtype).reshape(array.shape).copy()
        start += array.nbytes
    return [found[number] for number in range(len(found))]


def _encoded(leaf: Any) -> tuple[str, str]:
    """Type and value in letters, every bit of it."""
    kind = type(leaf)
    if kind is bytes:
        return "bytes", leaf.hex()
    if kind in (float, complex):
        return kind.__name__, struct.pack("<dd", leaf.real, leaf.imag).hex()
    return kind.__name__, leaf if kind is str else hex(leaf)


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
            raise refusal(
                UnsupportedError,
                what=f"{name} got an array that no process has as a whole",
                which=[f"it is {_type(leaf)}"],
                why="each process has to give what it has itself",
                do="Give `leaf.addressable_data(0)` of it, or gather it first with "
                "`jax_dist.multihost.process_allgather`.",
            )
        leaf = leaf.addressable_data(0)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise refusal(
            UnsupportedError,
            what=f"{name} got what it cannot send",
            which=[f"it is of the type {type(leaf).__name__}"],
            why="only arrays, random keys, numbers, strings and bytes are sent, bit for bit",
            do="Send it as bytes: `pickle.dumps(it)`.",
        )
    return np.ascontiguousarray(array).reshape(array.shape)
