"""Arrays of typed random keys. Their buffers are those of the data inside: `[*s]` as `[*s, n]`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Whether `x` is an array made by `jax.random.key`; raw keys of `PRNGKey` are plain numbers."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def with_data(keys: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The keys with `change` made to their data. They are not consumed."""
    data = change(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
