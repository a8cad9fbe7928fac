"""Every name that differs between JAX versions, and the few private symbols, with their reasons."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding

NESTED_MANUAL_AXIS_INDEX = jax.__version_info__ >= (0, 8)
"""Whether `axis_index` lowers inside a shard_map that is nested in another one.

On 0.7.2 it fails with "operates on axis 'i' which is already bound by a parent"; seen to work on
0.10.2 and 0.12.0.1. Not a name to ask for, so the version is compared.
"""


_REWRAP = "_rewrap_with_aval_and_sharding"


def can_rewrap() -> bool:
    """Whether `rewrap` takes the fast way. Starts the backend."""
    return hasattr(jnp.zeros(()), _REWRAP)


def rewrap(array: jax.Array, aval: ShapedArray, sharding: NamedSharding) -> jax.Array:
    """The same buffers seen as another array: `[local, *s]` as `[global, *s]`, or back.

    The public `make_array_from_single_device_arrays` does the same at 15-47 us a leaf; a host-local
    call is then 2.2 times as slow as that of `jax.pmap`, which calls this private method itself.
    `_rewrap_with_aval_and_sharding`: seen in 0.10.2 and 0.12.0.1; absent in 0.7.2.
    """
    fast = getattr(array, _REWRAP, None)
    if fast is not None:
        return fast(aval, sharding)
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, [shard.data for shard in array.addressable_shards]
    )


def auto_mesh(devices: np.ndarray, names: Sequence[object]) -> Mesh:
    """A mesh of Auto axes. Spelled out: the default of `make_mesh` became Explicit in 0.9."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(devices, tuple(names), axis_types=auto)


def is_dropped(var: object) -> bool:
    """Whether an output variable of an equation stands for a value that nobody reads.

    `DropVar` has no public name; its class name was the same in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    return type(var).__name__ == "DropVar"
