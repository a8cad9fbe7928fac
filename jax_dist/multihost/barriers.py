"""Processes that wait for one another."""

import jax
import numpy as np

from jax_dist.multihost.agreeing import agree_on
from jax_dist.multihost.exchanging import TIMEOUT
from jax_dist.multihost.fingerprints import fingerprint


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
