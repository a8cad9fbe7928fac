"""Shardings of a state, and placement of states and batches on the mesh.

Shapes: `N` devices along the mapped axis, `L` of them of this process; `*s` is what one device
sees; `B` are the rows of this process. `by_device` is the sharding of `[N, *s]`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._pmap.body import type_of
from jax_dist._pmap.placement import is_key, shard
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.interpreter import names_of
from jax_dist.errors import ArgumentError

_Rule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], P]
Shardings: TypeAlias = Literal["replicated", "fsdp"] | _Rule

_SMALL = 1024  # elements; a smaller leaf is replicated under "fsdp"


@dataclasses.dataclass(frozen=True, slots=True)
class StateType:
    """The structure of a state, and the types of its leaves on one device, `[*s]`."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    # Whether the user said which leaves are stacked over devices.
    is_said: bool = dataclasses.field(default=False, compare=False)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)

    def stacked_leaves(
        self, structure: Any, shapes: Sequence[tuple[int, ...]], size: int
    ) -> list[bool] | None:
        """Return for each leaf of a state whether it is `[N, *s]`; None if it is another state."""
        if structure != self.structure:
            return None
        pairs = [(shape, kind.shape) for shape, kind in zip(shapes, self.leaves, strict=True)]
        fits = all(shape in (kind, (size, *kind)) for shape, kind in pairs)
        return [shape != kind for shape, kind in pairs] if fits else None


@dataclasses.dataclass(frozen=True, slots=True)
class UserState:
    """A state as the user has it; each leaf is `[*s]`, or `[N, *s]` where it is stacked."""

    type: StateType
    leaves: tuple[Any, ...]
    stacked: tuple[bool, ...]
    by_device: NamedSharding

    @classmethod
    def of(
        cls, state: Any, name: str, by_device: NamedSharding, stacked: Any, known: StateType | None
    ) -> "UserState":
        """Take a state; `stacked` says, for all or as a tree, which leaves are `[N, *s]`.

        If it is None, none is, but for those of a state that was placed before, `known`.
        """
        with_paths, structure = jax.tree.flatten_with_path(state)
        leaves = tuple(leaf for _, leaf in with_paths)
        is_said, sizes = stacked is not None, {count(by_device), local_count(by_device)}
        if is_said:
            flags = jax.tree.leaves(jax.tree.broadcast(stacked, state))
        else:
            shapes = [jnp.shape(leaf) for leaf in leaves]
            flags = known and known.stacked_leaves(structure, shapes, count(by_device))
            is_said = known is not None and known.is_said
        flags = tuple(flags or [False] * len(leaves))
        types = []
        for (path, leaf), is_stacked in zip(with_paths, flags, strict=True):
            kind = type_of(leaf)
            if is_stacked and not {*kind.shape[:1]} & sizes:
                raise ArgumentError(
                    f"The state is given as stacked over {local_count(by_device)} devices, but "
                    f"{name}{jax.tree_util.keystr(path)} has shape {tuple(kind.shape)}. Give "
                    "stacked=False for it, or stack it."
                )
            types.append(jax.ShapeDtypeStruct(kind.shape[int(is_stacked) :], kind.dtype))
        return cls(StateType(structure, tuple(types), is_said), leaves, flags, by_device)

    def unequal_leaves(self) -> set[int]:
        """Return the stacked leaves whose slices differ between devices, as dropout keys do."""
        stacked = [n for n, is_stacked in enumerate(self.stacked) if is_stacked]
        return {n for n in stacked if not _are_equal(put_slices(self.leaves[n], self.by_device))}

    def put(self, place: int, sharding: NamedSharding, *, varies: bool) -> Any:
        """Place the leaf number `place`: as `[N, *s]` if it `varies`, else as one `[*s]`."""
        leaf = self.leaves[place]
        if self.stacked[place]:
            if varies:
                return put_slices(leaf, sharding)
            return _first_slice(put_slices(leaf, self.by_device), sharding)
        if not isinstance(leaf, jax.Array):  # on CPU, `device_put` would share its memory
            leaf = np.array(leaf, dtype=type_of(leaf).dtype)
        return for_each_device(leaf, sharding) if varies else put_copy(leaf, sharding)


