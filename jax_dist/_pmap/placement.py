"""Placement of arrays for mapped functions.

Shapes: `N` devices; `*s` is what one device holds. The buffers of an array of typed random keys are
those of the data inside: `[*s]` as `[*s, n]`.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._compat import Device
from jax_dist._fast_path import is_staged
from jax_dist._passes.captures import Lifted
from jax_dist._passes.constants import is_key
from jax_dist._pmap import meshes
from jax_dist._pmap.call import type_of
from jax_dist.errors import ArgumentError

_DEVICE_AXIS = "devices"  # the axis name of the meshes made here


def replicate(tree: Any, where: Mesh | Sequence[Device] | None = None) -> Any:
    """Put a copy of every array on each device.

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
    devices = jax.local_devices() if where is None else where
    mesh = devices if isinstance(devices, Mesh) else _sharding_over(devices).mesh
    sharding = NamedSharding(mesh, P())
    check_runs(sharding.device_set, "replicate")
    return jax.device_put(copy_if_aliased(tree, sharding), sharding)


def shard(tree: Any, mesh: Mesh | None = None, spec: P | Any = None) -> Any:
    """Shard arrays over a mesh; without one, split a batch over the devices of this process.

    Args:
      tree: arrays, NumPy or jax. With several processes, NumPy arrays are process-local, and the
        result is the global array.
      mesh: the mesh. Without it, the leading dimension is split over the devices of this process,
        `[N * b, *s] -> [N, b, *s]`, as `flax.jax_utils` and `common_utils.shard` do: the result is
        an argument of `pmap`.
      spec: how each array is sharded; one for all, or a tree of specs that is a prefix of `tree`.
        By default, the first dimension over all axes of the mesh.

    Returns:
      The tree with jax arrays on the mesh.

    Raises:
      ArgumentError: the leading dimension is no multiple of the number of devices.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()), ("i",))
    >>> len(shard(np.zeros((jax.device_count(), 2)), mesh, P("i")).addressable_shards)
    8
    >>> shard(np.zeros((16, 2))).shape
    (8, 2, 2)
    """
    if mesh is None:
        return _split_over_local_devices(tree)
    check_runs(mesh.devices.flat, "shard")
    spec = P(tuple(mesh.axis_names)) if spec is None else spec

    def put(part: P, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, part)
        subtree = copy_if_aliased(subtree, sharding)
        if sharding.is_fully_addressable:
            return jax.device_put(subtree, sharding)
        return jax.tree.map(lambda x: _make_global(x, sharding), subtree)

    return jax.tree.map(put, spec, tree, is_leaf=lambda node: isinstance(node, P))


