"""A class of arrays as some programs have them, for the tests of several parts."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counter:
    """A class that makes arrays of numbers, as those of 64-bit counters do (brax has one)."""

    low: jax.Array

    def __post_init__(self):
        if isinstance(self.low, int):
            self.low = jnp.uint32(self.low)