def count(by_device: NamedSharding) -> int:
    """Return the number of devices along the mapped axis, N."""
    return math.prod(by_device.mesh.shape[name] for name in names_of(by_device.spec[0]))


def local_count(by_device: NamedSharding) -> int:
    """Return the number of devices of this process along the mapped axis, L."""
    mesh: Any = by_device.mesh
    return math.prod(mesh.local_mesh.shape[name] for name in names_of(by_device.spec[0]))


def put_slices(leaf: Any, by_device: NamedSharding) -> jax.Array:
    """Place `[N, *s]`, or the `[L, *s]` of this process, with a slice on each device."""
    mesh: Any = by_device.mesh
    return shard(leaf, mesh, by_device.spec)


def for_each_device(value: Any, by_device: NamedSharding) -> Any:
    """`[*s] -> [N, *s]`: give each device its own copy."""
    is_host = not isinstance(value, jax.Array)
    is_traced = isinstance(value, Tracer)
    if is_host or not (is_traced or value.sharding.device_set == by_device.device_set):
        value = put_copy(value, NamedSharding(by_device.mesh, P()))
    return _stack(value, by_device)


@functools.partial(jax.jit, static_argnums=1)
def _stack(value: jax.Array, by_device: NamedSharding) -> jax.Array:
    stacked = jnp.broadcast_to(value, (count(by_device), *value.shape))
    return jax.lax.with_sharding_constraint(stacked, by_device)


@functools.partial(jax.jit, static_argnums=1)
def _first_slice(stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(stacked[0], sharding)


@jax.jit
def _are_equal(stacked: jax.Array) -> jax.Array:
    """Return whether all slices have the same bits."""
    data = jax.random.key_data(stacked) if is_key(stacked) else stacked
    # As bytes, so that NaN equals NaN, and -0 is not 0.
    rows = data.reshape(data.shape[0], -1).view(jnp.uint8)
    return jnp.all(rows == rows[:1])


def place_batch(batch: Any, by_device: NamedSharding, *, rows: bool | None) -> Any:
    """Place `[L, b, ...]`, or `[B, ...]`, of each process as `[N, b, ...]` of all."""
    devices = local_count(by_device)

    def place(path: Any, leaf: Any) -> Any:
        name = "batch" + jax.tree_util.keystr(path)
        shape = jnp.shape(leaf)
        if not shape:
            raise ArgumentError(
                f"place_batch splits the first dimension over devices, and {name} is a scalar. "
                "Pass what all devices share to the function itself, with in_axes None for it."
            )
        is_rows = rows or (rows is None and shape[0] != devices)
        if shape[0] % devices or not (is_rows or shape[0] == devices):
            raise ArgumentError(
                f"{name} has {shape[0]} rows, which {devices} devices do not divide. Give a "
                f"multiple of {devices} rows, or drop the last ones."
            )
        if is_rows:
            whole = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            leaf = whole.reshape((devices, shape[0] // devices, *shape[1:]))
        return put_slices(leaf, by_device)

    return jax.tree.map_with_path(place, batch)


def shardings_of(
    shardings: Shardings, by_device: NamedSharding, state: StateType
) -> list[NamedSharding]:
    """Return how each leaf of a state is sharded if it is uniform.

    Raises:
      ArgumentError: a rule gives a spec that does not fit.
    """
    mesh, results = by_device.mesh, []
    for keys, leaf in jax.tree.leaves_with_path(state.tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if callable(shardings):
            spec: Any = shardings(path, leaf)
        elif shardings == "fsdp":
            name = names_of(by_device.spec[0])[-1]  # replicated over the others
            spec = _fully_sharded(leaf.shape, mesh.shape[name], name)
        else:
            spec = P()
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.shard_shape(leaf.shape)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"shardings gives {spec!r} for {path} of shape {tuple(leaf.shape)}: {error}"
            ) from error
        results.append(sharding)
    return results


def _fully_sharded(shape: Sequence[int], size: int, name: Any) -> P:
    """Shard the longest dimension that the devices divide; replicate small arrays.

    >>> _fully_sharded((3, 256, 1024), 8, "i") == P(None, None, "i")
    True
    """
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    if not fitting or math.prod(shape) < _SMALL:
        return P()
    longest = max(fitting, key=lambda dim: shape[dim])
    return P(*[None] * longest, name)
