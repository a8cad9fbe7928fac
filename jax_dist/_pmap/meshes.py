"""From devices to the mesh that a mapped function runs on.

The first mesh axis is the mapped one; the others, if any, are those of pmaps inside it. Axes are
always Auto, and every process holds the same number of devices.

A body is traced with its axes in the environment and no mesh. A pmap that it calls becomes a
shard_map over an abstract mesh of one axis, and notes in the `Frame` of the body which axis it
wants. The mesh of all of them is chosen when the trace of the outermost body is complete (see
`region`).
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dist import _compat
from jax_dist._compat.private import Device
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist.errors import DeviceCountError, MappedAxisError, refusal

UNNAMED = "pmap_axis_0"  # a fixed name: it is part of the program, and so of its cache key
_MADE_UP = UNNAMED.removesuffix("0")
PROCESS_AXIS = "pmap_process"  # the axis over processes, in the view that one process has


class InnerAxis(NamedTuple):
    """The mesh axis of a pmap that is called inside the mapped function."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class DeviceChoice:
    """What the user said of devices, and the name of the mapped mesh axis."""

    fun_name: str
    axis_name: str
    devices: tuple[Device, ...] | None
    backend: str | None
    axis_size: int | None
    virtual: bool

    def candidates(self) -> tuple[Device, ...]:
        """The devices to choose from, of all processes."""
        return self.devices if self.devices is not None else tuple(jax.devices(self.backend))

    def lay_out(self, size: int, inner: tuple[InnerAxis, ...] = (), *, whole: bool) -> "Layout":
        """The mesh for a mapped axis of `size`, with the axes of pmaps inside, outermost first.

        `whole`: whether `size` counts the slices of all processes, or those of this one. The same
        object for the same request, so that shardings made from it are the same too.

        Raises:
          DeviceCountError: the axis does not fit the devices.
          MappedAxisError: `axis_size` was promised to be another.
        """
        return _lay_out(self, size, inner, self.candidates(), whole=whole)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A mesh, and how the mapped axis lies on it."""

    mesh: Mesh
    size: int  # of the mapped axis, over all processes
    processes: int  # that take part; 1 also where each process maps on its own
    _shardings: dict[tuple[Axis, int], NamedSharding] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def name(self) -> str:
        return self.mesh.axis_names[0]

    @property
    def local_size(self) -> int:
        """Slices along the mapped axis that one process runs."""
        return self.size // self.processes

    def sharding(self, axis: Axis, ndim: int) -> NamedSharding:
        """Of a whole array with this mapped axis; the same object for the same request."""
        known = self._shardings.get((axis, ndim))
        if known is None:
            known = NamedSharding(self.mesh, axes.spec_of_axis(axis, ndim, self.name))
            self._shardings[axis, ndim] = known
        return known

    @functools.cached_property
    def local_mesh(self) -> Mesh:
        """The rows of the mesh that this process holds, under the same names."""
        owner = jax.process_index()
        rows = [row for row in self.mesh.devices if _process_of(row) == owner]
        return _compat.auto_mesh(np.array(rows), self.mesh.axis_names)

    @functools.cached_property
    def process_mesh(self) -> Mesh | None:
        """The same devices in the same order, with the mapped axis split by process.

        None where the devices of a process do not stand side by side.
        """
        rows, *inner = self.mesh.devices.shape
        grid = self.mesh.devices.reshape(self.processes, rows // self.processes, *inner)
        if any(len({_process_of(row) for row in group}) > 1 for group in grid):
            return None
        return _compat.auto_mesh(grid, (PROCESS_AXIS, *self.mesh.axis_names))


@contextlib.contextmanager
def context_of(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Steps out of a mesh that the user has set: shard_map accepts none but its own."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    context = jax.sharding.get_abstract_mesh()
    if context == abstract or (context.empty and isinstance(mesh, Mesh)):
        yield
    else:
        with jax.sharding.use_abstract_mesh(abstract):
            yield


def mesh_of_user() -> AbstractMesh | None:
    """The mesh that the user has set by `jax.set_mesh`, as a trace sees it."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or AxisType.Manual in mesh.axis_types else mesh


def has_types(mesh: AbstractMesh) -> bool:
    """Whether shardings over some of its axes are part of the types of arrays."""
    return AxisType.Explicit in mesh.axis_types


def all_axes(mesh: Mesh | AbstractMesh) -> Any:
    """Of a mesh that is not empty, as one part of a spec."""
    first, *others = mesh.axis_names
    return (first, *others) if others else first


def outside_of_meshes() -> contextlib.AbstractContextManager[None]:
    """Steps out of a mesh that the user has set, into none, while tracing."""
    return context_of(AbstractMesh((), ()))


