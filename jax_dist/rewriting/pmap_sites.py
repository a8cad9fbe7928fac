"""Which equations of a jaxpr are pmaps, and what they say of their mesh."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist.mapping import region
from jax_dist.passes import interpreter


@dataclasses.dataclass(frozen=True, slots=True)
class PmapSite:
    """One pmap in a traced program: jit(shard_map), over one axis of a mesh of its own."""

    eqn: JaxprEqn
    mesh: Any  # jax.sharding.Mesh or AbstractMesh
    axis: str
    where: str
    of_jax: bool  # made by jax.pmap, not by ours

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def body(self) -> Any:
        return self.eqn.params["jaxpr"]


def pmap_site(eqn: JaxprEqn, around: str = "") -> PmapSite | None:
    """The pmap that `eqn` is; None for all else, a shard_map of the user's own too.

    `jax.pmap` and ours both make a shard_map without vma types, manual over one axis; they are told
    from others by the file that its body was defined in. `around` is the line of what holds the
    equation: those inside a jit know only lines inside it.
    """
    if eqn.primitive.name != "shard_map" or eqn.params["check_vma"]:
        return None
    source = str(interpreter.open_jaxpr(eqn.params["jaxpr"]).debug_info.func_src_info)
    of_jax, of_ours = _FILE_OF_JAX in source, _OUR_FILE in source
    if len(eqn.params["newly_manual_axes"]) != 1 or not (of_jax or of_ours):
        return None
    (axis,) = eqn.params["newly_manual_axes"]
    where = interpreter.source_line(eqn) or around
    return PmapSite(eqn, eqn.params["mesh"], axis, where, of_jax)


def pmap_sites(jaxpr: Any, around: str = "") -> list[PmapSite]:
    """All pmaps at any depth; not those inside another one, which move with it."""
    found = []
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        site = pmap_site(eqn, around)
        if site is not None:
            found.append(site)
        elif eqn.primitive.name != "shard_map":
            for body in interpreter.bodies(eqn):
                found.extend(pmap_sites(body, interpreter.source_line(eqn) or around))
    return found


def mapped_dimension(spec: P) -> int | None:
    """The dimension that a spec of a pmap cuts; None for what all devices share."""
    return next((dim for dim, name in enumerate(spec) if name is not None), None)


def devices_of(mesh: Any) -> Sequence[jax.Device] | None:
    """The devices of a mesh in order; None if it names none."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else None


# "_fun at .../jax/_src/pmap.py:410", and "alone at .../jax_dist/mapping/region.py:47".
_FILE_OF_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "pmap.py")
_OUR_FILE = os.path.abspath(region.__file__)
