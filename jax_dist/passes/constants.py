"""The arrays that are part of a program, instead of arguments of it.

They are the constants of the program and of the bodies in it, and, where JAX simplifies constants
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, Sharding

from jax_dist import _compat
from jax_dist.passes.interpreter import (
    bodies,
    constants,
    open_jaxpr,
    source_line,
    with_bodies,
)

Identity = Hashable


@dataclasses.dataclass(slots=True)
class Baked:
    """An array in a program."""

    value: Any  # a jax.Array, or a NumPy array that shares the memory of the user's
    first_use: Any = None  # the first JaxprEqn that reads it; None: only returned
    used_at: str = ""  # "train.py:12", where the user's code first reads it
    within: tuple[str, ...] = ()  # the primitives whose bodies hold it, each once


def array_identity(value: Any) -> Identity | None:
    """Equal for two constants that are one array; None for what is no array.

    JAX wraps a NumPy array again at each use, so it is known by its memory. It must be kept alive
    for as long as the identity is in use.
    """
    if isinstance(value, Tracer):  # of a trace around this one, so it is no constant
        return None
    if isinstance(value, jax.Array):
        return id(value)
    if not hasattr(value, "__array__") or np.ndim(value) == 0:  # a Python or NumPy scalar
        return None
    array = np.asarray(value)
    return (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def baked_arrays(jaxpr: Any) -> dict[Identity, Baked]:
    """The arrays of a program, each once, in the order of the equations that hold them."""
    search = _Search({}, set(), [])
    search.enter(jaxpr, {}, ())
    return search.found


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    found: dict[Identity, Baked]
    seen: set[tuple]  # the bodies that were entered, by their address, and from where
    unlocated: list[Baked]  # used by an equation that has no line of the user

    def enter(self, jaxpr: Any, held: dict[Var, Identity | None], within: tuple[str, ...]) -> None:
        """Looks through a jaxpr, some variables of which hold baked arrays."""
        body = open_jaxpr(jaxpr)
        for var, value in zip(body.constvars, constants(jaxpr), strict=False):
            held[var] = self._meet(value, within)
        for eqn in body.eqns:
            self._pass(eqn, held, within)
        for atom in body.outvars:
            if isinstance(atom, Literal):
                self._meet(atom.val, within)

    def _meet(self, value: Any, within: tuple[str, ...]) -> Identity | None:
        identity = array_identity(value)
        if identity is not None:
            baked = self.found.setdefault(identity, Baked(_plain(value)))
            baked.within = tuple(dict.fromkeys((*baked.within, *within)))
        return identity

    def _pass(self, eqn: JaxprEqn, held: Mapping[Var, Any], within: tuple[str, ...]) -> None:
        read = {
            place: self._meet(atom.val, within) if isinstance(atom, Literal) else held.get(atom)
            for place, atom in enumerate(eqn.invars)
        }
        outer = len(self.unlocated)
        self._enter_bodies(eqn, read, (*within, eqn.primitive.name))
        for identity in read.values():
            if identity is not None and not self.found[identity].used_at:
                baked = self.found[identity]
                baked.first_use = baked.first_use or eqn
                self.unlocated.append(baked)
        if len(self.unlocated) > outer:
            self._locate(self.unlocated[outer:], source_line(eqn))

    def _locate(self, used: Sequence[Baked], line: str) -> None:
        """What was used in an equation without a line is used at the line around it."""
        if line:
            for baked in used:
                baked.used_at = baked.used_at or line
            del self.unlocated[len(self.unlocated) - len(used) :]

    def _enter_bodies(self, eqn: JaxprEqn, read: Mapping, within: tuple[str, ...]) -> None:
        for body, operands in zip(bodies(eqn), _operands_of_bodies(eqn), strict=True):
            held = {var: read[place] for place, var in operands.items() if read[place] is not None}
            unlocated = any(not self.found[identity].used_at for identity in held.values())
            key = (id(body), within)
            if unlocated or key not in self.seen:
                self.seen.add(key)
                self.enter(body, held, within)


def own_copy(value: Any) -> Any:
    """A NumPy array that nobody else can write to; a jax array as it is."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def put_copy(value: Any, where: Sharding | None) -> Any:
    """A copy that shares no buffer with a jax array, which its owner may donate or delete.

    What is held by other processes too is copied where it lies. What this process holds alone goes
    to its own devices, as the constants of its program would: each process has its own value.

    Args:
      value: a NumPy array, or a jax array.
      where: the copy lies; None for the default device.
    """
    is_jax = isinstance(value, jax.Array)
    if is_jax and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX puts no keys on devices of other processes.
        data = put_copy(jax.random.key_data(value), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    is_weak = is_jax and jax.typeof(value).weak_type
    if isinstance(where, NamedSharding) and not where.is_fully_addressable:
        if not is_jax or value.is_fully_addressable:
            return _put_own(np.array(value), where, is_weak=is_weak)
    elif is_jax and not is_weak:
        return jax.device_put(np.array(jax.device_get(value)), where)
    elif not is_jax:
        return jax.device_put(value, where)
    now = value.sharding if value.committed else None
    return jax.device_put(jax.device_put(value, now, may_alias=False), where)


def _put_own(host: np.ndarray, where: NamedSharding, *, is_weak: bool) -> jax.Array:
    """`device_put` would first compare the values of all processes, and wait for them."""
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    indices = where.addressable_devices_indices_map(host.shape)
    aval = ShapedArray(host.shape, dtype, weak_type=is_weak)
    slices = [host[index].astype(dtype) for index in indices.values()]
    return _compat.put_slices(aval, where, slices, list(indices))


def lies_on_many(value: Any) -> bool:
    """Whether it is an array on several devices; its type then names their mesh."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and len(value.sharding.device_set) > 1


def frozen(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, whose NumPy constants are copies: their owner may write to them."""
    return _frozen(jaxpr, {})


def _frozen(jaxpr: Any, known: dict[int, Any]) -> Any:
    """`known`: by identity, what became of bodies; one that stands twice stays one."""
    if id(jaxpr) not in known:
        body = open_jaxpr(jaxpr)
        eqns = [_with_frozen_bodies(eqn, known) for eqn in body.eqns]
        if any(new is not old for new, old in zip(eqns, body.eqns, strict=True)):
            body = body.replace(eqns=eqns)
        held = constants(jaxpr)
        if body is not open_jaxpr(jaxpr) or any(isinstance(value, np.ndarray) for value in held):
            consts = [own_copy(value) for value in held]
            known[id(jaxpr)] = ClosedJaxpr(body, consts) if isinstance(jaxpr, ClosedJaxpr) else body
        else:
            known[id(jaxpr)] = jaxpr
    return known[id(jaxpr)]


def _with_frozen_bodies(eqn: JaxprEqn, known: dict[int, Any]) -> JaxprEqn:
    if all(_frozen(body, known) is body for body in bodies(eqn)):
        return eqn
    return with_bodies(eqn, lambda body: _frozen(body, known))


def _operands_of_bodies(eqn: JaxprEqn) -> list[dict[int, Var]]:
    """For each body of an equation, its inputs by the place of the operand they stand for."""
    inner = [open_jaxpr(body) for body in bodies(eqn)]
    if eqn.primitive.name == "while":
        return _operands_of_while(eqn, inner)
    offset = 1 if eqn.primitive.name == "cond" else 0  # its first operand picks the branch
    return [
        dict(enumerate(body.invars, offset))
        if len(body.invars) + offset == len(eqn.invars)
        else {}  # of an unknown form: what it reads counts as read by the equation
        for body in inner
    ]


def _operands_of_while(eqn: JaxprEqn, inner: Sequence[Jaxpr]) -> list[dict[int, Var]]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(first + second, len(eqn.invars))
    condition, body = inner
    return [
        dict(zip([*range(first), *carry], condition.invars, strict=True)),
        dict(zip([*range(first, first + second), *carry], body.invars, strict=True)),
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)