def laid_on(mesh: Mesh, results: Any) -> Any:
    """Results as arrays of the user's mesh, if that has the same devices in the same order.

    Where shardings are types, he could not compute with them otherwise. No buffer is moved.
    """
    whole = all_axes(mesh)

    def lay(array: jax.Array) -> jax.Array:
        own: Any = array.sharding
        if not isinstance(array.sharding, NamedSharding) or [*own.mesh.devices.flat] != [
            *mesh.devices.flat
        ]:
            return array
        spec = [None if part is None else whole for part in own.spec]
        if spec.count(whole) > 1:  # of a pmap in a pmap
            return array
        target = NamedSharding(mesh, PartitionSpec(*spec))
        same = target.is_equivalent_to(own, array.ndim)
        return jax.device_put(array, target) if same else array

    return jax.tree.map(lay, results)


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Steps out of a mesh that the user has set, outside of any trace."""
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


@functools.lru_cache(maxsize=1024)
def _lay_out(
    choice: DeviceChoice,
    size: int,
    inner: tuple[InnerAxis, ...],
    candidates: tuple[Device, ...],  # part of the key: a restarted backend has other ones
    *,
    whole: bool,
) -> Layout:
    owners = sorted({owner_of(device) for device in candidates})
    groups = {owner: [d for d in candidates if owner_of(d) == owner] for owner in owners}
    available = min(len(group) for group in groups.values())
    local_size, rest = divmod(size, len(owners)) if whole else (size, 0)
    if rest:
        raise refusal(
            DeviceCountError,
            what=f"pmap of '{choice.fun_name}' cannot spread an axis of size {size} over the "
            "processes",
            which=[f"process {owner} has {len(groups[owner])} devices" for owner in owners],
            why="every process runs the same number of slices, on devices of its own",
            do="Give each process the same number of slices, at most one a device.",
        )
    whole_size = local_size * len(owners)
    if choice.axis_size is not None and choice.axis_size != whole_size:
        raise size_not_as_promised(choice.fun_name, choice.axis_size, whole_size)

    width = math.prod(axis.size for axis in inner)
    rows = local_size
    if choice.virtual:  # the most devices that can share the slices evenly
        counts = range(1, min(local_size, available) + 1)
        rows = max(count for count in counts if local_size % count == 0)
    if rows * width > available:
        sizes = {choice.axis_name: local_size} | dict(inner)
        raise refusal(
            DeviceCountError,
            what=f"pmap of '{choice.fun_name}' needs {rows * width} devices, "
            f"but there are {available}",
            which=[f"axis {name!r} has size {size}" for name, size in sizes.items()]
            + [f"{available} {candidates[0].platform} devices"],
            why="each slice along the mapped axis runs on a device of its own",
            do="Map fewer slices, or give virtual=True to run several of them on each device.",
        )
    used = {device for group in groups.values() for device in group[: rows * width]}
    ordered = candidates if choice.devices else [d for owner in owners for d in groups[owner]]
    chosen = np.array([device for device in ordered if device in used])
    names = (choice.axis_name, *[axis.name for axis in inner])
    shape = (rows * len(owners), *[axis.size for axis in inner])
    mesh = _compat.auto_mesh(chosen.reshape(shape), names)
    return Layout(mesh=mesh, size=whole_size, processes=len(owners))


def size_not_as_promised(fun_name: str, axis_size: int, received: int) -> MappedAxisError:
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' was promised axis_size={axis_size}, but received another",
        which=[f"over all processes, the arguments have size {received}"],
        why="axis_size is the size of the mapped axis over all processes",
        do=f"Drop axis_size, or give axis_size={received}.",
    )


def owner_of(device: Device) -> int:
    """The process that a device runs programs of.

    Those of a topology run none, of however many hosts they are: all count as one process's.
    """
    return 0 if _compat.is_compile_only(device) else device.process_index


def _process_of(row: object) -> int:
    """The process of one row of a mesh: a device, or an array of devices of one process."""
    return owner_of(np.asarray(row, dtype=object).flat[0])


@dataclasses.dataclass(slots=True)
class Frame:
    """One body that is being traced."""

    names: tuple[object, ...]  # the axes that collectives in the body can name, outermost first
    inner: list[InnerAxis] = dataclasses.field(default_factory=list)  # of pmaps inside, by depth
    regions: set[str] = dataclasses.field(default_factory=set)  # names of their abstract axes

    def note(self, axis: InnerAxis, below: tuple[InnerAxis, ...], regions: frozenset[str]) -> None:
        """A pmap inside wants this axis, and the pmaps in it want those `below`.

        Each depth has one mesh axis: that of the first pmap there.
        """
        wanted = (axis, *below)
        self.inner += wanted[len(self.inner) :]
        self.regions |= {axis.name, *regions}

    def given_names(self) -> list[object]:
        """The names that the user has given; the others are made up here."""
        made_up = lambda name: isinstance(name, str) and name.startswith(_MADE_UP)
        return [name for name in self.names if not made_up(name)]

    def free_name(self, name: object) -> str:
        """For the abstract axis of a pmap inside: its own if no axis around has that name."""
        if isinstance(name, str) and name not in self.names:
            return name
        return f"{_MADE_UP}{len(self.names)}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Everything traced inside belongs to this body."""
        around, _innermost.frame = _innermost.frame, self
        try:
            yield
        finally:
            _innermost.frame = around

    @staticmethod
    def around() -> "Frame | None":
        """The frame of the pmap whose body is being traced; None outside."""
        return _innermost.frame


class _Innermost(threading.local):
    frame: Frame | None = None


_innermost = _Innermost()


def manual_axes() -> tuple[object, ...]:
    """The axes of the shard_map that is being traced, ours or not; empty outside."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)
