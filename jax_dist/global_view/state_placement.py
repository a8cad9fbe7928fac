"""How each leaf of a state lies on the mesh, and putting a state and batches there.

Shapes: `N` devices along the mapped axis, `L` of them of this process; `*s` is what one device
sees; `B` are the rows of this process. `by_device` is the sharding of `[N, *s]`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._pmap.body import type_of
from jax_dist._rewrite.interpreter import names_of
from jax_dist.errors import ArgumentError
from jax_dist.global_view.copies import (
    all_equal,
    count,
    for_each_device,
    local_count,
    one_of_equals,
    put_slices,
    put_whole,
)

_Rule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], P]
Shardings: TypeAlias = Literal["replicated", "fsdp"] | _Rule

_SMALL = 1024  # elements; below, a leaf stays whole under "fsdp"


@dataclasses.dataclass(frozen=True, slots=True)
class StateType:
    """The structure of a state, and the types of its leaves on one device."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    # Whether the user said which leaves are stacked over devices.
    is_said: bool = dataclasses.field(default=False, compare=False)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)

    def fits(self, structure: Any, shapes: Sequence[tuple[int, ...]], sizes: Set[int]) -> bool:
        """Whether leaves of these shapes are such a state, each `[*s]`, or stacked so often."""
        return structure == self.structure and all(
            shape == kind.shape or (shape[1:] == kind.shape and {*shape[:1]} <= sizes)
            for shape, kind in zip(shapes, self.leaves, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GivenState:
    """A state as the user has it."""

    type: StateType
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    short_paths: tuple[str, ...]
    stacked: tuple[bool, ...]  # of each leaf
    by_device: NamedSharding

    def put(self, place: int, sharding: NamedSharding, *, varies: bool | None) -> Any:
        """A leaf on the mesh, where it is kept.

        Where it is not known yet whether each device has its own, `varies` is None: the leaf then
        stays `[N, *s]` if the slices differ.
        """
        leaf = self.leaves[place]
        if not self.stacked[place]:
            whole = NamedSharding(self.by_device.mesh, P())
            placed = put_whole(leaf, whole if varies else sharding)
            return for_each_device(placed, sharding) if varies else placed
        stacked = put_slices(leaf, sharding if varies else self.by_device)
        if varies or (varies is None and not all_equal(stacked)):
            return stacked
        return one_of_equals(stacked, sharding, self.paths[place])

    def own(self) -> set[int]:
        """The leaves of which each device was given another one, as a key for its dropout.

        Whole numbers and keys do not drift apart as copies do that are to be equal.
        """
        is_exact = lambda n: not jnp.issubdtype(self.type.leaves[n].dtype, jnp.inexact)
        places = [n for n, is_stacked in enumerate(self.stacked) if is_stacked and is_exact(n)]
        return {n for n in places if not all_equal(put_slices(self.leaves[n], self.by_device))}

    @classmethod
    def of(
        cls,
        state: Any,
        name: str,
        by_device: NamedSharding,
        stacked: Any,
        known: StateType | None,
    ) -> "GivenState":
        """Take a state; `stacked` says, for all or as a tree, which leaves are `[N, *s]`.

        If it is None, none is, but for those of a state that was placed before, `known`.
        """
        with_paths, structure = jax.tree.flatten_with_path(state)
        paths = tuple(name + jax.tree_util.keystr(path) for path, _ in with_paths)
        short = tuple(jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in with_paths)
        leaves = tuple(leaf for _, leaf in with_paths)
        here = local_count(by_device)
        sizes = {count(by_device), here}
        shapes = [jnp.shape(leaf) for leaf in leaves]
        own = [False] * len(leaves)
        if stacked is not None:
            own = jax.tree.leaves(jax.tree.broadcast(stacked, state))
        elif known is not None and known.fits(structure, shapes, sizes):
            own = [shape != kind.shape for shape, kind in zip(shapes, known.leaves, strict=True)]
        types = []
        for path, leaf, is_own in zip(paths, leaves, own, strict=True):
            kind = type_of(leaf)
            shape = kind.shape
            if is_own:
                if not shape or shape[0] not in sizes:
                    raise ArgumentError(
                        f"The state is given as stacked over {here} devices, but {path} has shape "
                        f"{tuple(shape)}. Give stacked=False for it, or stack it, too."
                    )
                shape = shape[1:]
            types.append(jax.ShapeDtypeStruct(shape, kind.dtype))
        is_said = stacked is not None or (known is not None and known.is_said)
        kinds = StateType(structure, tuple(types), is_said)
        return cls(kinds, leaves, paths, short, tuple(own), by_device)


def which_vary(
    leaves: Sequence[Any], structure: Any, known: Sequence[StateType], size: int
) -> list[bool | None]:
    """Whether leaves of a state, or of a part of it, have one value for each device.

    None for a leaf of which that cannot be told: no leaf of the state has such a shape and type, or
    two do, one of them for each device.
    """
    shapes = [jnp.shape(leaf) for leaf in leaves]
    for state in known:
        if state.fits(structure, shapes, {size}):
            pairs = zip(shapes, state.leaves, strict=True)
            return [shape != kind.shape for shape, kind in pairs]
    kinds = {(kind.shape, kind.dtype) for state in known for kind in state.leaves}
    found: list[bool | None] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        dtype = type_of(leaf).dtype
        whole = (shape, dtype) in kinds
        own = shape[:1] == (size,) and (shape[1:], dtype) in kinds
        found.append(own if whole != own else None)
    return found


# ---- batches


def place_batch(batch: Any, by_device: NamedSharding, *, rows: bool | None) -> Any:
    """`[L, b, ...]`, or `[B, ...]`, of each process as `[N, b, ...]` of all."""
    here = local_count(by_device)

    def place(path: Any, leaf: Any) -> Any:
        name = "batch" + jax.tree_util.keystr(path)
        shape = jnp.shape(leaf)
        if not shape:
            raise ArgumentError(
                f"place_batch splits the first dimension over devices, and {name} is a scalar. "
                "Pass what all devices share to the function itself, with in_axes None for it."
            )
        is_cut_here = rows or (rows is None and shape[0] != here)
        fits = shape[0] % here == 0 if is_cut_here else shape[0] == here
        if not fits:
            raise ArgumentError(
                f"{name} has {shape[0]} rows, which {here} devices do not divide. Give a multiple "
                f"of {here} rows, or drop the last ones."
            )
        if is_cut_here:
            whole = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            leaf = whole.reshape((here, shape[0] // here, *shape[1:]))
        return put_slices(leaf, by_device)

    return jax.tree.map_with_path(place, batch)


# ---- layouts


def layouts_of(
    shardings: Shardings,
    by_device: NamedSharding,
    paths: Sequence[str],
    leaves: Sequence[jax.ShapeDtypeStruct],
) -> list[NamedSharding]:
    """How each leaf is to lie if it is shared; its type has no dimension for devices.

    Raises ArgumentError where a rule gives a spec that does not fit.
    """
    mesh, found = by_device.mesh, []
    for path, leaf in zip(paths, leaves, strict=True):
        if callable(shardings):
            given: Any = shardings(path, leaf)
        elif shardings == "fsdp":
            name = names_of(by_device.spec[0])[-1]  # along the others, copied
            given = _fully_sharded(leaf.shape, mesh.shape[name], name)
        else:
            given = P()
        if (misfit := _misfit(leaf.shape, given, mesh)) is not None:
            raise ArgumentError(
                f"shardings gives {given!r} for {path} of shape {tuple(leaf.shape)}: {misfit}"
            )
        found.append(NamedSharding(mesh, given))
    return found


def _fully_sharded(shape: Sequence[int], size: int, name: Any) -> P:
    """Along the longest dimension that the devices divide; small arrays whole.

    >>> _fully_sharded((3, 256, 1024), 8, "i") == P(None, None, "i")
    True
    """
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    if not fitting or math.prod(shape) < _SMALL:
        return P()
    longest = max(fitting, key=lambda dim: shape[dim])
    return P(*[None] * longest, name)


def _misfit(shape: Sequence[int], spec: Any, mesh: Mesh | AbstractMesh) -> str | None:
    """Why such an array cannot lie so."""
    if not isinstance(spec, P):
        return "it is no PartitionSpec"
    if len(spec) > len(shape):
        return "it has more parts than dimensions"
    for length, part in zip(shape, spec, strict=False):
        names = names_of(part)
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            return f"the mesh has the axes {mesh.axis_names}, and not {unknown}"
        size = math.prod(mesh.shape[name] for name in names)
        if length % size:
            return f"{size} devices do not divide {length}"
    return None
