"""The record of the primitive of an equation: that of the table, or none.

Of a primitive without a record, and of a user's, whatever its name, nothing is known.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jax_dist import _compat, primitives

_NOTHING = primitives.record("")


def record_of(eqn: JaxprEqn) -> primitives.Primitive:
    """Return what is known of an equation's primitive."""
    record = primitives.RECORDS.get(_compat.name_of(eqn), _NOTHING)
    if record.runs_keys and not _has_keys_of_jax(eqn):
        return _NOTHING  # it runs functions of the user, which no parameter shows
    if record.elementwise and not _keeps_rank(eqn):  # a bitcast to a type of another size
        return dataclasses.replace(record, elementwise=False)
    return record


def _has_keys_of_jax(eqn: JaxprEqn) -> bool:
    dtypes = {getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)}
    kinds = {dtype for dtype in dtypes if dtype and jnp.issubdtype(dtype, jax.dtypes.prng_key)}
    return {str(kind) for kind in kinds} <= {"key<fry>", "key<rbg>", "key<urbg>"}


def _keeps_rank(eqn: JaxprEqn) -> bool:
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, eqn.outvars[0])]
    return max(len(aval.shape) for aval in avals[:-1]) == len(avals[-1].shape)
