"""JAX's multihost_utils by their names: broadcast, gather, barrier and comparison.

Every process must call them in the same order; where one does not, all get an error and none a
hang. Values come back exactly, whatever their dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_dist.errors import DisagreementError, UnequalError, message
from jax_dist.multihost.agreement import agree_on, fingerprint
from jax_dist.multihost.exchange import (
    TIMEOUT,
    as_key_of,
    exchange,
    is_key,
    is_whole,
)
from jax_dist.multihost.ranks import do

_BROADCAST = "broadcast_one_to_all"


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
    every = exchange(_BROADCAST, tree, leaves, is_source=mine, timeout=timeout)
    sources = [rank for rank, given in enumerate(every) if given.is_source]
    if len(sources) != 1:
        raise _not_one_source(sources)
    found = zip(leaves, every[sources[0]].leaves(), strict=True)
    return jax.tree.unflatten(
        structure, [as_key_of(value, leaf) if is_key(leaf) else value for leaf, value in found]
    )


def _not_one_source(sources: list[int]) -> DisagreementError:
    said = f"{do(sources, 'says', 'say')} so" if sources else "none says so"
    return DisagreementError(
        message(
            what=f"{_BROADCAST}: not exactly one process is the source",
            which=[said],
            why="all get the values of that one",
            do="Give `is_source=True` in one process, and `is_source=False` in all others.",
        )
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
    every = exchange(_GATHER, tree, own, timeout=timeout)
    of_own = zip(own, *[given.leaves() for given in every], strict=True)
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
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
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
    place, nothing = f"sync_global_devices({name!r})", fingerprint(None)
    agree_on(place, nothing, timeout=timeout)
    _wait_for_own_devices()
    agree_on(f"{place}, devices", nothing, timeout=timeout)


def _wait_for_own_devices() -> None:
    """A device does one thing after the other: what is computed now comes last."""
    jax.block_until_ready([_last(jax.device_put(np.float32(0), d)) for d in jax.local_devices()])
    jax.effects_barrier()


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
            fingerprint(alike, values=True),
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
