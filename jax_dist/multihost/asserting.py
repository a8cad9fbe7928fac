"""The same values in every process, or an error in every process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.errors import DisagreementError, UnequalError
from jax_dist.multihost.agreeing import agree_on
from jax_dist.multihost.exchanging import TIMEOUT
from jax_dist.multihost.fingerprints import fingerprint


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
