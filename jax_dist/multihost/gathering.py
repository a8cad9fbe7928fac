"""From all processes to all, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_dist.multihost.exchanging import TIMEOUT, as_key_of, exchange, is_key, is_whole

_NAME = "process_allgather"


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
    every = exchange(_NAME, tree, own, timeout=timeout)
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
