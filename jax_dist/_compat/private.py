"""The private parts of JAX, by name, and what differs between its versions.

Every private part is looked up here, and may be gone tomorrow. A version is compared only where
there is no name to ask for.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_dist.errors import UnsupportedError, refusal

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

NESTED_MANUAL_AXIS_INDEX = jax.__version_info__ >= (0, 8)
"""Whether `axis_index` lowers inside a shard_map that is nested in another one.

On 0.7.2 it fails with "operates on axis 'i' which is already bound by a parent"; seen to work on
0.10.2 and 0.12.0.1. Not a name to ask for, so the version is compared.
"""

CPU_HANGS_WHEN_FULL = jax.__version_info__ < (0, 12)
"""Whether the CPU backend hangs over more than 32 executions on several devices in flight.

With 8 devices, 400 calls of a psum hang on 0.10.2 and abort on 0.7.2; on 0.12.0.1 they do not. No
version in between was tried.
"""

CACHES_HOST_CALLBACKS = jax.__version_info__ >= (0, 12)
"""Whether a program with a host callback is written to the persistent cache.

Compiled again in every process on 0.10.2; written, and found again, on 0.12.0.1. Not a name to ask
for, so the version is compared.
"""

PROCESSES_KEEP_WEAK_TYPES = jax.__version_info__ < (0, 8)
"""Whether arrays that `jax.pmap` takes and gives in several processes keep weak types.

They do on 0.7.2, and do not on 0.8.0, 0.10.2 and 0.12.0.1. In one process they always do.
"""

PMAP_KNOWS_METHODS = jax.__version_info__ >= (0, 9, 1)
"""Whether `jax.pmap` knows a bound method again by its function and its object.

It traces the method again on 0.7.2 and 0.8.0, where the object may have changed, and does not on
0.10.2 and 0.12.0.1; the source of 0.9.1 is as that of 0.10.2.
"""

CAN_REWRITE = jax.__version_info__ >= (0, 10)
"""Whether jaxprs are such as the passes know them: jit of shard_map, typed by `manual_axis_type`.

Before 0.8 a pmap is a primitive of its own; before 0.10 the types are named otherwise.
"""


def find(module: str, name: str) -> Any | None:
    """The part of a module such as "jax._src.compiler"; None where this jax has none.

    `name` is that of an attribute in it, or of one of that: "config_ext.Config".
    """
    try:
        found: Any = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError):
        return None
    return found


def part(module: str, name: str, *, use: str) -> Any:
    """The same, for what cannot be done without: `use`, as in "see the calls of jit objects".

    Raises:
      UnsupportedError: this jax has none.
    """
    found = find(module, name)
    if found is None:
        raise refusal(
            UnsupportedError,
            what=f"jax_dist cannot {use} with jax {jax.__version__}",
            which=[f"{module}.{name} is not there"],
            why="JAX has no public way to it, and its private parts change",
            do="Use a jax that jax_dist was tested with, or go without; see docs/errors.md.",
        )
    return found


def is_compile_only(device: Device) -> bool:
    """Whether it is a device of `jax.experimental.topologies`: it compiles programs, and runs none.

    The class of its client tells, the same in 0.7.2, 0.10.2 and 0.12.0.1. No public name does:
    `jax.devices` of its platform would start that, and a real device of a backend that has been
    cleared is not among them either.
    """
    return isinstance(getattr(device, "client", None), _COMPILE_ONLY)


_COMPILE_ONLY = find("jaxlib._jax", "CompileOnlyPyClient") or ()


def config_value(name: str) -> Any:
    """A setting of JAX, by its name; type checkers know none of them."""
    return getattr(jax.config, name)


def typed_collectives(*, check_vma: bool) -> Any:
    """Return the context in which a shard_map of this `check_vma` traces its body.

    To trace a few equations that are put into a body; public is only to trace a whole shard_map.
    `jax._src.config._check_vma`: seen in 0.10.2 and 0.12.0.1.
    """
    return part("jax._src.config", "_check_vma", use="change the body of a shard_map")(check_vma)


def hide_frames(path: str) -> None:
    """Leaves files below `path` out of JAX's tracebacks and of `jax.debug.breakpoint`."""
    hide = find("jax._src.traceback_util", "register_exclusion")
    if hide is not None:
        hide(path)


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


def laid_by_rows(array: jax.Array) -> jax.Array:
    """The array, which XLA then keeps by rows, as arrays lie by default.

    `jax.experimental.layout` is public, but may change; seen in 0.7.2 to 0.12.0.1. Without it the
    program takes more memory on TPUs, and computes the same.
    """
    make = find("jax.experimental.layout", "Layout")
    constrain = find("jax.experimental.layout", "with_layout_constraint")
    if make is None or constrain is None:
        return array
    return constrain(array, make(tuple(range(array.ndim))))
