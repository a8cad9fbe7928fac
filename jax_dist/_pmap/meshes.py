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
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._compat import Device
from jax_dist._fast_path import is_staged
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist.errors import DeviceCountError, MappedAxisError

if TYPE_CHECKING:
    from jax_dist._pmap.options import PmapOptions

UNNAMED = "pmap_axis_0"  # if the user gives no name; fixed, since it is part of the cache key
_NO_MESH = Mesh(np.empty((), dtype=object), ())
PROCESS_AXIS = "pmap_process"  # the axis over processes in `MeshLayout.process_mesh`


class InnerAxis(NamedTuple):
    """The mesh axis of a pmap that is called inside the mapped function."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class MeshLayout:
    """A mesh whose first axis is the mapped one."""

    mesh: Mesh
    size: int  # of the mapped axis, over all processes
    processes: int  # that take part; 1 also where each process maps on its own

    @property
    def name(self) -> str:
        return self.mesh.axis_names[0]

    @functools.cached_property
    def inner_axes(self) -> tuple[InnerAxis, ...]:
        """The mesh axes of the pmaps inside, outermost first."""
        return tuple(InnerAxis(*axis) for axis in list(self.mesh.shape.items())[1:])

    @property
    def local_size(self) -> int:
        """The size of the mapped axis on one process."""
        return self.size // self.processes

    @functools.cached_property
    def sharding(self) -> Callable[[Axis, int], NamedSharding]:
        """The sharding of a global array by mapped axis and rank, always the same object."""

        @functools.cache
        def sharding(axis: Axis, ndim: int) -> NamedSharding:
            dim = None if axis is None else axis % ndim
            return NamedSharding(self.mesh, axes.spec_of_axis(dim, self.name))

        return sharding

    @functools.cached_property
    def _row_processes(self) -> np.ndarray:
        """The process of each row of the mesh `[size, *inner]`, whose devices belong to one."""
        rows = self.mesh.devices.reshape(self.size, -1)
        return np.array([owner_of(row[0]) for row in rows])

    @functools.cached_property
    def process_local(self) -> "MeshLayout":
        """The layout over the devices of this process only, with the same axis names."""
        rows = self.mesh.devices[self._row_processes == jax.process_index()]
        return MeshLayout(_compat.auto_mesh(rows, self.mesh.axis_names), self.local_size, 1)

    @functools.cached_property
    def process_mesh(self) -> Mesh | None:
        """The same devices in the same order, with the mapped axis split into [processes, rest].

        None if the devices of a process are not side by side.
        """
        processes = self._row_processes.reshape(self.processes, self.local_size)
        if (processes != processes[:, :1]).any():
            return None
        inner_sizes = self.mesh.devices.shape[1:]
        grid = self.mesh.devices.reshape(self.processes, self.local_size, *inner_sizes)
        return _compat.auto_mesh(grid, (PROCESS_AXIS, *self.mesh.axis_names))


@functools.lru_cache(maxsize=1024)
def make_layout(
    options: "PmapOptions",
    candidates: tuple[Device, ...],  # part of the key: a restarted backend has other ones
    size: int,
    inner_axes: tuple[InnerAxis, ...] = (),
    *,
    is_global_size: bool,
) -> MeshLayout:
    """Return the layout for a mapped axis, over the first candidate devices of each process.

    A size of 8 over 2 processes takes 4 devices of each; without `is_global_size`, 8 of each.
    `inner_axes` are the mesh axes of pmaps inside. It is cached, so that its shardings are always
    the same objects.
    """
    processes = sorted({owner_of(device) for device in candidates})
    devices_of = {p: [d for d in candidates if owner_of(d) == p] for p in processes}
    local_size, remainder = divmod(size, len(processes)) if is_global_size else (size, 0)
    if remainder:
        raise DeviceCountError(
            f"pmap of '{options.fun_name}' cannot spread an axis of size {size} evenly over "
            f"{len(processes)} processes."
        )
    global_size = local_size * len(processes)
    check_axis_size(options, global_size)
    needed = local_size * math.prod(axis.size for axis in inner_axes)  # devices of each process
    available = min(map(len, devices_of.values()))
    if needed > available:
        sizes = {options.mesh_axis: local_size} | dict(inner_axes)
        axis_sizes = ", ".join(f"axis {name!r} has size {n}" for name, n in sizes.items())
        raise DeviceCountError(
            f"pmap of '{options.fun_name}' needs {needed} devices, but there are {available} "
            f"({axis_sizes}). Reshape the arguments to [devices, k, ...] and use jax.vmap with "
            "axis_name=, or jax.lax.map, inside; to try it on a laptop, set JAX_NUM_CPU_DEVICES."
        )
    used = [device for process in processes for device in devices_of[process][:needed]]
    if options.devices:  # keep the user's order, in which those of processes may alternate
        chosen = set(used)
        used = [device for device in candidates if device in chosen]
    names = (options.mesh_axis, *[axis.name for axis in inner_axes])
    shape = (global_size, *[axis.size for axis in inner_axes])
    mesh = _compat.auto_mesh(np.array(used).reshape(shape), names)
    return MeshLayout(mesh=mesh, size=global_size, processes=len(processes))


def check_axis_size(options: "PmapOptions", size: int) -> None:
    """Raise MappedAxisError if the user gave another `axis_size=` than the mapped axis has."""
    if options.axis_size not in (None, size):
        raise MappedAxisError(
            f"pmap of '{options.fun_name}': axis_size={options.axis_size} does not match the "
            f"mapped axis, which has size {size} over all processes."
        )


def owner_of(device: Device) -> int:
    """Return the process that runs programs on a device; 0 for all that only compile."""
    return 0 if _compat.is_compile_only(device) else device.process_index


@contextlib.contextmanager
def context_of(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Set the mesh of the context while tracing: a shard_map inside accepts no other."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    context = jax.sharding.get_abstract_mesh()
    # Without any context, shard_map accepts a mesh of devices.
    if context == abstract or (context.empty and isinstance(mesh, Mesh)):
        yield
    else:
        with jax.sharding.use_abstract_mesh(abstract):
            yield


def mesh_of_user() -> AbstractMesh | None:
    """Return the mesh set by `jax.set_mesh`; None if there is none, or inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Unset the mesh that the user has set, for jit would run programs on its devices only.

    Does nothing in a trace, where no program runs.
    """
    is_unset = mesh_of_user() is None or is_staged()
    return contextlib.nullcontext() if is_unset else jax.set_mesh(_NO_MESH)


def reshard_to(mesh: Mesh, results: Any) -> Any:
    """Return results as arrays of the user's mesh, if it has the same devices in the same order.

    With Explicit axes, results on another mesh could not be combined with the caller's arrays. No
    buffer is moved.
    """

    def reshard(array: jax.Array) -> jax.Array:
        sharding: Any = array.sharding
        has_inner_axes = len(sharding.mesh.axis_names) > 1
        if has_inner_axes or [*sharding.mesh.devices.flat] != [*mesh.devices.flat]:
            return array
        # The mapped axis of our mesh takes up all its devices, and so all axes of the user's.
        spec = P(*[None if part is None else mesh.axis_names for part in sharding.spec])
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(reshard, results)


@dataclasses.dataclass(slots=True)
class Frame:
    """The function body of a pmap that is being traced, and the mesh axes for pmaps inside it.

    The outermost pmap is traced twice if there are others inside. In the first trace, its mesh has
    no axes for these, which become vmaps; `wanted_axes` collects what they would map over. The mesh
    of the second trace has these axes: they are the `free_axes` of its frame.
    """

    names: tuple[object, ...]  # the axes that collectives in the body can name, outermost first
    free_axes: tuple[InnerAxis, ...] = ()  # of the mesh, for pmaps inside; outermost first
    wanted_axes: list[InnerAxis] = dataclasses.field(default_factory=list)  # shared by all frames

    def enter_axis(self, name: str | None, size: int) -> tuple[InnerAxis, "Frame", bool]:
        """Return the axis of a pmap called in this body, its frame, and if it has a mesh axis.

        Under a pmap "i" with `free_axes=(InnerAxis("j", 2),)`, a pmap "j" of size 2 has that mesh
        axis, and the frame `Frame(("i", "j"))`. Without a free axis, a pmap becomes a vmap.
        """
        depth = len(self.names) - 1  # 0 in the body of the outermost pmap
        axis = InnerAxis(name or f"pmap_axis_{depth + 1}", size)
        is_new_name = axis.name not in self.names
        # The mesh of the second trace has one axis for each depth: that of the first pmap there.
        if is_new_name and len(self.wanted_axes) == depth:
            self.wanted_axes.append(axis)
        has_mesh_axis = is_new_name and self.free_axes[:1] == (axis,)
        remaining_axes = self.free_axes[1:] if has_mesh_axis else ()
        frame = Frame((*self.names, axis.name), remaining_axes, self.wanted_axes)
        return axis, frame, has_mesh_axis


# That of the innermost pmap whose body is being traced; None outside.
current_frame = contextvars.ContextVar[Frame | None]("current_frame", default=None)
