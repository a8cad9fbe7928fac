"""Meshes for mapped functions, and the context of a body that is being traced.

The first mesh axis is the mapped one; the others, if any, are those of pmaps inside it. Axes are
always Auto, and every process holds the same number of devices.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dist import _compat
from jax_dist._compat import Device
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist.errors import DeviceCountError, MappedAxisError

if TYPE_CHECKING:
    from jax_dist._pmap.options import Options

UNNAMED = "pmap_axis_0"  # a fixed name: it is part of the program, and so of its cache key
PROCESS_AXIS = "pmap_process"  # the axis over processes, in the view that one process has


class InnerAxis(NamedTuple):
    """The mesh axis of a pmap that is called inside the mapped function."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A mesh whose first axis is the mapped one."""

    mesh: Mesh
    size: int  # of the mapped axis, over all processes
    processes: int  # that take part; 1 also where each process maps on its own

    @property
    def name(self) -> str:
        return self.mesh.axis_names[0]

    @functools.cached_property
    def inner(self) -> tuple[InnerAxis, ...]:
        """The mesh axes of the pmaps inside, outermost first."""
        return tuple(InnerAxis(*axis) for axis in list(self.mesh.shape.items())[1:])

    @property
    def local_size(self) -> int:
        """The size of the mapped axis on one process."""
        return self.size // self.processes

    @functools.cached_property
    def sharding(self) -> Callable[[Axis, int], NamedSharding]:
        """The sharding of a global array by mapped axis and rank, always the same object."""
        return functools.cache(
            lambda axis, ndim: NamedSharding(self.mesh, axes.spec_of_axis(axis, ndim, self.name))
        )

    @functools.cached_property
    def process_local(self) -> "Layout":
        """The rows of the mesh that this process holds, under the same names."""
        owner = jax.process_index()
        rows = np.array([row for row in self.mesh.devices if _process_of(row) == owner])
        return Layout(_compat.auto_mesh(rows, self.mesh.axis_names), self.local_size, 1)

    @functools.cached_property
    def process_mesh(self) -> Mesh | None:
        """Return the same devices in the same order, with the mapped axis split by process.

        None if the devices of a process are not side by side.
        """
        rows, *inner = self.mesh.devices.shape
        grid = self.mesh.devices.reshape(self.processes, rows // self.processes, *inner)
        if any(len({_process_of(row) for row in group}) > 1 for group in grid):
            return None
        return _compat.auto_mesh(grid, (PROCESS_AXIS, *self.mesh.axis_names))


@functools.lru_cache(maxsize=1024)
def make_layout(
    options: "Options",
    candidates: tuple[Device, ...],  # part of the key: a restarted backend has other ones
    size: int,
    inner: tuple[InnerAxis, ...] = (),
    *,
    whole: bool,
) -> Layout:
    """Return the mesh for a mapped axis, with axes for the pmaps inside, outermost first.

    `whole` says whether `size` is that over all processes, or that of this one. It is the same
    object for the same request, so that its shardings are the same objects too.
    """
    owners = sorted({owner_of(device) for device in candidates})
    groups = {owner: [d for d in candidates if owner_of(d) == owner] for owner in owners}
    available = min(len(group) for group in groups.values())
    local_size, rest = divmod(size, len(owners)) if whole else (size, 0)
    if rest:
        raise DeviceCountError(
            f"pmap of '{options.fun_name}' cannot spread an axis of size {size} evenly over "
            f"{len(owners)} processes."
        )
    whole_size = local_size * len(owners)
    if options.axis_size is not None and options.axis_size != whole_size:
        raise unequal_axis_size(options, whole_size)
    width = math.prod(axis.size for axis in inner)
    if local_size * width > available:
        sizes = {options.mesh_axis: local_size} | dict(inner)
        listed = ", ".join(f"axis {name!r} has size {n}" for name, n in sizes.items())
        raise DeviceCountError(
            f"pmap of '{options.fun_name}' needs {local_size * width} devices, but there are "
            f"{available} ({listed}). Reshape the arguments to [devices, k, ...] and use jax.vmap "
            "with axis_name=, or jax.lax.map, inside; to try it on a laptop, set "
            "JAX_NUM_CPU_DEVICES."
        )
    used = {device for group in groups.values() for device in group[: local_size * width]}
    ordered = candidates if options.devices else [d for owner in owners for d in groups[owner]]
    chosen = np.array([device for device in ordered if device in used])
    names = (options.mesh_axis, *[axis.name for axis in inner])
    shape = (whole_size, *[axis.size for axis in inner])
    mesh = _compat.auto_mesh(chosen.reshape(shape), names)
    return Layout(mesh=mesh, size=whole_size, processes=len(owners))


def unequal_axis_size(options: "Options", size: int) -> MappedAxisError:
    """Return the error for an `axis_size=` that the arguments do not have."""
    return MappedAxisError(
        f"pmap of '{options.fun_name}': axis_size={options.axis_size} does not match the mapped "
        f"axis, which has size {size} over all processes."
    )


def owner_of(device: Device) -> int:
    """Return the process that runs programs on a device.

    The devices of a topology run none, of however many hosts they are: all count as one process's.
    """
    return 0 if _compat.is_compile_only(device) else device.process_index


def _process_of(row: object) -> int:
    """Return the process of one row of a mesh: a device, or an array of devices of one process."""
    return owner_of(np.asarray(row, dtype=object).flat[0])


# --- meshes that the user has set


@contextlib.contextmanager
def context_of(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Replace the mesh of the context while tracing; shard_map accepts none but its own."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    context = jax.sharding.get_abstract_mesh()
    if context == abstract or (context.empty and isinstance(mesh, Mesh)):
        yield
    else:
        with jax.sharding.use_abstract_mesh(abstract):
            yield


def mesh_of_user() -> AbstractMesh | None:
    """Return the mesh that the user has set by `jax.set_mesh`, as a trace sees it."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or AxisType.Manual in mesh.axis_types else mesh


def is_explicit(mesh: AbstractMesh) -> bool:
    """Return whether shardings over some mesh axes are part of the types of arrays."""
    return AxisType.Explicit in mesh.axis_types


def manual_axes() -> tuple[object, ...]:
    """Return the axes of the shard_map that is being traced, ours or not."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)


def all_axes(mesh: Mesh | AbstractMesh) -> Any:
    """Return the axes of a non-empty mesh as one entry of a spec."""
    first, *others = mesh.axis_names
    return (first, *others) if others else first


def outside_of_meshes() -> contextlib.AbstractContextManager[None]:
    """Leave the mesh that the user has set, while tracing."""
    return context_of(AbstractMesh((), ()))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh that the user has set, outside of any trace."""
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def reshard_to(mesh: Mesh, results: Any) -> Any:
    """Return results as arrays of the user's mesh, if it has the same devices in the same order.

    With Explicit axes, results on another mesh could not be combined with the caller's arrays. No
    buffer is moved.
    """
    whole = all_axes(mesh)

    def reshard(array: jax.Array) -> jax.Array:
        sharding: Any = array.sharding
        is_nested = len(sharding.mesh.axis_names) > 1
        if is_nested or [*sharding.mesh.devices.flat] != [*mesh.devices.flat]:
            return array
        spec = PartitionSpec(*[None if part is None else whole for part in sharding.spec])
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(reshard, results)


# --- the body that is being traced


@dataclasses.dataclass(slots=True)
class Frame:
    """One body that is being traced, and the mesh axes left for the pmaps inside."""

    names: tuple[object, ...]  # the axes that collectives in the body can name, outermost first
    free: tuple[InnerAxis, ...] = ()  # mesh axes of the pmaps inside, by depth
    wanted: list[InnerAxis] = dataclasses.field(default_factory=list)  # the same; of all depths

    def enter_axis(self, name: str | None, size: int) -> tuple[InnerAxis, "Frame", bool]:
        """Return the axis of a pmap inside, its frame, and whether a mesh axis is free for it.

        The first pmap at each depth decides which mesh axis the outermost one should add.
        """
        depth = len(self.names) - 1
        axis = InnerAxis(name or f"{UNNAMED[:-1]}{depth + 1}", size)
        if len(self.wanted) == depth and axis.name not in self.names:
            self.wanted.append(axis)
        on_mesh = self.free[:1] == (axis,) and axis.name not in self.names
        free = self.free[1:] if on_mesh else ()
        return axis, Frame((*self.names, axis.name), free, self.wanted), on_mesh

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the frame of what is traced inside."""
        token = _innermost.set(self)
        try:
            yield
        finally:
            _innermost.reset(token)

    @staticmethod
    def current() -> "Frame | None":
        """Return the frame of the pmap whose body is being traced; None outside."""
        return _innermost.get()


_innermost = contextvars.ContextVar[Frame | None]("innermost", default=None)
