"""Reductions over devices: the largest and smallest values, and scattered sums of equal parts.

First, a maximum and a minimum over devices that keep NaN and have the gradient of reduce_max.
`lax.pmax` drops a NaN on CPU and cannot be differentiated. Here floats are compared as integers of
the same order, in which a NaN (made positive for a maximum, negative for a minimum) wins.

Shapes: `x` is this device's block, `[*s]`; `[*r]` is what is left of `s` without the reduced
dimensions.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import JaxprEqn, Var

from jax_dist import _compat
from jax_dist._rewrite.gather_states import Spread, aval_of, shape_of
from jax_dist._rewrite.interpreter import Atom, Values, as_typed, bodies, open_jaxpr
from jax_dist._rewrite.primitive_facts import record_of

_Kind: TypeAlias = Literal["max", "min"]
_Names: TypeAlias = tuple[Any, ...]
_Groups: TypeAlias = tuple[tuple[int, ...], ...] | None

_ORDERED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}  # by the bytes of a float


def has_extremes(dtype: Any) -> bool:
    """Whether values of a type can be compared here: no complex numbers, no floats of 8 bits."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return True
    return dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def extreme(
    kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names, groups: _Groups = None
) -> jax.Array:
    """The largest or the smallest over dimensions and devices, `[*s] -> [*r]`.

    Args:
      kind: "max" or "min".
      x: this device's block, of a type that `has_extremes`.
      axes: the dimensions of the block to reduce.
      names: the mesh axes to reduce over.
      groups: as axis_index_groups.
    """
    if x.dtype == jnp.bool_:
        found = _over_devices(kind, x.astype(jnp.int8), axes, names, groups)
        return found.astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _over_devices(kind, x, axes, names, groups)
    return _of_floats(kind, axes, names, groups, x)


def _over_devices(
    kind: _Kind, x: jax.Array, axes: tuple[int, ...], names: _Names, groups: _Groups
) -> jax.Array:
    local, over = (lax.reduce_max, lax.pmax) if kind == "max" else (lax.reduce_min, lax.pmin)
    return over(local(x, axes), names, axis_index_groups=_lists(groups))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _of_floats(
    kind: _Kind, axes: tuple[int, ...], names: _Names, groups: _Groups, x: jax.Array
) -> jax.Array:
    local = lax.reduce_max(x, axes) if kind == "max" else lax.reduce_min(x, axes)
    nan = jnp.array(np.nan if kind == "max" else np.copysign(np.nan, -1), x.dtype)
    local = jnp.where(jnp.isnan(local), nan, local)
    ordered = _flip(lax.bitcast_convert_type(local, _ORDERED[x.dtype.itemsize]))
    found = _flip(_over_devices(kind, ordered, (), names, groups))
    return lax.bitcast_convert_type(found, x.dtype)


@_of_floats.defjvp
def _of_floats_jvp(
    kind: _Kind, axes: tuple[int, ...], names: _Names, groups: _Groups, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """All that reach the extreme share its gradient, on whichever device they are."""
    (x,), (dx,) = primals, tangents
    found = _of_floats(kind, axes, names, groups, x)
    reached = lax.eq(x, jnp.broadcast_to(lax.expand_dims(found, axes), x.shape)).astype(x.dtype)

    def total(terms: jax.Array) -> jax.Array:
        return lax.psum(lax.reduce_sum(terms, axes), names, axis_index_groups=_lists(groups))

    return found, total(dx * reached) / total(reached)


def _flip(bits: jax.Array) -> jax.Array:
    """Its own inverse: negative floats count downwards in their lower bits."""
    lower = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
    return jnp.where(bits < 0, bits ^ lower, bits)


def psum_over(value: Any, over: Spread) -> Any:
    return lax.psum(value, over.names, axis_index_groups=_lists(over.groups))


def _lists(groups: _Groups) -> list[list[int]] | None:
    return None if groups is None else [list(group) for group in groups]


# --- the dual of a deferred gather: scattering a sum whose parts are all the same
#
# Differentiation makes a reduce_scatter of every gather. Where the scattered value is constant
# along that dimension, as the gradient of a mean is, all devices get the same part: the psum of
# one part.


_Dimensions: TypeAlias = frozenset[int]


class Constancy:
    """Along which dimensions the values of a body are constant."""

    def __init__(self, jaxpr: Any, ins: Sequence[_Dimensions]):
        body = open_jaxpr(jaxpr)
        self._known: dict[Var, _Dimensions] = dict(zip(body.invars, ins, strict=True))
        for eqn in body.eqns:
            self._known.update(zip(eqn.outvars, self._results(eqn), strict=True))

    def along(self, atom: Atom) -> _Dimensions:
        ones = frozenset(d for d, size in enumerate(shape_of(atom)) if size == 1)
        is_literal = isinstance(atom, core.Literal)
        return ones if is_literal else ones | self._known.get(atom, frozenset())

    def has_equal_parts(self, eqn: JaxprEqn) -> bool:
        """Whether a scatter gives all devices the same."""
        if aval_of(eqn.outvars[0]).weak_type:  # a psum would not keep that
            return False
        return int(eqn.params["scatter_dimension"]) in self.along(eqn.invars[0])

    def _results(self, eqn: JaxprEqn) -> Sequence[_Dimensions]:
        name, params, record = _compat.name_of(eqn), eqn.params, record_of(eqn)
        if record.elementwise:  # constant where all operands are; one of rank 0 is so throughout
            rank = len(shape_of(eqn.outvars[0]))
            operands = [self.along(atom) for atom in eqn.invars if shape_of(atom)]
            return [frozenset(range(rank)).intersection(*operands)] * len(eqn.outvars)
        if record.kind == "call":
            body = bodies(eqn)[0]
            inside = Constancy(body, [self.along(atom) for atom in eqn.invars])
            return [inside.along(atom) for atom in open_jaxpr(body).outvars]
        if record.identity or record.over in ("sum", "max", "min"):
            pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
            if all(shape_of(atom) == shape_of(var) for atom, var in pairs):  # each by itself
                return [self.along(atom) for atom, _ in pairs]
        if record.reduces or name == "squeeze":
            gone = [int(d) for d in params["axes" if record.reduces else "dimensions"]]
            kept = [d for d in self.along(eqn.invars[0]) if d not in gone]
            return [frozenset(d - sum(other < d for other in gone) for d in kept)]
        match name:
            case "broadcast_in_dim":
                to = [int(d) for d in params["broadcast_dimensions"]]
                new = frozenset(range(len(params["shape"]))) - frozenset(to)
                return [new | {to[d] for d in self.along(eqn.invars[0])}]
            case "transpose":
                permutation = [int(d) for d in params["permutation"]]
                return [frozenset(permutation.index(d) for d in self.along(eqn.invars[0]))]
        return [frozenset()] * len(eqn.outvars)


def emit_sum(eqn: JaxprEqn, values: Values) -> Values:
    """One slice of the scattered dimension, summed; for a tiled scatter, repeated."""
    (value,) = values
    params = eqn.params
    dimension, groups = int(params["scatter_dimension"]), params["axis_index_groups"]
    part = lax.slice_in_dim(value, 0, 1, axis=dimension)
    total = psum_over(part, Spread(params["axis_name"], groups, params["axis_size"]))
    (out,) = eqn.outvars
    if params["tiled"]:
        shape = shape_of(out)
        total = lax.broadcast_in_dim(total, shape, range(len(shape)))
    else:
        total = lax.squeeze(total, [dimension])
    return [as_typed(total, out)]
