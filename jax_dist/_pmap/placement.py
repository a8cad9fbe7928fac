"""Putting arrays where a mapped function wants them, and taking them off again.

Shapes: `N` devices; `*s` is what one device holds. The buffers of an array of typed random keys are
those of the data inside: `[*s]` as `[*s, n]`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._compat.private import Device
from jax_dist._pmap import meshes
from jax_dist._rewrite.programs import is_staged
from jax_dist.errors import PlacementError, UnsupportedError, refusal

_DEVICE_AXIS = "devices"  # of the meshes made here; pmap takes such arrays as they are


def replicate(tree: Any, where: Mesh | Sequence[Device] | None = None) -> Any:
    """Puts a whole copy of every array on each device.

    The value keeps its shape: give it to `pmap` with `in_axes=None`. Only the devices hold copies;
    nothing of N times the size is built on the host.

    Args:
      tree: arrays `[*s]`, NumPy or jax, numbers, or random keys.
      where: a mesh, or devices; by default the devices of this process.

    Returns:
      The tree with jax arrays `[*s]`, replicated, in memory of their own.

    >>> import jax.numpy as jnp
    >>> replicate({"w": jnp.ones(3)})["w"].sharding.is_fully_replicated
    True
    """
    sharding = NamedSharding(_mesh_of(where), P())
    check_runs(sharding.device_set, "replicate")
    return jax.device_put(own(tree, sharding), sharding)


def shard(tree: Any, mesh: Mesh, spec: P | Any) -> Any:
    """Cuts arrays over a mesh.

    Args:
      tree: arrays, NumPy or jax. With several processes, NumPy arrays hold the slices of this
        process, and the result is the whole array of all of them.
      mesh: the mesh.
      spec: how each array is sharded; one for all, or a tree of specs that is a prefix of `tree`.

    Returns:
      The tree with jax arrays on the mesh.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()), ("i",))
    >>> len(shard(np.zeros((jax.device_count(), 2)), mesh, P("i")).addressable_shards)
    8
    """
    check_runs(mesh.devices.flat, "shard")
    here = jax.process_index()
    foreign = any(device.process_index != here for device in mesh.devices.flat)

    def put(part: P, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, part)
        subtree = own(subtree, sharding)
        if not foreign:
            return jax.device_put(subtree, sharding)
        return jax.tree.map(lambda x: _from_this_process(x, sharding), subtree)

    return jax.tree.map(put, spec, tree, is_leaf=lambda node: isinstance(node, P))


def unreplicate(tree: Any) -> Any:
    """Takes the first slice of each array along its leading axis, without communication.

    `x[0]` of a pmapped result runs a program on all devices that sends the slice to each of them.
    This reads the shard that the first device of this process already holds. Only if another
    dimension is cut, by `out_axes` or by a nested pmap, it fetches parts from the other devices.

    Args:
      tree: arrays `[N, *s]`, as `pmap` or `device_put_replicated` return them.

    Returns:
      The tree with arrays `[*s]`, each on one device.

    Raises:
      PlacementError: an array has no leading axis, or this process does not hold the whole slice.

    >>> import jax
    >>> unreplicate(device_put_replicated(np.float32(3), jax.devices()))
    Array(3., dtype=float32)
    """
    leaves, structure = jax.tree.flatten_with_path(tree)
    by_device: dict[Any, dict[int, Any]] = {}  # for one program cannot take arrays of several
    for index, (path, leaf) in enumerate(leaves):
        block = _first_block(leaf, "tree" + jax.tree_util.keystr(path))
        is_placed = isinstance(block, jax.Array) and not isinstance(block, Tracer)
        device = next(iter(block.devices())) if is_placed else None
        by_device.setdefault(device, {})[index] = block
    rows = {index: row for group in by_device.values() for index, row in _first_rows(group).items()}
    return jax.tree.unflatten(structure, [rows[i] for i in range(len(leaves))])


def device_put_replicated(tree: Any, devices: Sequence[Device]) -> Any:
    """Stacks one copy for each device: what `jax.device_put_replicated` did until jax 0.10.

    Args:
      tree: arrays `[*s]`, NumPy or jax, numbers, or random keys.
      devices: the devices of this process, one slice each.

    Returns:
      The tree with arrays `[N, *s]`, slice n on `devices[n]`. The host holds no N-fold copy: each
      device gets its copy from the one array.

    Raises:
      PlacementError: there are no devices.

    >>> import jax
    >>> device_put_replicated(1.0, jax.devices()).shape == (jax.device_count(),)
    True
    """
    devices = tuple(devices)
    if not devices:
        raise _unlike_counts("device_put_replicated", 1, 0)
    check_runs(devices, "device_put_replicated")
    tree = own(tree, _over(devices))
    return jax.tree.map(lambda x: _stack([x] * len(devices), devices), tree)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Stacks one shard for each device: what `jax.device_put_sharded` did until jax 0.10.

    Args:
      shards: a tree of arrays `[*s]` for each device, all of one structure.
      devices: the devices of this process.

    Returns:
      The tree with arrays `[N, *s]`, slice n on `devices[n]`.

    Raises:
      PlacementError: as many shards as devices are wanted, alike in structure, shape and dtype.

    >>> import jax
    >>> device_put_sharded([np.float32(1), np.float32(2)], jax.devices()[:2])
    Array([1., 2.], dtype=float32)
    """
    shards, devices = list(shards), tuple(devices)
    if len(shards) != len(devices) or not shards:
        raise _unlike_counts("device_put_sharded", len(shards), len(devices))
    check_runs(devices, "device_put_sharded")
    structures = [jax.tree.structure(shard) for shard in shards]
    if len(set(structures)) > 1:
        raise _unlike_shards("", structures)
    paths = [path for path, _ in jax.tree.leaves_with_path(shards[0])]
    columns = zip(*[jax.tree.leaves(shard) for shard in shards], strict=True)
    for path, column in zip(paths, columns, strict=True):
        dtypes = [x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in column]
        kinds = [f"{dtype}{list(jnp.shape(x))}" for dtype, x in zip(dtypes, column, strict=True)]
        if len(set(kinds)) > 1:
            raise _unlike_shards(jax.tree_util.keystr(path), kinds)
    shards = own(shards, _over(devices))
    return jax.tree.map(lambda *column: _stack(column, devices), *shards)


