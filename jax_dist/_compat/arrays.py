"""Arrays, meshes and devices: the same buffers seen as other arrays, and what is put on devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding

from jax_dist._compat import private

if TYPE_CHECKING:  # jaxlib 0.10.2 and 0.12.0.1 ship no types, so that jax.Device is unknown
    from typing import Protocol

    class Device(Protocol):
        """A `jax.Device`."""

        @property
        def id(self) -> int: ...
        @property
        def platform(self) -> str: ...
        @property
        def device_kind(self) -> str: ...
        @property
        def process_index(self) -> int: ...

else:
    Device = jax.Device

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
    shards = array.addressable_shards
    return put_slices(aval, sharding, [s.data for s in shards], [s.device for s in shards])


def put_slices(
    aval: ShapedArray,
    sharding: NamedSharding,
    slices: Sequence[np.ndarray | jax.Array],
    devices: Sequence[Device],
) -> jax.Array:
    """An array of all processes from slices, one for each device of this process.

    The public `make_array_from_callback` does the same at 25 us more, and a call with a NumPy batch
    is then slower than that of `jax.pmap`, which calls this function itself.
    `batched_device_put` of `jax._src.interpreters.pxla`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    put = private.find("jax._src.interpreters.pxla", "batched_device_put")
    if put is not None:
        return put(aval, sharding, slices, devices)
    found = [jax.device_put(part, device) for part, device in zip(slices, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, found)


def movable(array: jax.Array, target: Any) -> jax.Array:
    """The same array as `device_put` can move it to `target`.

    On 0.7.2 it raises a ValueError for the axes of an Explicit mesh, whose shardings are types, and
    an AssertionError for a PmapSharding of the same devices in another order; on 0.10.2 and
    0.12.0.1 it does not.
    """
    own: Any = array.sharding
    if jax.__version_info__ >= (0, 8):
        return array
    wanted: Any = getattr(target, "mesh", None)
    if type(own).__name__ == "PmapSharding" and wanted is not None:
        is_in_order = own.devices.flatten().tolist() == wanted.devices.flatten().tolist()
        return array if is_in_order else jax.device_put(array, own.devices.item(0))
    if not isinstance(own, NamedSharding):
        return array
    if jax.sharding.AxisType.Explicit not in own.mesh.axis_types:
        return array
    mesh: Any = own.mesh
    auto = NamedSharding(auto_mesh(mesh.devices, mesh.axis_names), own.spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, auto, shards)


def auto_mesh(devices: np.ndarray, names: Sequence[object]) -> Mesh:
    """A mesh of Auto axes. Spelled out: the default of `make_mesh` became Explicit in 0.9."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(devices, tuple(names), axis_types=auto)