def _split_over_local_devices(tree: Any) -> Any:
    """Split each array over the devices of this process, `[N * b, *s] -> [N, b, *s]`."""
    devices = tuple(jax.local_devices())
    sharding = _sharding_over(devices)

    def split(path: Any, x: Any) -> Any:
        shape = jnp.shape(x)
        if not shape or shape[0] % len(devices):
            raise ArgumentError(
                f"shard got tree{jax.tree_util.keystr(path)} of shape {shape}; the leading "
                f"dimension must be a multiple of the {len(devices)} devices of this process."
            )
        rows = x.reshape((len(devices), shape[0] // len(devices), *shape[1:]))
        return jax.device_put(copy_if_aliased(rows, sharding), sharding)

    return jax.tree.map_with_path(split, tree)


def unreplicate(tree: Any) -> Any:
    """Return the first slice of each array along its leading axis, without communication.

    `x[0]` of a pmapped result runs a program on all devices that sends the slice to each of them.
    This reads the shard that the first device of this process already holds. Only if another
    dimension is sharded, by `out_axes` or by a nested pmap, it fetches parts from other devices.

    Args:
      tree: arrays `[N, *s]`, as `pmap` or `device_put_replicated` return them.

    Returns:
      The tree with arrays `[*s]`, each on one device.

    Raises:
      ArgumentError: an array has no leading axis.

    >>> import jax
    >>> unreplicate(device_put_replicated(np.float32(3), jax.devices()))
    Array(3., dtype=float32)
    """
    with meshes.no_mesh():
        return jax.tree.map_with_path(_first_slice, tree)


def _first_slice(path: Any, leaf: Any) -> Any:
    """Return `leaf[0]`, of the first device's shard if that has all of it; `path` is for errors."""
    shape = jnp.shape(leaf)
    if not shape or not shape[0]:
        raise ArgumentError(
            "unreplicate takes the first slice along the leading axis of each array, but "
            f"tree{jax.tree_util.keystr(path)} has shape {shape}."
        )
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return jnp.asarray(leaf[0])
    block = leaf.addressable_data(0)  # shards are in the order of the mesh, so it has slice 0
    if block.shape[1:] == shape[1:]:  # no other dimension is sharded
        return block[0]
    return jax.device_put(leaf[0], next(iter(block.devices())))


def device_put_replicated(tree: Any, devices: Sequence[Device]) -> Any:
    """Stack one copy for each device, as `jax.device_put_replicated` did until jax 0.10.

    Args:
      tree: arrays `[*s]`, NumPy or jax, numbers, or random keys.
      devices: the devices of this process, one slice each.

    Returns:
      The tree with arrays `[N, *s]`, slice n on `devices[n]`. The host holds no N-fold copy: each
      device gets its copy from the one array.

    Raises:
      ArgumentError: there are no devices, or some belong to other processes.

    >>> import jax
    >>> device_put_replicated(1.0, jax.devices()).shape == (jax.device_count(),)
    True
    """
    devices = _check_local(devices, "device_put_replicated")
    return device_put_sharded([tree] * len(devices), devices)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Stack one shard for each device, as `jax.device_put_sharded` did until jax 0.10.

    Args:
      shards: a tree of arrays `[*s]` for each device, all of one structure.
      devices: the devices of this process.

    Returns:
      The tree with arrays `[N, *s]`, slice n on `devices[n]`.

    Raises:
      ValueError: there are not as many shards as devices, or they differ in structure, shape or
        dtype.

    >>> import jax
    >>> device_put_sharded([np.float32(1), np.float32(2)], jax.devices()[:2])
    Array([1., 2.], dtype=float32)
    """
    shards, devices = list(shards), _check_local(devices, "device_put_sharded")
    if len(shards) != len(devices):
        raise ArgumentError(
            f"device_put_sharded got {len(shards)} shards for {len(devices)} devices; each device "
            "gets one."
        )

    def stack(path: Any, *leaves: Any) -> jax.Array:
        types = [f"{kind.dtype}{list(kind.shape)}" for kind in map(jax.typeof, leaves)]
        if len(set(types)) > 1:
            raise ArgumentError(
                f"device_put_sharded got shards{jax.tree_util.keystr(path)} that differ in shape "
                f"or dtype: {', '.join(types)}."
            )
        return _stack(leaves, devices)

    return jax.tree.map_with_path(stack, *copy_if_aliased(shards, _sharding_over(devices)))


def _check_local(devices: Iterable[Device], name: str) -> tuple[Device, ...]:
    """Return the devices as a tuple; raise ArgumentError if `name` got those of other processes."""
    devices = tuple(devices)
    check_runs(devices, name)
    if not devices:
        raise ArgumentError(f"{name} got no devices.")
    if any(device.process_index != jax.process_index() for device in devices):
        raise ArgumentError(
            f"{name} got devices of other processes. Pass jax.local_devices(), or use "
            "jax_dist.replicate(tree, devices) for one value on all devices."
        )
    return devices


def check_runs(devices: Iterable[Device], what: str) -> None:
    """Raise NotImplementedError if a device only compiles; `what` was to run on it."""
    for device in devices:
        if _compat.is_compile_only(device):
            raise NotImplementedError(
                f"{what} cannot run on {device}, a device of a topology: it only compiles. Use "
                ".lower(...).compile(), with jax.ShapeDtypeStruct for arrays."
            )


def can_be_put(leaf: Any) -> bool:
    """Return whether `device_put` accepts an argument; others are left to jit, which may raise."""
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable
    return isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex)


def put_as_jit_would(leaf: Any, target: Sharding) -> Any:
    """Place an argument of a program by `jax.device_put`, guarded as jit's transfers are.

    `jax.transfer_guard("disallow")` forbids implicit transfers, as jit makes them, but permits
    device_put, which is explicit. So where implicit ones are forbidden or logged, this one is, too.
    """
    kinds = ("host_to_device", "device_to_device")
    levels = {_compat.config_value(f"jax_transfer_guard_{kind}") for kind in kinds}
    for level in ("disallow", "log"):
        if level in levels:
            with jax.transfer_guard(f"{level}_explicit"):
                return jax.device_put(leaf, target)
    return jax.device_put(leaf, target)


class PlacementCache:
    """The copies of misplaced arguments, kept as long as the originals, so that each moves once."""

    def __init__(self):
        # By the original's id and the target: a reference to the original, and the copy.
        self._moved: dict[tuple[int, NamedSharding], tuple[weakref.ref, jax.Array]] = {}

    def put(self, leaf: Any, target: NamedSharding, *, donated: bool) -> tuple[Any, bool]:
        """Return an argument with the sharding `target`, and whether it was misplaced.

        Misplaced is an array that is committed to a sharding which is not equivalent. Its copy is
        remembered for the next call with the same array; not if it is donated, and so used once.
        """
        if not (isinstance(leaf, jax.Array) and leaf.committed):
            return put_as_jit_would(leaf, target), False
        sharding: Any = leaf.sharding
        if sharding.is_equivalent_to(target, leaf.ndim):
            # The mesh is part of an array's type. An equivalent sharding over a mesh with other
            # names would make jit trace and compile again when the result comes back as argument.
            is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == target.mesh
            return leaf if is_on_mesh else put_as_jit_would(leaf, target), False
        if donated or leaf.is_deleted():  # JAX raises for a deleted one
            return put_as_jit_would(leaf, target), True
        key = (id(leaf), target)
        if key in self._moved:
            original, copy = self._moved[key]
            if original() is leaf and not copy.is_deleted():
                return copy, True
        copy = put_as_jit_would(leaf, target)
        self._moved[key] = (weakref.ref(leaf, lambda _: self._moved.pop(key, None)), copy)
        return copy, True


class CaptureCopies:
    """The copies of captured arrays on devices, which the programs of one function share."""

    def __init__(self):
        self._copies = weakref.WeakKeyDictionary[Lifted, dict[Hashable, tuple[Any, ...]]]()

    def get(self, lifted: Lifted, where: Hashable, place: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return the captured arrays on devices, with `where` for a key; `place` puts one there."""
        copies = self._copies.setdefault(lifted, {})
        if where not in copies:
            copies[where] = tuple(map(place, lifted.values))
        return copies[where]


def put_copy(value: Any, where: Sharding | None) -> Any:
    """Return a copy with the sharding `where`, in buffers that no owner can donate or delete.

    `where` is None for the default device. A global array of several processes is resharded. A
    value of this process alone goes to its own devices of `where`, and each process may have
    another one, as with constants of a program. On devices that only compile, the type is returned.
    """
    kind = jax.typeof(value)
    if where is not None and any(map(_compat.is_compile_only, where.device_set)):
        return type_of(kind, sharding=where)
    if is_key(value):  # JAX sends no keys to other processes
        return with_data(value, lambda data: put_copy(data, where))
    is_jax = isinstance(value, jax.Array)
    is_global = is_jax and not value.is_fully_addressable
    if where is not None and not (where.is_fully_addressable or is_global):
        # `device_put` would first compare the values of all processes, and wait for them.
        host = np.array(value, kind.dtype)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])
    if is_jax:  # copied where it is, for device_put to other devices may share buffers
        current = value.sharding if value.committed else None
        value = jax.device_put(value, current, may_alias=False)
    return jax.device_put(value, where)


