"""Rows of numbers that several processes hold in part, beside those that one process holds."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_dist.testing import run_processes


def own_slices(*shape: int) -> np.ndarray:
    """Return the slices of this process of `arange` over `[8, *shape]`."""
    whole = np.arange(8 * int(np.prod(shape)), dtype=np.float32).reshape(8, *shape)
    local = jax.local_device_count()
    return whole[jax.process_index() * local :][:local]


def held_slices(array: jax.Array) -> list:
    """Return the values on the devices of this process, in order, as nested lists."""
    whole = np.zeros(array.shape, array.dtype)
    held = np.zeros(len(whole), bool)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
        held[shard.index[0]] = True
    return whole[held].tolist()


@functools.cache
def values_of(work: Callable, *args: Any, processes: int) -> list[Any]:
    """Return what each process returns, of those that share 8 devices."""
    outcomes = run_processes(
        work, *args, processes=processes, cpu_devices=8 // processes, timeout=240
    )
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None] * processes, errors
    return [outcome.value for outcome in outcomes]


def assert_equal(several: Sequence[Mapping[str, list]], one: Mapping[str, list]) -> None:
    """Compare the rows of all processes, joined in their order, with those of one."""
    for row, expected in one.items():
        joined = [part for value in several for part in value[row]]
        np.testing.assert_allclose(joined, expected, rtol=1e-5, err_msg=row)