def _unlike_counts(what: str, shards: int, devices: int) -> PlacementError:
    return refusal(
        PlacementError,
        what=f"{what} got {shards} shards for {devices} devices",
        which=[f"len(shards) is {shards}", f"len(devices) is {devices}"],
        why="each device gets one shard",
        do="Give as many shards as devices.",
    )


def _unlike_shards(path: str, kinds: Sequence[Any]) -> PlacementError:
    return refusal(
        PlacementError,
        what="device_put_sharded got shards that do not make one array",
        which=[f"shard {i}{path} is {kind}" for i, kind in enumerate(kinds)],
        why="the shards become the slices of one array, along a new leading dimension",
        do="Give shards of one structure, with the same shapes and dtypes.",
    )


def check_runs(devices: Iterable[Device], what: str) -> None:
    """Raises UnsupportedError where `what` is to run on devices that only compile."""
    for device in devices:
        if _compat.is_compile_only(device):
            raise refusal(
                UnsupportedError,
                what=f"{what} cannot run on these devices, which only compile",
                which=[f"{device} is a device of a topology"],
                why="no such machine is attached: its compiler is here, and nothing else of it",
                do="Use .lower(...).compile(), with jax.ShapeDtypeStruct for arrays; to run it, "
                "give devices of jax.devices().",
            )


def can_be_put(leaf: Any) -> bool:
    """Whether `device_put` takes it, and the result is as good; else it is for jit to refuse."""
    if isinstance(leaf, jax.Array):
        # JAX notes on this very object that a random key was used, where it watches keys.
        is_watched = is_key(leaf) and _compat.config_value("jax_debug_key_reuse")
        return leaf.is_fully_addressable and not is_watched
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, bool | int | float | complex)


def put_as_jit_would(leaf: Any, target: Sharding) -> Any:
    """Puts an argument where a program wants it.

    `jax.transfer_guard` counts what jit moves as implicit, and refuses it sooner than what a user
    moves by `device_put`; this is no user's.
    """
    kinds = ("host_to_device", "device_to_device")
    guarded = {_compat.config_value(f"jax_transfer_guard_{kind}") for kind in kinds}
    level = next((level for level in ("disallow", "log") if level in guarded), None)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        leaf = _compat.movable(leaf, target)
    if level is None:
        return jax.device_put(leaf, target)
    with jax.transfer_guard(f"{level}_explicit"):
        return jax.device_put(leaf, target)


class Twins:
    """Remembers where an array was moved, as long as the array lives.

    So an array that is passed in every call, say the parameters committed to one device, is moved
    once.
    """

    def __init__(self):
        self._moved: dict[tuple[int, NamedSharding], tuple[weakref.ref, jax.Array]] = {}

    def put(self, leaf: Any, target: NamedSharding, *, donated: bool) -> tuple[Any, bool]:
        """The leaf where a program wants it, and whether its user has put it elsewhere.

        Such an array is moved once, and remembered, unless it is donated.
        """
        is_placed = isinstance(leaf, jax.Array) and leaf.committed
        own: Any = leaf.sharding if is_placed else None
        is_alike = is_placed and own.is_equivalent_to(target, leaf.ndim)
        # The mesh is part of an array's type; one placed alike, but on a mesh with other names,
        # makes jit trace and compile again when the result comes back as argument.
        if is_alike and isinstance(own, NamedSharding) and own.mesh == target.mesh:
            return leaf, False
        if donated or not is_placed or is_alike or leaf.is_deleted():  # which JAX refuses
            return put_as_jit_would(leaf, target), is_placed and not is_alike
        key = (id(leaf), target)
        known = self._moved.get(key)
        if known is not None and known[0]() is leaf and not known[1].is_deleted():
            return known[1], True
        moved = put_as_jit_would(leaf, target)
        if not isinstance(moved, Tracer):
            forget = weakref.ref(leaf, lambda _: self._moved.pop(key, None))
            self._moved[key] = (forget, moved)
        return moved, True