def copy_if_aliased(tree: Any, where: Sharding) -> Any:
    """Copy the arrays whose memory `jax.device_put(tree, where)` would share; return the tree.

    device_put shares buffers that are on one of the devices, and NumPy's if that is a CPU. With
    several devices, `may_alias=False` does not prevent it (jax 0.10.2 and 0.12.0.1).
    """
    if is_staged():
        return tree
    devices = where.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.array(leaf, subok=True) if on_cpu else leaf
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if not is_placed or leaf.sharding.device_set.isdisjoint(devices):
            return leaf
        with meshes.no_mesh():
            return with_data(leaf, jnp.copy) if is_key(leaf) else jnp.copy(leaf)

    leaves, structure = jax.tree.flatten(tree)
    distinct = {id(leaf): leaf for leaf in leaves}  # an array that occurs twice is copied once
    copies = {key: copy(leaf) for key, leaf in distinct.items()}
    return jax.tree.unflatten(structure, [copies[id(leaf)] for leaf in leaves])


def _make_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return a process-local array as the global one that `sharding` describes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        return with_data(x, lambda data: _make_global(data, sharding))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _sharding_over(devices: Sequence[Device]) -> NamedSharding:
    """Return the sharding of an array `[N, *s]` with one slice on each device."""
    mesh = _compat.auto_mesh(np.array(devices), (_DEVICE_AXIS,))
    return NamedSharding(mesh, P(_DEVICE_AXIS))


def _stack(slices: Sequence[Any], devices: tuple[Device, ...]) -> jax.Array:
    """Return slices `[*s]`, one for each of N devices, as one array `[N, *s]` over the devices."""
    sharding, shape = _sharding_over(devices), (len(devices), *jnp.shape(slices[0]))
    with meshes.no_mesh():  # one row `[1, *s]` for an array that occurs N times
        expand = lambda x: (np if isinstance(x, np.ndarray) else jnp).expand_dims(x, 0)
        row_of = {id(x): expand(x) for x in slices}
    rows = jax.device_put([row_of[id(x)] for x in slices], list(devices))
    stacked = jax.make_array_from_single_device_arrays(shape, sharding, rows)
    if not all(jax.typeof(x).weak_type for x in slices):
        return stacked
    return _compat.rewrap(stacked, ShapedArray(shape, stacked.dtype, weak_type=True), sharding)


def with_data(keys: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return random keys whose data are `change` of the data of these."""
    data = change(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
