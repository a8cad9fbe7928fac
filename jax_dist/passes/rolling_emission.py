"""Emits copies of the same equations as one scan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.passes.interpreter import Handler, Values, read_all, unnamed
from jax_dist.passes.rolling_copies import Roll, Stacked, shape_of, window

Evaluate = Callable[..., Values]


def block_jaxpr(roll: Roll) -> Jaxpr:
    """Of one copy: shared, carried and stacked values to carried ones and results."""
    inputs = (*roll.shared, *[c.var for c in roll.carried], *[s.var for s in roll.stacked])
    outputs = (*[c.result for c in roll.carried], *[r.var for r in roll.results])
    effects = frozenset().union(*[eqn.effects for eqn in roll.block])
    return Jaxpr((), list(inputs), list(outputs), list(roll.block), effects, unnamed())


def call_for(roll: Roll, eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """One equation in the place of all copies: a call of them, from what they read.

    Args:
      roll: of the copies.
      eqns: all of them.
    """
    atoms = [carried.first for carried in roll.carried]
    atoms += [atom for stacked in roll.stacked for atom in stacked.atoms]
    read = dict.fromkeys([*roll.shared, *[atom for atom in atoms if isinstance(atom, Var)]])
    every = (*roll.last, *roll.results)
    made = [out for result in every for out in result.outs if out is not None]
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    copies = Jaxpr((), list(read), made, list(eqns), effects, unnamed())
    call = _compat.call_of(ClosedJaxpr(copies, ()))
    # The scopes of the copies are within their equations; around them there is none.
    info = eqns[0].source_info.replace(name_stack=call.source_info.name_stack)
    return call.replace(invars=list(read), ctx=eqns[0].ctx, source_info=info)


def emitter(roll: Roll, evaluate: Evaluate) -> Handler:
    """Handles the call with a scan.

    Args:
      roll: of the copies.
      evaluate: what `block_jaxpr` is of, on its inputs.
    """

    def handle(eqn: JaxprEqn, values: Values) -> Values:
        known = {var: value for var, value in zip(eqn.invars, values, strict=True)}
        made = _scanned(roll, evaluate, known)
        return [made[var] for var in eqn.outvars]

    return handle


def _scanned(roll: Roll, evaluate: Evaluate, known: Mapping[Any, Any]) -> dict[Any, Any]:
    shared = read_all(roll.shared, known)
    count = len(roll.carried)

    def copy(carry: Values, taken: Values) -> tuple[Values, Values]:
        outs = evaluate(*shared, *carry, *taken)
        return outs[:count], outs[count:]

    first = [_strong(_value(c.first, known), c.var.aval) for c in roll.carried]
    taken = [_stack(each, known) for each in roll.stacked]
    carry, made = lax.scan(copy, first, taken, length=roll.copies)
    results: dict[Any, Any] = {}
    last = {c.result: value for c, value in zip(roll.carried, carry, strict=True)}
    results.update((result.outs[-1], last[result.var]) for result in roll.last)
    for result, stack in zip(roll.results, made, strict=True):
        for number, out in enumerate(result.outs):
            if out is not None:
                results[out] = lax.index_in_dim(stack, number, keepdims=False)
    return results


def _value(atom: Any, known: Mapping[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _array(atom: Any, known: Mapping[Any, Any]) -> Any:
    """A literal of the type that it has in the program: a weak one is a number of Python."""
    if not isinstance(atom, Literal):
        return known[atom]
    aval: Any = atom.aval
    return atom.val if aval.weak_type else np.asarray(atom.val, aval.dtype)


def _strong(value: Any, aval: Any) -> Any:
    """A weak type made strong, if that is wanted."""
    if aval.weak_type or not jax.typeof(value).weak_type:
        return value
    return lax.convert_element_type(value, aval.dtype)


def _stack(stacked: Stacked, known: Mapping[Any, Any]) -> Any:
    """`[*s]` of each copy -> `[copies, *s]`."""
    values = [_array(atom, known) for atom in stacked.atoms]
    found = window(stacked)
    if found is not None:
        return _cut(values[0], stacked, *found)
    if stacked.slices:
        params = [eqn.params for eqn in stacked.slices]
        values = [
            lax.slice(value, each["start_indices"], each["limit_indices"], each["strides"])
            for value, each in zip(values, params, strict=True)
        ]
    return jnp.stack(values)


def _cut(value: Any, stacked: Stacked, axis: int, first: int) -> Any:
    """Slices that lie side by side in one array, cut out in one piece."""
    copies, shape = len(stacked.atoms), shape_of(stacked.var)
    params = stacked.slices[0].params
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    limits[axis] = first + copies * shape[axis]
    piece = lax.slice(value, starts, limits)
    return jnp.moveaxis(piece.reshape(*shape[:axis], copies, *shape[axis:]), axis, 0)
