"""The options of `pmap`, validated."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeAlias, get_args

import jax

from jax_dist._compat import Device
from jax_dist._passes.captures import Captures
from jax_dist._passes.gathers import Gathers
from jax_dist._pmap import axes
from jax_dist._pmap.axes import AxisPrefix
from jax_dist._pmap.meshes import UNNAMED, InnerAxis, MeshLayout, make_layout
from jax_dist.errors import ArgumentTypeError, DeviceCountError

Arrays: TypeAlias = Literal["local", "global"]
_CHOICES = {"captures": Captures, "gathers": Gathers, "arrays": Arrays}


@dataclasses.dataclass(frozen=True, eq=False)
class PmapOptions:
    """Validated options of `pmap`, for one function.

    Containers of axes are copied, since the caller may change them later.
    """

    fun_name: str
    axis_name: Any = None  # None if the user gave none
    in_axes: AxisPrefix = 0
    out_axes: AxisPrefix = 0
    static: tuple[int, ...] = ()  # positions, ascending
    donated: tuple[int, ...] = ()
    donated_names: tuple[str, ...] = ()
    devices: tuple[Device, ...] | None = None
    backend: str | None = None
    axis_size: int | None = None
    arrays: Arrays = "local"
    captures: Captures = "lift"
    gathers: Gathers = "reduce"

    def __post_init__(self) -> None:
        for name in (x for x in ("in_axes", "out_axes") if type(getattr(self, x)) is not int):
            prefix = getattr(self, name)  # an int, as is usual, needs neither a check nor a copy
            for leaf in jax.tree.leaves(prefix):
                if type(leaf) is not int:
                    raise ArgumentTypeError(
                        f"pmap {name} must be an int, None, or a container of these, but "
                        f"{prefix!r} holds {leaf!r}."
                    )
            self._set(name, jax.tree.map(lambda axis: axis, prefix, is_leaf=axes.is_none))
        self._set("static", axes.argument_numbers("static_broadcasted_argnums", self.static))
        self._set("donated", axes.argument_numbers("donate_argnums", self.donated))
        names = self.donated_names
        self._set("donated_names", (names,) if isinstance(names, str) else tuple(names))
        self._set("devices", _check_devices(self.devices))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(choices):
                words = " or ".join(map(repr, get_args(choices)))
                raise ValueError(f"pmap {name} must be {words}, got {value!r}.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @functools.cached_property
    def key(self) -> Hashable:
        """A hashable value that is equal for equal options, also if axes are in dicts and lists."""
        # Not dataclasses.astuple, which copies deeply: devices cannot be copied.
        values = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        leaves, structure = jax.tree.flatten(values, is_leaf=axes.is_none)
        return (*leaves, structure)

    @property
    def mesh_axis(self) -> str:
        """The name of the mapped mesh axis."""
        return UNNAMED if self.axis_name is None else self.axis_name

    def candidates(self) -> tuple[Device, ...]:
        """Return the devices to choose from, of all processes."""
        return self.devices if self.devices is not None else tuple(jax.devices(self.backend))

    def lay_out(
        self, size: int, inner_axes: tuple[InnerAxis, ...] = (), *, is_global_size: bool = True
    ) -> MeshLayout:
        """Return the layout for a mapped axis of `size`; see `meshes.make_layout`."""
        return make_layout(self, self.candidates(), size, inner_axes, is_global_size=is_global_size)

    def rename_for(self, fun: Callable) -> "PmapOptions":
        """Return these options for `fun`: with its name, and with donation by its signature.

        Arguments are donated whether passed by position or by keyword, as by `jax.jit`.
        """
        donated, names = {*self.donated}, {*self.donated_names}
        if donated or names:
            with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
                parameters = inspect.signature(fun).parameters.values()
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                positions = {p.name: n for n, p in enumerate(parameters) if p.kind is kind}
                donated |= {positions[name] for name in self.donated_names if name in positions}
                names |= {name for name, position in positions.items() if position in donated}
        return dataclasses.replace(
            self,
            fun_name=axes.function_name(fun),
            donated=tuple(donated - {*self.static}),
            donated_names=tuple(sorted(names)),
        )


def _check_devices(devices: Any) -> tuple[Device, ...] | None:
    """Return pmap's `devices=` as a tuple, or None if it is None; raise if they are no devices."""
    if devices is None:
        return None
    if isinstance(devices, Iterable):
        devices = tuple(devices)
        if not devices:
            raise DeviceCountError("'devices' argument to pmap must be non-empty, or None.")
        if all(isinstance(device, jax.Device) for device in devices):
            return devices
    remedy = f" Give jax.devices()[:{devices}]." if isinstance(devices, int) else ""
    raise ArgumentTypeError(
        f"'devices' argument to pmap must be a sequence of devices, or None; got {devices!r}."
        + remedy
    )
