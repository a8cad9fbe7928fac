"""Maximum and minimum over devices that keep NaN and have the gradient of reduce_max.

`lax.pmax` drops a NaN on CPU and cannot be differentiated. Here floats are compared as integers of
the same order, in which a NaN (made positive for a maximum, negative for a minimum) wins.

Shapes: `x` is this device's block, `[*s]`; `[*r]` is what is left of `s` without the reduced
dimensions.
"""

import functools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_Kind: TypeAlias = Literal["max", "min"]
_Names: TypeAlias = tuple[Any, ...]

_ORDERED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by the bytes of a float


def has_extremes(dtype: Any) -> bool:
    """Return whether `extreme` takes values of a type: no complex numbers, no floats of 8 bits."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return True
    return dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def extreme(kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names) -> jax.Array:
    """Return the largest or the smallest over dimensions and devices, `[*s] -> [*r]`.

    Args:
      kind: "max" or "min".
      x: this device's block, of a type that `has_extremes`.
      axes: the dimensions of the block to reduce.
      names: the mesh axes to reduce over.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme_float(kind, axes, names, x)
    numbers = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    return _over_devices(kind, numbers, axes, names).astype(x.dtype)


def _over_devices(kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names) -> jax.Array:
    local, over = (lax.reduce_max, lax.pmax) if kind == "max" else (lax.reduce_min, lax.pmin)
    return over(local(x, axes), names)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extreme_float(kind: _Kind, axes: tuple[int, ...], names: _Names, x: jax.Array) -> jax.Array:
    local = lax.reduce_max(x, axes) if kind == "max" else lax.reduce_min(x, axes)
    nan = jnp.array(np.nan if kind == "max" else np.copysign(np.nan, -1), x.dtype)
    local = jnp.where(jnp.isnan(local), nan, local)
    ordered = _flip(lax.bitcast_convert_type(local, _ORDERED[x.dtype.itemsize]))
    value = _flip(_over_devices(kind, ordered, (), names))
    return lax.bitcast_convert_type(value, x.dtype)


@_extreme_float.defjvp
def _extreme_float_jvp(
    kind: _Kind, axes: tuple[int, ...], names: _Names, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Share the gradient among all elements that reach the extreme, on whichever device."""
    (x,), (dx,) = primals, tangents
    value = _extreme_float(kind, axes, names, x)
    reached = lax.eq(x, jnp.broadcast_to(lax.expand_dims(value, axes), x.shape)).astype(x.dtype)
    total = lambda terms: lax.psum(lax.reduce_sum(terms, axes), names)
    return value, total(dx * reached) / total(reached)


def _flip(bits: jax.Array) -> jax.Array:
    """Invert the lower bits of negative floats, which count downwards; its own inverse."""
    lower = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
    return jnp.where(bits < 0, bits ^ lower, bits)
