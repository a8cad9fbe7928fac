"""The type of a device."""

from typing import TYPE_CHECKING

import jax

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
