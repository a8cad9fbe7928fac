"""From one process to all, bit for bit."""

from typing import Any

import jax

from jax_dist.errors import DisagreementError, message
from jax_dist.multihost.exchanging import TIMEOUT, as_key_of, exchange, is_key
from jax_dist.multihost.ranks import do

_NAME = "broadcast_one_to_all"


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
    every = exchange(_NAME, tree, leaves, is_source=mine, timeout=timeout)
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
            what=f"{_NAME}: not exactly one process is the source",
            which=[said],
            why="all get the values of that one",
            do="Give `is_source=True` in one process, and `is_source=False` in all others.",
        )
    )
