"""Options of a view, and placement of its states and batches on the mesh.

Shapes: `N` devices along the mapped axis, `L` of them of this process; `*s` is what one device
sees; `B` are the rows of this process.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes.constants import is_key
from jax_dist._passes.interpreter import names_of
from jax_dist._pmap.call import type_of
from jax_dist._pmap.options import PmapOptions
from jax_dist._pmap.placement import put_copy, shard
from jax_dist.errors import ArgumentError
from jax_dist.global_view.mesh_axes import MeshAxes
from jax_dist.global_view.report import StateLeaf

_Rule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], P]
Shardings: TypeAlias = Literal["replicated", "fsdp"] | _Rule

_SMALL = 1024  # elements; a smaller leaf is replicated under "fsdp"


@dataclasses.dataclass(frozen=True, slots=True)
class StateType:
    """An argument of the state, and the types of its leaves on one device, `[*s]`."""

    argument: int  # its position
    structure: Any
    paths: tuple[str, ...]  # of the leaves, as in "state['w']"
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    # Whether the user said by `stacked=` which leaves are stacked over devices.
    is_explicit: bool = dataclasses.field(default=False, compare=False)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)

    def fits(self, structure: Any, types: Sequence[Any], size: int | None = None) -> bool:
        """Return whether a state has these types; with the size N, a leaf may be `[N, *s]`, too."""
        return structure == self.structure and all(
            kind.dtype == leaf.dtype and kind.shape in (leaf.shape, (size, *leaf.shape))
            for kind, leaf in zip(types, self.leaves, strict=True)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Validated options of `global_view`; it asks for devices when its axes are first read."""

    options: PmapOptions  # as for pmap
    mapped: tuple[Any, ...]  # the mesh axes that the mapped axis is, outermost first
    state: tuple[int, ...]  # positions
    mesh: Mesh | None  # of the user
    shardings: Shardings
    reorders_sums: bool  # whether sums may be scattered, and taken over shards
    regathers: bool  # whether regions gather what is sharded where they read it, each time

    @functools.cached_property
    def axes(self) -> MeshAxes:
        """The mapped axis on a mesh of Auto axes: on others, shardings are types."""
        devices = np.array(jax.devices()) if self.mesh is None else self.mesh.devices
        names = self.mapped if self.mesh is None else self.mesh.axis_names
        mesh = _compat.auto_mesh(devices, names)
        return MeshAxes(self.options.axis_name, mesh, self.mapped)

    def make_state_leaves(self, state: StateType, origins: Mapping[str, str]) -> list[StateLeaf]:
        """Return the leaves of a state argument; those with a path in `origins` vary."""
        leaves, size = [], self.axes.size
        keys_and_types = jax.tree.leaves_with_path(state.tree)
        for path, (keys, leaf_type) in zip(state.paths, keys_and_types, strict=True):
            short_path = jax.tree_util.keystr(keys, simple=True, separator="/")  # "params/w"
            wanted = self._sharding_of(short_path, leaf_type)
            origin = origins.get(path)  # the line where it began to vary, "train.py:12 (add)"
            sharding = wanted if origin is None else self.axes.sharding_of_varying(wanted.spec)
            leaf = StateLeaf(state.argument, path, leaf_type, wanted, sharding, size, origin)
            leaves.append(leaf)
        return leaves

    def _sharding_of(self, path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Return how a leaf of a state is sharded if it is uniform; `path` is as in "params/w"."""
        if callable(self.shardings):
            spec: Any = self.shardings(path, leaf)
        elif self.shardings == "fsdp":
            name = self.axes.mapped[-1]  # replicated over the others
            spec = _fully_sharded(leaf.shape, self.axes.mesh.shape[name], name)
        else:
            spec = P()
        try:
            sharding = NamedSharding(self.axes.mesh, spec)
            sharding.shard_shape(leaf.shape)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"shardings gives {spec!r} for {path} of shape {tuple(leaf.shape)}: {error}"
            ) from error
        return sharding


def _fully_sharded(shape: Sequence[int], size: int, name: Any) -> P:
    """Return the spec that shards the longest dimension that `size` divides; P() if it is small."""
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    if not fitting or math.prod(shape) < _SMALL:
        return P()
    longest = max(fitting, key=lambda dim: shape[dim])
    return P(*[None] * longest, name)


def place_leaf(value: Any, leaf: StateLeaf, axes: MeshAxes) -> Any:
    """Place `[*s]` or `[N, *s]` as one `[*s]` for all devices (`leaf.uniform`), or as `[N, *s]`."""
    is_stacked = jnp.shape(value) != leaf.type.shape  # `[N, *s]`
    if is_stacked and leaf.uniform:  # all slices are equal, and one is kept
        return _first_slice(put_slices(value, axes.by_device), leaf.sharding)
    if is_stacked:  # each device gets its slice
        return put_slices(value, leaf.sharding)
    if not isinstance(value, jax.Array):  # on CPU, `device_put` would share its memory
        value = np.array(value, dtype=type_of(value).dtype)
    put = put_copy if leaf.uniform else stack_copies  # both in memory of its own
    return put(value, leaf.sharding)


def put_slices(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Place `[N, *s]`, or the `[L, *s]` of this process, with a slice on each device."""
    mesh: Any = sharding.mesh
    return shard(leaf, mesh, sharding.spec)


def stack_copies(value: Any, sharding: NamedSharding) -> Any:
    """Return a copy for each device: `(4, 2)` becomes `(8, 4, 2)` on 8 devices."""
    is_host, is_traced = not isinstance(value, jax.Array), isinstance(value, Tracer)
    # jit takes a traced value as it is, and an array that is on the devices of the mesh.
    if is_host or not (is_traced or value.sharding.device_set == sharding.device_set):
        value = put_copy(value, NamedSharding(sharding.mesh, P()))
    return _stack(value, sharding)


@functools.partial(jax.jit, static_argnums=1)
def _stack(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    count = math.prod(sharding.mesh.shape[name] for name in names_of(sharding.spec[0]))
    stacked = jnp.broadcast_to(value, (count, *value.shape))
    return jax.lax.with_sharding_constraint(stacked, sharding)


@functools.partial(jax.jit, static_argnums=1)
def _first_slice(stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(stacked[0], sharding)


@jax.jit
def are_equal(stacked: jax.Array) -> jax.Array:
    """Return whether all slices have the same bits."""
    data = jax.random.key_data(stacked) if is_key(stacked) else stacked
    # As bytes, so that NaN equals NaN, and -0 is not 0.
    rows = data.reshape(data.shape[0], -1).view(jnp.uint8)
    return jnp.all(rows == rows[:1])


def place_batch(batch: Any, axes: MeshAxes) -> Any:
    """Place `[L, b, ...]`, or rows `[L * b, ...]`, of L devices of a process as `[N, b, ...]`."""
    devices = axes.local_size

    def place(path: Any, leaf: Any) -> Any:
        name, shape = "batch" + jax.tree_util.keystr(path), jnp.shape(leaf)
        if not shape or shape[0] % devices:
            raise ArgumentError(
                f"{name} of shape {shape} cannot be split into rows for {devices} devices. Give a "
                f"multiple of {devices} rows; what all devices share goes to the call itself."
            )
        if shape[0] != devices:  # `[L * b, ...]`
            rows = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            leaf = rows.reshape((devices, shape[0] // devices, *shape[1:]))
        return put_slices(leaf, axes.by_device)

    return jax.tree.map_with_path(place, batch)
