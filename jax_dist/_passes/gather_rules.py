"""Per-primitive rules for equations with gathered operands.

A gathered value is not built: each device keeps its block, and a `DeferredGather` says along which
dimension an all_gather would concatenate the blocks. Elementwise functions, and what moves, adds or
drops other dimensions, run on the block. What reduces the gathered dimension runs on the block and
then over devices. A whole operand (not gathered, replicated) is sliced to each device's block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

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
class DeferredGather:
    """A value that an all_gather would give, of which each device has its own block only."""

    block: Any  # the atom of this device's block
    dim: int  # the gathered dimension, along which the blocks would be concatenated
    axes: tuple[Any, ...]  # of the mesh, the first is the most major
    size: int  # number of blocks
    sites: tuple[Any, ...]  # the gathers that it comes from, which may have to be kept
    user_eqn: JaxprEqn  # the equation in the user's program, whose line a report names

    def block_type(self, whole: Any, dim: int) -> Any:
        """Return the type of a block of a value of type `whole`, gathered along `dim`."""
        shape = list(whole.shape)
        shape[dim] //= self.size
        return whole.update(shape=tuple(shape))

    def keep_gathers(self, why: str, forced_by: JaxprEqn) -> None:
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
    """Rule: run the equation on blocks; its results are blocks, too, gathered along `dim`."""

    dim: int
    # The parameters that hold sizes of the whole value, with those of a block.
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """Rule: reduce each block, and then over devices; the result is whole."""

    collective: str  # "psum", for the report
    compute: Callable[[JaxprEqn, Values], Any]  # the equation on blocks, to its single result


Operand: TypeAlias = DeferredGather | None  # None: not gathered, so each device has all of it
Rule: TypeAlias = Blockwise | Reduction


def find_rule(eqn: JaxprEqn, operands: Sequence[Operand]) -> Rule:
    """Return how to run an equation on the blocks of its gathered operands.

    For g, gathered along 0 to `[8, 3]`, `sin g` gives `Blockwise(dim=0)`: each device computes the
    sine of its block, `[1, 3]`. `reduce_sum[axes=(0,)] g` gives a `Reduction` by psum. NeedsWhole
    is raised if there is no sound rule, so that the gathers behind the operands have to be kept.
    """
    name, record = _compat.name_of(eqn), record_of(eqn)
    gathered = [operand for operand in operands if operand is not None]
    first = gathered[0]
    # A dot_general names the dimensions that it pairs; all else pairs those of equal index.
    have_same_dim = name == "dot_general" or len({value.dim for value in gathered}) == 1
    if not have_same_dim or len({value.axes for value in gathered}) > 1:
        raise NeedsWhole(f"{name} mixes values that are gathered in different ways")
    rule = None
    if name == "dot_general":
        rule = _find_rule_of_product(eqn, operands)
    elif record.elementwise:
        rule = Blockwise(first.dim)
    elif record.reduces or name in ("argmax", "argmin"):
        rule = _find_rule_of_reduction(eqn, first)
    elif name in _RULES:
        rule = _RULES[name](eqn, first)
    if rule is None:
        raise NeedsWhole(f"{name} needs the whole gathered value")
    return rule


def _broadcast(eqn: JaxprEqn, gathered: DeferredGather) -> Rule:
    """Broadcast each block: `[8] -> [5, 8]`, gathered along 0, gives `[5, 1]`, gathered along 1."""
    dim = int(eqn.params["broadcast_dimensions"][gathered.dim])
    shape = gathered.block_type(eqn.outvars[0].aval, dim).shape
    return Blockwise(dim, {"shape": shape, "sharding": None})


def _reshape(eqn: JaxprEqn, gathered: DeferredGather) -> Rule | None:
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


_RULES: dict[str, Callable[[JaxprEqn, DeferredGather], Rule | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, first: Blockwise(list(eqn.params["permutation"]).index(first.dim)),
    # The gathered dimension is longer than 1, so it stays.
    "squeeze": lambda eqn, first: Blockwise(_index_without(first.dim, eqn.params["dimensions"])),
    "reshape": _reshape,
    "pvary": lambda _, first: Blockwise(first.dim),
}


def _find_rule_of_reduction(eqn: JaxprEqn, gathered: DeferredGather) -> Rule | None:
    """Return how to reduce a gathered value of which each device has a block only.

    For g, gathered from 8 devices along 0 to `[8, 3]`: a sum over dimension 1 is computed on each
    block, and its result, `[8]`, is still gathered along 0. A sum over dimension 0 is the sum of
    each block and then a psum. None if no collective gives the same result, as for a product.
    """
    name, reduced_dims = _compat.name_of(eqn), tuple(map(int, eqn.params["axes"]))
    if gathered.dim not in reduced_dims:
        return Blockwise(_index_without(gathered.dim, reduced_dims))
    mesh_axes, result_type = gathered.axes, cast(Any, eqn.outvars[0].aval)
    # In 16 bits, a sum in another order would be another number.
    if name == "reduce_sum" and not is_low_precision(result_type.dtype):
        return Reduction("psum", lambda eqn, xs: lax.psum(replay(eqn, xs)[0], mesh_axes))
    is_ordered = any(jnp.issubdtype(result_type.dtype, kind) for kind in _ORDERED_TYPES)
    if name not in ("reduce_max", "reduce_min") or not is_ordered:
        return None
    # One function for both steps, for its gradient: where elements of several devices are equal to
    # the maximum, they share it, as they do in reduce_max of the whole value.
    kind = name.removeprefix("reduce_")
    return Reduction(f"p{kind}", lambda _, xs: extreme(kind, xs[0], reduced_dims, mesh_axes))


def _index_without(dim: int, removed: Sequence[int]) -> int:
    """Return the index of a dimension once others are removed: 2 without 0 and 3 is 1."""
    return dim - sum(other < dim for other in removed)


def is_low_precision(dtype: Any) -> bool:
    """Return whether sums in this type depend much on the order of their terms."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _find_rule_of_product(eqn: JaxprEqn, operands: Sequence[Operand]) -> Rule | None:
    """Return how to compute a `dot_general` over a gathered dimension: products and a psum.

    For `g @ w`, with g gathered from 8 devices to `[8]`, and w `[8, 3]`, each device multiplies its
    own number of g by its own row of w, and a psum adds the products up. `operands` has None for w,
    which is not gathered. Returns None if the gathered dimension is not summed over; NeedsWhole is
    raised if the psum would send more bytes than the gather.
    """
    # By side, 0 for left and 1 for right; both, if they are gathered alike.
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
    # As of a whole product, a result in 16 bits is rounded once, after the sum over devices.
    sums_in_float32, precision = is_low_precision(product_type.dtype), eqn.params["precision"]
    if sums_in_float32 and isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None  # it fixes the type of the sums
    mesh_axes = next(iter(gathered.values())).axes  # the same of both

    def compute(eqn: JaxprEqn, blocks: Values) -> Any:
        if sums_in_float32:
            eqn = eqn.replace(params={**eqn.params, "preferred_element_type": jnp.float32})
        (product,) = replay(eqn, blocks)
        return lax.convert_element_type(lax.psum(product, mesh_axes), product_type.dtype)

    return Reduction("psum", compute)