def own(tree: Any, where: Sharding) -> Any:
    """The tree with copies of arrays of which `device_put` to `where` would share the memory.

    It does so with buffers on the same devices, and on CPU with NumPy; `may_alias=False` does not
    keep it from that where there are several devices (0.7.2 to 0.12.0.1).
    """
    devices = where.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)
    copies: dict[int, Any] = {}  # by identity: what stands twice is copied once

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.array(leaf, subok=True) if on_cpu else leaf
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        if leaf.sharding.device_set.isdisjoint(devices):
            return leaf
        with _no_mesh():
            return with_data(leaf, jnp.copy) if is_key(leaf) else jnp.copy(leaf)

    def copy_once(leaf: Any) -> Any:
        if id(leaf) not in copies:
            copies[id(leaf)] = copy(leaf)
        return copies[id(leaf)]

    return tree if is_staged() else jax.tree.map(copy_once, tree)


def _no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Steps out of a mesh that the user has set, on whose devices a program would have to run."""
    is_free = meshes.mesh_of_user() is None or is_staged()
    return contextlib.nullcontext() if is_free else meshes.no_mesh()


def _mesh_of(where: Mesh | Sequence[Device] | None) -> Mesh:
    if isinstance(where, Mesh):
        return where
    devices = jax.local_devices() if where is None else list(where)
    return _compat.auto_mesh(np.array(devices), (_DEVICE_AXIS,))


def _from_this_process(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        return with_data(x, lambda data: _from_this_process(data, sharding))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _over(devices: tuple[Device, ...]) -> NamedSharding:
    return NamedSharding(_mesh_of(devices), P(_DEVICE_AXIS))


def _stack(slices: Sequence[Any], devices: tuple[Device, ...]) -> jax.Array:
    """`N` times `[*s] -> [N, *s]`, each on its device."""
    if is_key(slices[0]):
        data = [jax.random.key_data(x) for x in slices]
        return with_data(slices[0], lambda _: _stack(data, devices))
    sharding = _over(devices)
    with _no_mesh():
        if all(map(_is_weak, slices)):  # only programs make weak types
            everywhere = NamedSharding(sharding.mesh, P())
            return _stacks(sharding)(*jax.device_put(list(slices), everywhere))
        # One row `[1, *s]` for all copies of the same array, without a copy on the host.
        row_of = {
            id(x): (np if isinstance(x, np.ndarray) else jnp).expand_dims(x, 0) for x in slices
        }
    rows = jax.device_put([row_of[id(x)] for x in slices], list(devices))
    shape = (len(devices), *jnp.shape(slices[0]))
    return jax.make_array_from_single_device_arrays(shape, sharding, rows)


@functools.lru_cache(maxsize=64)
def _stacks(sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *rows: jnp.stack(rows), out_shardings=sharding)


def _is_weak(x: Any) -> bool:
    if isinstance(x, jax.Array):
        return x.weak_type
    return isinstance(x, int | float | complex) and not isinstance(x, bool | np.generic)


def _first_block(leaf: Any, path: str) -> Any:
    """`[N, *s] -> [1, *s]`, or `[n, *s]` where one device holds more than one slice."""
    shape = jnp.shape(leaf)
    why_not = None if shape and shape[0] else f"has shape {shape}"
    if why_not is None:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        block = leaf.addressable_data(0)  # in the order of the mesh: the first slices
        if block.shape[1:] == leaf.shape[1:]:
            return block
        if leaf.is_fully_addressable:
            return jax.device_put(leaf[:1], next(iter(block.devices())))
        why_not = "is cut along another dimension, over processes"
    raise refusal(
        PlacementError,
        what="unreplicate got a value that has no leading axis of devices",
        which=[f"{path} {why_not}"],
        why="it takes the first slice along the leading axis of each array",
        do="Pass what pmap or device_put_replicated returned.",
    )


@jax.jit
def _first_rows(blocks: dict[int, Any]) -> dict[int, Any]:
    return {index: block[0] for index, block in blocks.items()}


def is_key(x: Any) -> bool:
    """Whether `x` is an array made by `jax.random.key`; raw keys of `PRNGKey` are plain numbers."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def with_data(keys: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The keys with `change` made to their data. They are not consumed."""
    data = change(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
