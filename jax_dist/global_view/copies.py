"""One value on the devices of a mesh, whole or in parts, and several: one for each device.

Shapes: `N` devices along the mapped axis, `L` of them of this process; `*s` is what one device has.
`by_device` is a sharding of `[N, *s]`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap.body import type_of
from jax_dist._pmap.placement import copy_if_aliased, is_key, with_data
from jax_dist._rewrite.interpreter import names_of
from jax_dist.errors import ArgumentError


def count(by_device: NamedSharding) -> int:
    """N."""
    return math.prod(by_device.mesh.shape[name] for name in names_of(by_device.spec[0]))


def local_count(by_device: NamedSharding) -> int:
    """L."""
    mesh: Any = by_device.mesh
    if _compat.is_compile_only(mesh.devices.flat[0]):  # of as many processes as it may be
        return count(by_device)
    return math.prod(mesh.local_mesh.shape[name] for name in names_of(by_device.spec[0]))


def put_whole(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which each process has the whole.

    It is one of its own: the step may take over its memory, and the caller keeps theirs.
    """
    if is_key(leaf):
        return with_data(leaf, lambda data: put_whole(data, sharding))
    leaf = copy_if_aliased(leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _compiled(_same, sharding)(leaf)
    if not isinstance(leaf, jax.Array) or not sharding.is_fully_addressable:
        host = np.asarray(leaf, dtype=type_of(leaf).dtype)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return jax.device_put(leaf, sharding)


def put_slices(leaf: Any, by_device: NamedSharding) -> jax.Array:
    """`[N, *s]`, or the `[L, *s]` of this process, with a slice on each device."""
    if is_key(leaf):
        return with_data(leaf, lambda data: put_slices(data, by_device))
    is_local = by_device.is_fully_addressable
    if isinstance(leaf, jax.Array) and (is_local or not leaf.is_fully_addressable):
        return put_whole(leaf, by_device)
    host = copy_if_aliased(np.asarray(leaf), by_device)
    if is_local:
        return jax.device_put(host, by_device)
    shape = (count(by_device), *host.shape[1:])
    return jax.make_array_from_process_local_data(by_device, host, shape)


def for_each_device(value: Any, by_device: NamedSharding) -> Any:
    """`[*s] -> [N, *s]`: each device its own copy."""
    is_here = isinstance(value, Tracer) or not isinstance(value, jax.Array)
    if not is_here and value.sharding.device_set != by_device.device_set:
        value = put_whole(value, NamedSharding(by_device.mesh, P()))
    return _stack(by_device)(value)


def one_of_equals(stacked: jax.Array, sharding: NamedSharding, path: str) -> jax.Array:
    """`[N, *s] -> [*s]`, where all slices are equal. Raises ArgumentError where they are not."""
    if not all_equal(stacked):
        raise ArgumentError(
            f"{path} is replicated by the step, but other devices have other bits than the first;"
            " to continue with the first device's, pass jax_dist.unreplicate(state)"
        )
    return _compiled(_first, sharding)(stacked)


def all_equal(stacked: jax.Array) -> bool:
    """Whether all slices have the same bits; compared on the devices."""
    data = jax.random.key_data(stacked) if is_key(stacked) else stacked
    sharding: Any = data.sharding
    return bool(_compiled(_is_one, NamedSharding(sharding.mesh, P()))(data))


@functools.lru_cache(maxsize=1024)
def _compiled(fun: Callable, sharding: NamedSharding) -> Any:
    return jax.jit(fun, out_shardings=sharding)


def _same(value: jax.Array) -> jax.Array:
    return value


def _first(stacked: jax.Array) -> jax.Array:
    return stacked[0]


def _is_one(stacked: jax.Array) -> jax.Array:
    bits = _bits(stacked)
    return jnp.all(bits == bits[:1])


@functools.lru_cache(maxsize=256)
def _stack(by_device: NamedSharding) -> Any:
    size = count(by_device)
    repeated = lambda value: jnp.broadcast_to(value, (size, *value.shape))
    return jax.jit(repeated, out_shardings=by_device)


def _bits(array: jax.Array) -> jax.Array:
    """The same bits as integers, so that NaN equals NaN, and -0 is not 0."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_bits(array.real), _bits(array.imag)], -1)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    width = array.dtype.itemsize * 8
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
