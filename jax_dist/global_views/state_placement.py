"""How each leaf of a state lies on the mesh, and putting a state and batches there.

Shapes: `N` devices along the mapped axis, `L` of them of this process; `*s` is what one device
sees; `B` are the rows of this process.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.global_views import refusals
from jax_dist.mapping.body import type_of
from jax_dist.mapping.placement import is_key, with_data

_Named: TypeAlias = Literal["replicated", "fsdp"]
_Rule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], P]
Shardings: TypeAlias = _Named | _Rule

_SMALL = 1024  # elements; below, a leaf stays whole under "fsdp"


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The structure of a state, and the types of its leaves on one device."""

    structure: Any
    types: tuple[jax.ShapeDtypeStruct, ...]

    def fits(self, structure: Any, shapes: Sequence[tuple[int, ...]], size: int) -> bool:
        """Whether leaves of these shapes, each `[*s]` or `[N, *s]`, are such a state."""
        return structure == self.structure and all(
            shape in (kind.shape, (size, *kind.shape))
            for shape, kind in zip(shapes, self.types, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A state as the user has it."""

    known: Known
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    short_paths: tuple[str, ...]
    stacked: bool
    mesh: Mesh
    name: Any

    @property
    def types(self) -> Any:
        """The state of one device, as types."""
        return jax.tree.unflatten(self.known.structure, self.known.types)

    def put(self, place: int, sharding: NamedSharding, *, varies: bool | None) -> Any:
        """A leaf on the mesh.

        Args:
          place: of the leaf.
          sharding: where it is kept.
          varies: whether each device has its own; None if that is not known yet. It then stays
            `[N, *s]` where the slices differ.
        """
        leaf = self.leaves[place]
        own = NamedSharding(self.mesh, P(self.name))
        if not self.stacked:
            placed = put_whole(leaf, NamedSharding(self.mesh, P()) if varies else sharding)
            return for_each_device(placed, self.mesh.shape[self.name], own) if varies else placed
        stacked = put_slices(leaf, own)
        if varies:
            return stacked
        if varies is None and not _all_equal(stacked):
            return stacked
        return one_of_equals(stacked, sharding, self.paths[place])


def read_state(state: Any, name: str, mesh: Mesh, axis: Any, *, stacked: bool | None) -> Given:
    """A state, with whether it has a dimension for devices.

    Args:
      state: a tree of arrays.
      name: of the argument, for messages.
      mesh: where it goes.
      axis: the mapped one.
      stacked: as the user said; None if he said nothing.
    """
    with_paths, structure = jax.tree.flatten_with_path(state)
    paths = tuple(name + jax.tree_util.keystr(path) for path, _ in with_paths)
    short = tuple(jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in with_paths)
    leaves = tuple(leaf for _, leaf in with_paths)
    size = mesh.shape[axis]
    here = _local_count(mesh, axis)
    if stacked is None:
        stacked = _is_stacked(leaves, paths, {size, here})
    types = []
    for path, leaf in zip(paths, leaves, strict=True):
        kind = type_of(leaf)
        shape = kind.shape
        if stacked:
            if not shape or shape[0] not in (size, here):
                raise refusals.not_stacked(path, shape, here)
            shape = shape[1:]
        types.append(jax.ShapeDtypeStruct(shape, kind.dtype))
    return Given(Known(structure, tuple(types)), leaves, paths, short, stacked, mesh, axis)


def which_vary(
    leaves: Sequence[Any], structure: Any, knowns: Sequence[Known], size: int
) -> list[bool | None]:
    """Whether leaves of a state, or of a part of it, have one value for each device.

    None for a leaf of which that cannot be told: no leaf of the state has such a shape and type, or
    two do, one of them for each device.
    """
    shapes = [jnp.shape(leaf) for leaf in leaves]
    for known in knowns:
        if known.fits(structure, shapes, size):
            pairs = zip(shapes, known.types, strict=True)
            return [shape != kind.shape for shape, kind in pairs]
    kinds = {(kind.shape, kind.dtype) for known in knowns for kind in known.types}
    found: list[bool | None] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        dtype = type_of(leaf).dtype
        whole = (shape, dtype) in kinds
        own = shape[:1] == (size,) and (shape[1:], dtype) in kinds
        found.append(own if whole != own else None)
    return found


def _is_stacked(leaves: Sequence[Any], paths: Sequence[str], sizes: set[int]) -> bool:
    """Whether all leaves have a dimension for devices, as pmap gives them."""
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if not shapes or not all(shape and shape[0] in sizes for shape in shapes):
        return False
    if all(_lies_by_device(leaf) for leaf in leaves):
        return True
    raise refusals.stacked_or_not(min(sizes), paths[0], shapes[0])


def _lies_by_device(leaf: Any) -> bool:
    """Whether each device has one slice of the first dimension."""
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) != leaf.shape[0]:
        return False
    if leaf.shape[0] == 1:  # on one device, any array would
        sharding = leaf.sharding
        return isinstance(sharding, NamedSharding) and tuple(sharding.spec[:1]) not in ((), (None,))
    return leaf.sharding.shard_shape(leaf.shape)[0] == 1


def _local_count(mesh: Mesh, axis: Any) -> int:
    local: Any = mesh.local_mesh
    return local.shape[axis]


# ---- arrays


def put_whole(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which each process has the whole."""
    if is_key(leaf):
        return with_data(leaf, lambda data: put_whole(data, sharding))
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and sharding.is_fully_addressable:
        return _put_copy(leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _moved(sharding)(leaf)
    host = np.asarray(leaf, dtype=type_of(leaf).dtype)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _put_copy(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array of its own: the step may take over its memory, and the caller keeps theirs."""
    if sharding.shard_shape(leaf.shape) == leaf.shape:  # one device would share the memory
        return jax.device_put(jnp.copy(leaf), sharding)
    placed = jax.device_put(leaf, sharding)
    return jnp.copy(placed) if placed is leaf else placed


def put_slices(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """`[N, *s]`, or the `[L, *s]` of this process, with a slice on each device."""
    if is_key(leaf):
        return with_data(leaf, lambda data: put_slices(data, sharding))
    size = sharding.mesh.shape[sharding.spec[0]]
    if isinstance(leaf, jax.Array) and (
        sharding.is_fully_addressable or not leaf.is_fully_addressable
    ):
        return put_whole(leaf, sharding)
    host = np.asarray(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_process_local_data(sharding, host, (size, *host.shape[1:]))


def for_each_device(value: Any, size: int, sharding: NamedSharding) -> Any:
    """`[*s] -> [N, *s]`: each device its own copy."""
    return _stack(size, sharding)(value)


@functools.lru_cache(maxsize=256)
def _stack(size: int, sharding: NamedSharding) -> Any:
    def stack(value: jax.Array) -> jax.Array:
        return jnp.broadcast_to(value, (size, *value.shape))

    return jax.jit(stack, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _moved(sharding: NamedSharding) -> Any:
    return jax.jit(lambda value: value, out_shardings=sharding)


def _all_equal(stacked: jax.Array) -> bool:
    """Whether all slices have the same bits; compared on the devices."""
    data = jax.random.key_data(stacked) if is_key(stacked) else stacked
    sharding: Any = data.sharding
    return bool(_compare(NamedSharding(sharding.mesh, P()))(data))


@functools.lru_cache(maxsize=64)
def _compare(whole: NamedSharding) -> Any:
    def compare(stacked: jax.Array) -> jax.Array:
        bits = _bits(stacked)
        return jnp.all(bits == bits[:1])

    return jax.jit(compare, out_shardings=whole)


def _bits(array: jax.Array) -> jax.Array:
    """The same bits as integers, so that NaN equals NaN, and -0 is not 0."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_bits(array.real), _bits(array.imag)], -1)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    width = array.dtype.itemsize * 8
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))


@functools.lru_cache(maxsize=256)
def _taken(sharding: NamedSharding) -> Any:
    return jax.jit(lambda stacked: stacked[0], out_shardings=sharding)


def one_of_equals(stacked: jax.Array, sharding: NamedSharding, path: str) -> jax.Array:
    """`[N, *s] -> [*s]`, where all slices are equal. Raises PlacementError where they are not."""
    if not _all_equal(stacked):
        raise refusals.slices_differ(path)
    return _taken(sharding)(stacked)


# ---- batches


def place_batch(batch: Any, mesh: Mesh, axis: Any, *, rows: bool | None) -> Any:
    """`[L, b, ...]`, or `[B, ...]`, of each process as `[N, b, ...]` of all."""
    sharding = NamedSharding(mesh, P(axis))
    here = _local_count(mesh, axis)

    def place(path: Any, leaf: Any) -> Any:
        name = "batch" + jax.tree_util.keystr(path)
        shape = jnp.shape(leaf)
        if not shape:
            raise refusals.no_rows(name, shape)
        if rows or (rows is None and shape[0] != here):
            if shape[0] % here:
                raise refusals.rows_not_divisible(name, shape[0], here)
            leaf = _in_slices(leaf, here)
        elif shape[0] != here:
            raise refusals.rows_not_divisible(name, shape[0], here)
        return put_slices(leaf, sharding)

    return jax.tree.map_with_path(place, batch)


def _in_slices(leaf: Any, count: int) -> Any:
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    return leaf.reshape((count, leaf.shape[0] // count, *leaf.shape[1:]))


def check_shardings(shardings: Any) -> None:
    """Raises ArgumentTypeError for what is neither a name nor a rule."""
    if not callable(shardings) and shardings not in get_args(_Named):
        choices = "'replicated', 'fsdp', or a function of a path and a shape that gives a spec"
        raise refusals.unknown_choice("shardings", shardings, choices)


def specs_of(
    shardings: Shardings,
    mesh: Mesh,
    name: Any,
    paths: Sequence[str],
    leaves: Sequence[jax.ShapeDtypeStruct],
) -> list[P]:
    """How each leaf is to lie if it is shared.

    Args:
      shardings: as it was given.
      mesh: the mesh.
      name: of the mapped axis.
      paths: of each leaf, as in "params/dense/kernel".
      leaves: their types, without a dimension for devices.

    Raises:
      GlobalViewError: a rule gives a spec that does not fit.
    """
    if shardings == "replicated":
        return [P()] * len(leaves)
    if shardings == "fsdp":
        return [_fully_sharded(leaf.shape, mesh.shape[name], name) for leaf in leaves]
    specs = []
    for path, leaf in zip(paths, leaves, strict=True):
        spec = shardings(path, leaf)
        _check_spec(path, leaf.shape, spec, mesh)
        specs.append(spec)
    return specs


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


def is_cut(spec: P) -> bool:
    """Whether it cuts anything."""
    return any(part is not None and part != () for part in spec)


def item_size(dtype: Any) -> int:
    """The bytes of one element; of a random key, those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return dtype.itemsize


def _check_spec(path: str, shape: Sequence[int], spec: Any, mesh: Mesh) -> None:
    refuse = functools.partial(refusals.bad_sharding, path, shape, spec)
    if not isinstance(spec, P):
        raise refuse("it is no PartitionSpec")
    if len(spec) > len(shape):
        raise refuse("it has more parts than dimensions")
    for length, part in zip(shape, spec, strict=False):
        names = part if isinstance(part, tuple) else (part,) if part is not None else ()
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise refuse(f"the mesh has the axes {mesh.axis_names}, and not {unknown}")
        size = math.prod(mesh.shape[name] for name in names)
        if length % size:
            raise refuse(f"{size} devices do not divide {length}")
