"""Options of a global view."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap.options import Options
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.global_view.mesh_axes import MeshAxes
from jax_dist.global_view.placement import Shardings


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Validated options of `global_view`; it asks for devices when its mesh is first read."""

    options: Options  # as for pmap
    mesh_axes: tuple[Any, ...]  # that the mapped axis is, outermost first
    state: tuple[int, ...]  # positions
    user_mesh: Mesh | None
    shardings: Shardings
    reorders: bool  # whether sums may be scattered, and taken over shards
    regathers: bool

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh with Auto axes: on others, shardings are types, and a step has none."""
        if self.user_mesh is None:
            return _compat.auto_mesh(np.array(jax.devices()), self.mesh_axes)
        return _compat.auto_mesh(self.user_mesh.devices, self.user_mesh.axis_names)

    @functools.cached_property
    def axes(self) -> MeshAxes:
        """The mapped axis on the mesh, without model axes."""
        sizes = {name: self.mesh.shape[name] for name in self.mesh_axes}
        platform = self.mesh.devices.flat[0].platform
        return MeshAxes(self.options.axis_name, sizes, platform=platform)

    @property
    def size(self) -> int:
        """The number of devices along the mapped axis, N."""
        return math.prod(self.axes.sizes.values())

    @property
    def model_axes(self) -> frozenset[Any]:
        """The mesh axes other than those of the mapped axis."""
        return frozenset(self.mesh.axis_names) - {*self.mesh_axes}

    @property
    def by_device(self) -> NamedSharding:
        """The sharding of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.axes.part))

    def sharding_of_varying(self, wanted: P) -> NamedSharding:
        """Return the sharding of `[N, *s]` where a uniform `[*s]` would be sharded as wanted."""
        is_free = cut_along(wanted).isdisjoint(self.mesh_axes)
        return NamedSharding(self.mesh, P(self.axes.part, *(wanted if is_free else ())))
