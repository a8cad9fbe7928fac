"""How far rounding may move a result: every result that is rounded is moved by one last place.

The number of devices changes the order of sums, and how a compiler fuses; nothing else may change.
So a program is run again with such a change at every equation, and what that does to a value is
what may be expected of another number of devices. A fixed tolerance would be wrong for most
programs: too wide for one, too narrow for one that amplifies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import EXACT, Values

_SUMS = (
    # Their rounding goes with the terms, not with what is left of them.
    "conv_general_dilated", "cumsum", "dot_general", "reduce_sum", "reduce_window_sum",
    "scatter-add", "scatter_add",
)  # fmt: skip
_UNTOUCHED = {
    *EXACT, "all_gather", "all_gather_invariant", "all_to_all", "axis_index", "gather", "iota",
    "neg", "pmax", "pmin", "ppermute", "random_bits", "scatter", "dynamic_update_slice",
    "bitcast_convert_type", "reduce_window_max", "cond", "while", "scan",
    "psum", "psum_invariant", "reduce_scatter",  # of one device, nothing is added
}  # fmt: skip


class Noise(NamedTuple):
    scale: Any  # 0 moves nothing
    seed: Any  # which way each element goes


def moved(eqn: JaxprEqn, values: Values, outs: Values, noise: Noise) -> Values:
    """The results of an equation, moved where it rounds."""
    name = eqn.primitive.name
    if name in _UNTOUCHED and not _rounds_down(eqn):
        return outs
    sizes = _terms(eqn, values) if name in _SUMS else outs
    return [_moved(out, size, noise) for out, size in zip(outs, sizes, strict=True)]


def moved_input(value: Any, noise: Noise) -> Any:
    """An argument, moved by a unit in its last place."""
    return _moved(value, value, noise)


def is_float(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)


def epsilon(dtype: Any) -> float:
    """The distance from 1 to the next number; 0 of what does not round."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _rounds_down(eqn: JaxprEqn) -> bool:
    """Whether it only moves values, but to a type with fewer digits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (jnp.result_type(var.aval) for var in (*eqn.invars, *eqn.outvars))
    return 0 < epsilon(before) < epsilon(after)


def _terms(eqn: JaxprEqn, values: Values) -> Values:
    """The same sum over the sizes of its terms."""
    if not all(map(is_float, values[:1])):
        return interpreter.replay(eqn, values)
    sizes = [jnp.abs(value) if is_float(value) else value for value in values]
    if any(jnp.iscomplexobj(value) for value in values):
        sizes = [size.astype(jax.typeof(v).dtype) for size, v in zip(sizes, values, strict=True)]
    return interpreter.replay(eqn, sizes)


def _moved(value: Any, size: Any, noise: Noise) -> Any:
    if not is_float(value):
        return value
    unit = epsilon(jax.typeof(value).dtype)
    by = jnp.abs(size).astype(jnp.float32) * (unit * noise.scale) * _signs(value, noise.seed)
    return jnp.where(noise.scale > 0, value + by.astype(value.dtype), value)


def _signs(value: Any, seed: Any) -> Any:
    """Of every element 1 or -1, by chance and the same in every run."""
    number = jnp.arange(max(value.size, 1), dtype=jnp.uint32)[: value.size].reshape(value.shape)
    mixed = (number + jnp.uint32(seed) * jnp.uint32(40503)) * jnp.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    return jnp.where((mixed >> 13) & 1, 1.0, -1.0).astype(jnp.float32)