def _contracted_dims(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Return pairs of contracted dimensions: `[(1, 0)]` for a matrix product `left @ right`."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return list(zip(map(int, left), map(int, right), strict=True))


def find_dim_to_slice(eqn: JaxprEqn, position: int, gathered: DeferredGather) -> int | None:
    """Return the dimension along which each device takes a slice of an operand, the one it needs.

    For g, gathered from 8 devices to `[8, 3]`, each has one row. In `mul g w`, it needs that row of
    w, too: 0. In `w @ g`, it needs a column of w: 1. None if it needs all: of a w that is a number,
    or `[1, 3]` and broadcast. `position` is that of w in `eqn`, and `gathered` is g.
    """
    if _compat.name_of(eqn) == "dot_general":
        other = 1 - position
        pairs = _contracted_dims(eqn)  # one of them has `gathered.dim`, by the rule of products
        return next(pair[position] for pair in pairs if pair[other] == gathered.dim)
    shape = _shape(eqn.invars[position])
    is_broadcast = not shape or shape[gathered.dim] == 1
    return None if is_broadcast else gathered.dim


def spell_axes(names: Sequence[Any]) -> str:
    """Return 'i' for one axis, ('i', 'j') for two."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


# `lax.pmax` drops a NaN on CPU and cannot be differentiated. Here floats are compared as integers
# of the same order, in which a NaN (made positive for a maximum, negative for a minimum) wins.

_Names: TypeAlias = tuple[Any, ...]
_EXTREMES = {"max": (lax.reduce_max, lax.pmax), "min": (lax.reduce_min, lax.pmin)}
_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by the bytes of a float
_ORDERED_TYPES = (jnp.bool_, jnp.integer, jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def extreme(kind: str, x: jax.Array, axes: tuple[int, ...], names: _Names) -> jax.Array:
    """Return the "max" or "min" over dimensions `axes` and mesh axes `names`, `[*s] -> [*r]`."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme_float(kind, axes, names, x)
    reduce_local, reduce_over_devices = _EXTREMES[kind]
    numbers = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    return reduce_over_devices(reduce_local(numbers, axes), names).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extreme_float(kind: str, axes: tuple[int, ...], names: _Names, x: jax.Array) -> jax.Array:
    """Return the "max" or "min" of floats, NaN if one is; see `extreme` for the arguments.

    Over devices, `lax.pmax` of floats may lose a NaN. So the bits are compared, as integers.
    """
    reduce_local, reduce_over_devices = _EXTREMES[kind]
    # As an integer, a positive NaN is larger than all numbers, and a negative one smaller.
    nan = jnp.array(np.nan if kind == "max" else np.copysign(np.nan, -1), x.dtype)
    local = reduce_local(x, axes)
    local = jnp.where(jnp.isnan(local), nan, local)
    integers = _order_bits(lax.bitcast_convert_type(local, _INTEGERS[x.dtype.itemsize]))
    return lax.bitcast_convert_type(_order_bits(reduce_over_devices(integers, names)), x.dtype)


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


def _order_bits(bits: jax.Array) -> jax.Array:
    """Map bits of floats to integers of the same order, and back: negative floats count down."""
    lower = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
    return jnp.where(bits < 0, bits ^ lower, bits)
