"""Per-primitive rules for equations with gathered operands.

A gathered value is not built: each device keeps its block, and a `Deferred` says along which
dimension an all_gather would concatenate the blocks. Elementwise functions, and what moves, adds or
drops other dimensions, run on the block. What reduces the gathered dimension runs on the block and
then over devices. A whole operand (not gathered, replicated) is sliced to each device's block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._passes.interpreter import Values, record_of, replay


class NeedsWhole(Exception):
    """An equation needs the gathered value whole; the text is the reason, for a report."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deferred:
    """An all_gather that has not happened: the blocks of all devices along one dimension."""

    block: Any  # the atom of this device's block
    dim: int  # the gathered dimension, along which the blocks would be concatenated
    axes: tuple[Any, ...]  # of the mesh, the first is the most major
    size: int  # number of blocks
    sites: tuple[Any, ...]  # the gathers that it comes from, which may have to be kept
    made_by: JaxprEqn  # the equation in the user's program, whose line a report names

    def block_type(self, whole: Any, dim: int) -> Any:
        """Return the type of a block of a value of type `whole`, gathered along `dim`."""
        shape = list(whole.shape)
        shape[dim] //= self.size
        return whole.update(shape=tuple(shape))

    def keep(self, why: str, forced_by: JaxprEqn) -> None:
        """Keep the gathers behind the value, because `forced_by` needs it whole."""
        for site in self.sites:
            site.keep(why, forced_by)

    def take_block(self, value: Any, dim: int) -> Any:
        """Return this device's block of a whole value."""
        length = value.shape[dim] // self.size
        start = lax.axis_index(self.axes) * length
        return lax.dynamic_slice_in_dim(value, start, length, dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Blockwise:
    """Result of a rule: the equation runs on blocks; its results stay deferred along `dim`."""

    dim: int
    # The parameters that hold sizes of the whole value, with those of a block.
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """Result of a rule: reduce on the block, and then over devices; the result is whole."""

    collective: str  # "psum", for the report
    compute: Callable[[JaxprEqn, Values], Any]  # the equation on blocks, to its single result


Operand: TypeAlias = Deferred | None  # None: whole
Result: TypeAlias = Blockwise | Reduction


def apply_rule(eqn: JaxprEqn, operands: Sequence[Operand]) -> Result:
    """Return what an equation becomes on blocks; `operands` has None for one that is whole.

    Of g, `[8, 3]` gathered along 0, `sin g` becomes `Blockwise(dim=0)`: each device computes the
    sine of its block, `[1, 3]`. `reduce_sum[axes=(0,)] g` becomes a `Reduction` by psum.

    Raises:
      NeedsWhole: there is no sound rule, so the gathers behind the operands have to be kept.
    """
    name, record = _compat.name_of(eqn), record_of(eqn)
    gathered = [operand for operand in operands if operand is not None]
    first = gathered[0]
    # A dot_general names the dimensions that it pairs; all else pairs those of equal index.
    have_same_dim = name == "dot_general" or len({value.dim for value in gathered}) == 1
    if not have_same_dim or len({value.axes for value in gathered}) > 1:
        raise NeedsWhole(f"{name} mixes values that are gathered in different ways")
    result = None
    if name == "dot_general":
        result = _dot(eqn, operands)
    elif record.elementwise:
        result = Blockwise(first.dim)
    elif record.reduces or name in ("argmax", "argmin"):
        result = _reduce(eqn, first)
    elif name in _RULES:
        result = _RULES[name](eqn, first)
    if result is None:
        raise NeedsWhole(f"{name} needs the whole gathered value")
    return result


# --- equations that leave the value gathered


def _broadcast(eqn: JaxprEqn, gathered: Deferred) -> Result:
    """Broadcast each block: `[8] -> [5, 8]`, gathered along 0, gives `[5, 1]`, gathered along 1."""
    dim = int(eqn.params["broadcast_dimensions"][gathered.dim])
    shape = gathered.block_type(eqn.outvars[0].aval, dim).shape
    return Blockwise(dim, {"shape": shape, "sharding": None})


def _reshape(eqn: JaxprEqn, gathered: Deferred) -> Result | None:
    """Reshape each block, if the blocks of the result are contiguous along one dimension, too.

    With 8 blocks along 0, `[8, 2, 3] -> [16, 3]` reshapes each block `[1, 2, 3]` to `[2, 3]`. None
    for `[2, 8, 3] -> [16, 3]` with 8 blocks along 1: rows 0 and 8 would be of one block.
    """
    new_sizes = eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:  # it transposes first
        return None
    # Elements before the gathered dimension, which must fill whole dimensions of the result.
    count_before = math.prod(_shape(eqn.invars[0])[: gathered.dim])
    for dim, length in enumerate(new_sizes):
        if math.prod(new_sizes[:dim]) == count_before and length % gathered.size == 0:
            shape = gathered.block_type(eqn.outvars[0].aval, dim).shape
            return Blockwise(dim, {"new_sizes": shape, "sharding": None})
    return None


_RULES: dict[str, Callable[[JaxprEqn, Deferred], Result | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, first: Blockwise(list(eqn.params["permutation"]).index(first.dim)),
    # The gathered dimension is longer than 1, so it stays.
    "squeeze": lambda eqn, first: Blockwise(_index_without(first.dim, eqn.params["dimensions"])),
    "reshape": _reshape,
    "pvary": lambda _, first: Blockwise(first.dim),
}


# --- reductions of the gathered dimension


def _reduce(eqn: JaxprEqn, gathered: Deferred) -> Result | None:
    """Reduce each block; and then over devices, if the gathered dimension is reduced.

    Of `[8, 3]` gathered along 0, a sum over dimension 1 is `[8]`, gathered along 0; a sum over 0 is
    the sum of each block, and a psum of these. None if no collective gives the same result: for a
    product, a sum whose bits depend much on its order, a maximum of a type without an order.
    """
    dims, name = [int(axis) for axis in eqn.params["axes"]], _compat.name_of(eqn)
    if gathered.dim not in dims:
        return Blockwise(_index_without(gathered.dim, dims))
    aval: Any = eqn.outvars[0].aval
    if name == "reduce_sum" and not is_low_precision(aval.dtype):
        return Reduction("psum", lambda eqn, xs: lax.psum(replay(eqn, xs)[0], gathered.axes))
    has_order = any(jnp.issubdtype(aval.dtype, kind) for kind in _TYPES)
    if name not in ("reduce_max", "reduce_min") or not has_order:
        return None
    # One function for both, with a gradient of its own: elements that tie on different devices
    # share it, as they do in reduce_max of the whole value.
    kind = name.removeprefix("reduce_")
    return Reduction(f"p{kind}", lambda _, xs: extreme(kind, xs[0], tuple(dims), gathered.axes))


def _index_without(dim: int, removed: Sequence[int]) -> int:
    """Return the index of a dimension once others are removed: 2 without 0 and 3 is 1."""
    return dim - sum(other < dim for other in removed)


def is_low_precision(dtype: Any) -> bool:
    """Return whether sums in this type depend much on the order of their terms."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


# --- products


def _dot(eqn: JaxprEqn, operands: Sequence[Operand]) -> Result | None:
    """Return the rule for a product: each device multiplies its blocks, and a psum adds these up.

    Of `[8] @ [8, 3]`, gathered from 8 devices along the 8, each device multiplies its own number by
    its own row. None if the gathered dimension is not contracted.

    Raises:
      NeedsWhole: the psum would send more bytes than the gather.
    """
    gathered = {side: operand for side, operand in enumerate(operands) if operand is not None}
    is_contracted = any(
        all(pair[side] == operand.dim for side, operand in gathered.items())
        for pair in _contracted_dims(eqn)
    )
    if not is_contracted:
        return None
    product_type: Any = eqn.outvars[0].aval
    # On a ring, an all-reduce sends twice the bytes of its result, an all_gather once. Evolution
    # strategies gather scores, and multiply them with noise as long as the parameters.
    bytes_of = lambda aval: aval.size * aval.dtype.itemsize
    gathered_bytes = sum(bytes_of(eqn.invars[side].aval) for side in gathered)
    if 2 * bytes_of(product_type) > gathered_bytes:
        raise NeedsWhole("a psum of the product would send more than the gather")
    widens, precision = is_low_precision(product_type.dtype), eqn.params["precision"]
    if widens and isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None  # it says in which type the product is
    mesh_axes = next(iter(gathered.values())).axes  # the same of both

    def compute(eqn: JaxprEqn, blocks: Values) -> Any:
        if widens:  # rounded once, after the sum over devices, as the whole product would be
            eqn = eqn.replace(params={**eqn.params, "preferred_element_type": jnp.float32})
        (product,) = replay(eqn, blocks)
        return lax.convert_element_type(lax.psum(product, mesh_axes), product_type.dtype)

    return Reduction("psum", compute)


def _contracted_dims(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Return pairs of contracted dimensions: `[(1, 0)]` for a matrix product `left @ right`."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return list(zip(map(int, left), map(int, right), strict=True))


def dimension_to_slice(eqn: JaxprEqn, position: int, gathered: Deferred) -> int | None:
    """Return the dimension along which a whole operand is sliced to a block for this device.

    In `mul g w`, with g `[8, 3]` gathered along 0 and w `[8, 1]` whole, that is 0; in a product the
    dimension contracted with the gathered one. None if each block needs all: of a scalar, or a w of
    `[1, 3]`, broadcast along 0. The operand is at `position`, and `gathered` is another one.
    """
    if _compat.name_of(eqn) == "dot_general":
        other = 1 - position
        pairs = _contracted_dims(eqn)
        return next(pair[position] for pair in pairs if pair[other] == gathered.dim)
    shape = _shape(eqn.invars[position])
    is_broadcast = not shape or shape[gathered.dim] == 1
    return None if is_broadcast else gathered.dim


def spell_axes(names: Sequence[Any]) -> str:
    """Return 'i' for one axis, ('i', 'j') for two."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


# --- maximum and minimum over devices
#
# `lax.pmax` drops a NaN on CPU and cannot be differentiated. Here floats are compared as integers
# of the same order, in which a NaN (made positive for a maximum, negative for a minimum) wins.

_Names: TypeAlias = tuple[Any, ...]
_EXTREMES = {"max": (lax.reduce_max, lax.pmax), "min": (lax.reduce_min, lax.pmin)}
_ORDERED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by the bytes of a float
_TYPES = (jnp.bool_, jnp.integer, jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def extreme(kind: str, x: jax.Array, axes: tuple[int, ...], names: _Names) -> jax.Array:
    """Return the "max" or "min" over dimensions `axes` and mesh axes `names`, `[*s] -> [*r]`."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme_float(kind, axes, names, x)
    reduce_local, reduce_over_devices = _EXTREMES[kind]
    numbers = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    return reduce_over_devices(reduce_local(numbers, axes), names).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extreme_float(kind: str, axes: tuple[int, ...], names: _Names, x: jax.Array) -> jax.Array:
    """Return the extreme of floats, which is NaN if one of them is; see `extreme`."""
    reduce_local, reduce_over_devices = _EXTREMES[kind]
    # Its sign puts a NaN above all numbers for a maximum, and below all for a minimum.
    nan = jnp.array(np.nan if kind == "max" else np.copysign(np.nan, -1), x.dtype)
    local = reduce_local(x, axes)
    local = jnp.where(jnp.isnan(local), nan, local)
    integers = _flip(lax.bitcast_convert_type(local, _ORDERED[x.dtype.itemsize]))
    return lax.bitcast_convert_type(_flip(reduce_over_devices(integers, names)), x.dtype)


@_extreme_float.defjvp
def _extreme_float_jvp(
    kind: str, axes: tuple[int, ...], names: _Names, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the extreme, and the mean tangent of the elements equal to it, on all devices."""
    (x,), (dx,) = primals, tangents
    value = _extreme_float(kind, axes, names, x)
    reached = lax.eq(x, jnp.broadcast_to(lax.expand_dims(value, axes), x.shape)).astype(x.dtype)
    total = lambda terms: lax.psum(lax.reduce_sum(terms, axes), names)
    return value, total(dx * reached) / total(reached)


def _flip(bits: jax.Array) -> jax.Array:
    """Map bits of floats to integers of the same order, and back: negative floats count down."""
    lower = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
    return jnp.where(bits < 0, bits ^ lower, bits)
