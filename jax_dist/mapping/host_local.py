"""Concrete arrays of several processes: `[L, *s]` of one process as `[P * L, *s]` of all, and back.

The buffers stay what they are; only the shape and the sharding that they are seen under change.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.keys import is_key, with_data
from jax_dist.mapping.meshes import Layout

_MANY = 4096  # avals to remember: more means that they are not the same ones again


class _Known(NamedTuple):
    """An aval seen before, kept alive so that its id stays its own."""

    aval: Any
    sharding: Sharding
    other_aval: Any
    other_sharding: NamedSharding


class _Way(NamedTuple):
    """How a NumPy array of this process becomes part of a whole one."""

    aval: Any  # of the whole
    sharding: NamedSharding  # the same object each time: jit finds its program faster
    indices: list[Any]  # of the slice for each device
    devices: list[Any]  # of this process


class Misfit(Exception):
    """An array has neither the slices of this process nor those of all."""


class LocalView:
    """Goes between the arrays of this process and those of all, for one layout.

    A training loop sees the same few avals again and again, as the very same objects; they are
    looked up by identity, which is what makes a call with 100 leaves fast. NumPy arrays are looked
    up by shape and dtype.
    """

    def __init__(self, layout: Layout, *, accepts_whole: bool):
        """`accepts_whole`: whether this process may also hold an array of all slices."""
        self.layout = layout
        self._accepts_whole = accepts_whole
        self._entering: dict[tuple[int, Axis], _Known] = {}
        self._leaving: dict[int, _Known] = {}
        self._from_numpy: dict[tuple, _Way] = {}  # by shape, dtype and axis

    def enter(self, leaf: Any, axis: Axis) -> Any:
        """`[L, *s] -> [P * L, *s]` (for axis 0). What is global already comes back as it is.

        Args:
          leaf: an array of this process, or anything that `device_put` takes.
          axis: its mapped dimension; None: the same on all processes.

        Raises:
          Misfit: it has neither the slices of this process nor those of all.
        """
        if type(leaf) is np.ndarray:
            way = self._from_numpy.get((leaf.shape, leaf.dtype, axis))
            if way is None:
                return self._enter(leaf, axis)
            slices = [leaf[index] for index in way.indices]
            return _compat.put_slices(way.aval, way.sharding, slices, way.devices)
        known = self._entering.get((id(getattr(leaf, "aval", None)), axis))
        if known is not None and known.sharding is leaf.sharding:
            return _compat.rewrap(leaf, known.other_aval, known.other_sharding)
        return self._enter(leaf, axis)

    def leave(self, whole: Any) -> Any:
        """`[P * L, *s] -> [L, *s]` (for axis 0); what is not cut over processes keeps its shape."""
        known = self._leaving.get(id(whole.aval))
        if known is not None and known.sharding is whole.sharding:
            return _compat.rewrap(whole, known.other_aval, known.other_sharding)
        return self._leave(whole)

    def sharding(self, ndim: int, axis: Axis) -> NamedSharding:
        """Of the whole array."""
        return self.layout.sharding(axis, ndim)

    def whole_shape(self, shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
        """Of the whole array. Raises Misfit as `enter` does."""
        if axis is None or self._holds_all(shape, axis):
            return shape
        return _resized(shape, axis, self.layout.size)

    def _holds_all(self, shape: tuple[int, ...], axis: int) -> bool:
        """Whether this process has the slices of all, and not its own only."""
        if shape[axis] == self.layout.local_size:
            return False
        if not self._accepts_whole or shape[axis] != self.layout.size:
            raise Misfit
        return True

    def _enter(self, leaf: Any, axis: Axis) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # a zero tangent; jax.pmap: False
            leaf = np.zeros(leaf.shape, bool)
        if is_key(leaf):
            from_left = None if axis is None else axis % leaf.ndim
            return with_data(leaf, lambda data: self._enter(data, from_left))
        whole = self.sharding(jnp.ndim(leaf), axis)
        if axis is not None and self._holds_all(jnp.shape(leaf), axis):
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, whole, lambda index: host[index])
        own = NamedSharding(self.layout.local_mesh, whole.spec)
        placed = leaf
        if not (
            isinstance(leaf, jax.Array)
            and leaf.committed
            and leaf.sharding.is_equivalent_to(own, leaf.ndim)
        ):
            placed = jax.device_put(leaf, own)
        shape = placed.shape
        if axis is not None:
            shape = _resized(shape, axis, self.layout.size)
        aval = _aval(shape, placed)
        if placed is leaf:
            _remember(
                self._entering, (id(leaf.aval), axis), _Known(leaf.aval, leaf.sharding, aval, whole)
            )
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype:
            indices = own.devices_indices_map(leaf.shape)
            devices = list(self.layout.local_mesh.devices.flat)
            way = _Way(aval, whole, [indices[device] for device in devices], devices)
            _remember(self._from_numpy, (leaf.shape, leaf.dtype, axis), way)
        return _compat.rewrap(placed, aval, whole)

    def _leave(self, whole: Any) -> Any:
        if is_key(whole):
            return with_data(whole, self._leave)
        if whole.is_fully_addressable:
            return whole
        axis = _axis_of(whole.sharding.spec, self.layout.name)
        own = NamedSharding(self.layout.local_mesh, whole.sharding.spec)
        shape = whole.shape
        if axis is not None:
            shape = _resized(shape, axis, shape[axis] // self.layout.processes)
        aval = _aval(shape, whole)
        _remember(self._leaving, id(whole.aval), _Known(whole.aval, whole.sharding, aval, own))
        return _compat.rewrap(whole, aval, own)


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def _axis_of(spec: P, name: str) -> Axis:
    """The dimension that lies over mesh axis `name`."""
    for dimension, entry in enumerate(spec):
        if name in (entry if isinstance(entry, tuple) else (entry,)):
            return dimension
    return None


def _aval(shape: tuple[int, ...], array: jax.Array) -> Any:
    return ShapedArray(shape, array.dtype, weak_type=is_weak(array))


def is_weak(leaf: Any) -> bool:
    """Whether an argument of several processes has a weak type, as far as jax.pmap keeps it."""
    return _compat.PROCESSES_KEEP_WEAK_TYPES and jax.typeof(leaf).weak_type


def _remember(known: dict, key: Any, value: _Known | _Way) -> None:
    if len(known) >= _MANY:
        known.clear()
    known[key] = value
