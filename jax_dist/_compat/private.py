"""The private parts of JAX, by name, and what differs between its versions.

Every private part is looked up here, and may be gone tomorrow. A version is compared only where
there is no name to ask for.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

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

CPU_HANGS_WHEN_FULL = jax.__version_info__ < (0, 12)
"""Whether the CPU backend hangs over more than 32 executions on several devices in flight.

With 8 devices, 400 calls of a psum hang on 0.10.2, and do not on 0.12.0.1. No version in between
was tried.
"""

CACHES_HOST_CALLBACKS = jax.__version_info__ >= (0, 12)
"""Whether a program with a host callback is written to the persistent cache.

Compiled again in every process on 0.10.2; written, and found again, on 0.12.0.1. Not a name to ask
for, so the version is compared.
"""

CAN_REWRITE = True  # jax 0.10 is the floor


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
      NotImplementedError: this jax has none.
    """
    found = find(module, name)
    if found is None:
        raise NotImplementedError(
            f"jax_dist cannot {use} with jax {jax.__version__}, which has no {module}.{name}; use "
            "a jax that jax_dist was tested with"
        )
    return found


def is_compile_only(device: Device) -> bool:
    """Whether it is a device of `jax.experimental.topologies`: it compiles programs, and runs none.

    The class of its client tells, the same in 0.10.2 and 0.12.0.1. No public name does:
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


def auto_mesh(devices: np.ndarray, names: Sequence[object]) -> Mesh:
    """A mesh of Auto axes. Spelled out: the default of `make_mesh` is Explicit."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(devices, tuple(names), axis_types=auto)


def laid_by_rows(array: jax.Array) -> jax.Array:
    """The array, which XLA then keeps by rows, as arrays lie by default.

    `jax.experimental.layout` is public, but may change; seen in 0.10.2 to 0.12.0.1. Without it the
    program takes more memory on TPUs, and computes the same.
    """
    make = find("jax.experimental.layout", "Layout")
    constrain = find("jax.experimental.layout", "with_layout_constraint")
    if make is None or constrain is None:
        return array
    return constrain(array, make(tuple(range(array.ndim))))
