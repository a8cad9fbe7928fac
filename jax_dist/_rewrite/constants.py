"""Arrays that are part of a program, and making inputs of them.

They are the constants of the program and of the bodies in it, and, where JAX simplifies constants
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.bodies import operands_of_bodies
from jax_dist._rewrite.interpreter import (
    Atom,
    bodies,
    constants,
    open_jaxpr,
    source_line,
    with_bodies,
)

Identity: TypeAlias = Hashable


def array_identity(value: Any) -> Identity | None:
    """Return a key that is equal for two constants that are one array; None for what is no array.

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


# --- which arrays a program holds


@dataclasses.dataclass(slots=True)
class BakedArray:
    """An array in a program."""

    value: Any  # a jax.Array, or a NumPy array that shares the memory of the user's
    first_use: JaxprEqn | None = None  # None: only returned
    used_at: str = ""  # "train.py:12", where the user's code first reads it
    within: tuple[str, ...] = ()  # the primitives whose bodies hold it, each once

    @property
    def refused(self) -> str:
        """Return why no operand can take its place; "" if one can."""
        stuck = [primitive for primitive in self.within if primitive not in _WIDEN]
        return f"it is in the body of '{stuck[0]}', which takes no more operands" if stuck else ""


def baked_arrays(jaxpr: Any) -> dict[Identity, BakedArray]:
    """Return the arrays of a program, each once, in the order of the equations that hold them."""
    search = _Search()
    search.enter(jaxpr, {}, ())
    return search.arrays


class _Search:
    def __init__(self) -> None:
        self.arrays: dict[Identity, BakedArray] = {}
        self._seen: set[Hashable] = set()  # bodies, by what holds them and the arrays they get

    def enter(self, jaxpr: Any, held: Mapping[Var, Identity], around: tuple[JaxprEqn, ...]) -> None:
        """Search a jaxpr in the bodies of `around`; `held` are inputs that are arrays."""
        body, held = open_jaxpr(jaxpr), dict(held)
        for var, value in zip(body.constvars, constants(jaxpr), strict=False):
            if (identity := self._add(value, around)) is not None:
                held[var] = identity
        for eqn in body.eqns:
            reads: dict[int, Identity] = {}
            for place, atom in enumerate(eqn.invars):
                is_literal = isinstance(atom, Literal)
                identity = self._add(atom.val, around) if is_literal else held.get(atom)
                if identity is not None:
                    reads[place] = identity
            if inner := bodies(eqn):
                self._enter_bodies(eqn, inner, reads, around)
            for identity in reads.values():
                array = self.arrays[identity]
                array.first_use = array.first_use or eqn
                array.used_at = array.used_at or _line(eqn, around)
        for atom in body.outvars:
            if isinstance(atom, Literal):
                self._add(atom.val, around)

    def _enter_bodies(
        self,
        eqn: JaxprEqn,
        inner: Sequence[Any],
        reads: Mapping[int, Identity],
        around: tuple[JaxprEqn, ...],
    ) -> None:
        names = tuple(_compat.name_of(outer) for outer in (*around, eqn))
        for body, places in zip(inner, operands_of_bodies(eqn), strict=True):
            inputs = open_jaxpr(body).invars
            held = {}
            if len(places) == len(inputs):  # else of an unknown form
                pairs = zip(inputs, places, strict=True)
                held = {var: reads[place] for var, place in pairs if place in reads}
            key = (id(body), names, *held.values())
            if key not in self._seen:
                self._seen.add(key)
                self.enter(body, held, (*around, eqn))

    def _add(self, value: Any, around: tuple[JaxprEqn, ...]) -> Identity | None:
        identity = array_identity(value)
        if identity is not None:
            kept = value if isinstance(value, jax.Array) else np.asarray(value)
            array = self.arrays.setdefault(identity, BakedArray(kept))
            names = map(_compat.name_of, around)
            array.within = tuple(dict.fromkeys((*array.within, *names)))
        return identity


def _line(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> str:
    return next(filter(None, map(source_line, (eqn, *reversed(around)))), "")


# --- copies


def own_copy(value: Any) -> Any:
    """Return a NumPy array that nobody else can write to; a jax array as it is."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def put_copy(value: Any, where: Sharding | None) -> Any:
    """Return a copy that shares no buffer with a jax array, which its owner may donate or delete.

    What is held by other processes too is copied where it lies. What this process holds alone goes
    to its own devices, as the constants of its program would: each process has its own value.
    `where` is None for the default device. On devices that only compile, its type stands for the
    copy.
    """
    if where is not None and any(map(_compat.is_compile_only, where.device_set)):
        kind = jax.typeof(value)
        return jax.ShapeDtypeStruct(
            kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=where
        )
    is_jax = isinstance(value, jax.Array)
    if is_jax and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX puts no keys on devices of other processes.
        data = put_copy(jax.random.key_data(value), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    is_weak = is_jax and jax.typeof(value).weak_type
    if isinstance(where, NamedSharding) and not where.is_fully_addressable:
        if not is_jax or value.is_fully_addressable:
            # `device_put` would first compare the values of all processes, and wait for them.
            host = np.array(value)
            dtype = jax.dtypes.canonicalize_dtype(host.dtype)
            indices = where.addressable_devices_indices_map(host.shape)
            aval = ShapedArray(host.shape, dtype, weak_type=is_weak)
            slices = [host[index].astype(dtype) for index in indices.values()]
            return _compat.put_slices(aval, where, slices, list(indices))
    elif is_jax and not is_weak:
        return jax.device_put(np.array(jax.device_get(value)), where)
    elif not is_jax:
        return jax.device_put(value, where)
    now = value.sharding if value.committed else None
    return jax.device_put(jax.device_put(value, now, may_alias=False), where)


def lies_on_many(value: Any) -> bool:
    """Return whether it is an array on several devices; its type then names their mesh."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and len(value.sharding.device_set) > 1


def frozen(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program with copies of its NumPy constants: their owner may write to them."""
    return _frozen(jaxpr, {})


def _frozen(jaxpr: Any, known: dict[int, Any]) -> Any:
    """`known`: by identity, what became of bodies; one that stands twice stays one."""
    if id(jaxpr) not in known:
        body, consts, eqns = open_jaxpr(jaxpr), constants(jaxpr), []
        for eqn in body.eqns:
            is_same = all(_frozen(inner, known) is inner for inner in bodies(eqn))
            eqns.append(eqn if is_same else with_bodies(eqn, lambda inner: _frozen(inner, known)))
        has_numpy = any(isinstance(value, np.ndarray) for value in consts)
        if not has_numpy and all(new is old for new, old in zip(eqns, body.eqns, strict=True)):
            known[id(jaxpr)] = jaxpr
        else:
            body = body.replace(eqns=eqns)
            is_closed = isinstance(jaxpr, ClosedJaxpr)
            known[id(jaxpr)] = ClosedJaxpr(body, list(map(own_copy, consts))) if is_closed else body
    return known[id(jaxpr)]


# --- inputs in the place of arrays
#
# An array in a body comes in as one more operand of the equation that holds the body, at each level
# down to it. It is a new input, not what the program is differentiated by: the rules of a
# custom_jvp or a custom_vjp take it for a constant.


def lift_arrays(jaxpr: ClosedJaxpr, arrays: Sequence[Any]) -> ClosedJaxpr:
    """Return the program with some of its arrays as its first inputs."""
    types = {array_identity(value): jax.typeof(value) for value in arrays}
    return _Lifting(types).with_inputs(jaxpr, tuple(types))


class _Lifting:
    """One lifting; bodies that occur many times are changed once, and stay one body."""

    def __init__(self, types: Mapping[Identity, Any]):
        self._types = types
        self._held: dict[int, tuple[Identity, ...]] = {}  # by the identity of a body
        self._changed: dict[Hashable, Any] = {}

    def with_inputs(self, jaxpr: Any, given: tuple[Identity, ...]) -> Any:
        """Return a jaxpr, open or closed as it came, with these arrays as its first inputs."""
        key = (id(jaxpr), given)
        if key in self._changed:
            return self._changed[key]
        body, constvars, consts = open_jaxpr(jaxpr), [], []
        inputs: dict[Identity, Var] = {}
        renamed: dict[Var, Var] = {}
        for var, value in zip(body.constvars, constants(jaxpr), strict=False):
            identity = array_identity(value)
            if identity not in given:
                constvars.append(var)
                consts.append(value)
            else:
                renamed[var] = inputs.setdefault(identity, var)
        for identity in given:
            if identity not in inputs:
                inputs[identity] = Var(self._types[identity])
        read = lambda atom: self._read(atom, inputs, renamed)
        changed = body.replace(
            constvars=constvars or (() if constants(jaxpr) else body.constvars),
            invars=[*[inputs[identity] for identity in given], *body.invars],
            eqns=[self._equation(eqn, inputs, read) for eqn in body.eqns],
            outvars=list(map(read, body.outvars)),
            debug_info=body.debug_info._replace(arg_names=None),
        )
        is_closed = isinstance(jaxpr, ClosedJaxpr)
        self._changed[key] = ClosedJaxpr(changed, consts) if is_closed else changed
        return self._changed[key]

    def _read(self, atom: Atom, inputs: Mapping[Identity, Var], renamed: Mapping[Var, Var]) -> Atom:
        if not isinstance(atom, Literal):
            return renamed.get(atom, atom)
        identity = array_identity(atom.val)
        return atom if identity is None else inputs.get(identity, atom)

    def _equation(
        self, eqn: JaxprEqn, inputs: Mapping[Identity, Var], read: Callable[[Atom], Atom]
    ) -> JaxprEqn:
        invars, params = list(map(read, eqn.invars)), eqn.params
        if needed := self._held_in_bodies(eqn):
            new = [inputs[identity] for identity in needed]
            widen = lambda body: self.with_inputs(body, needed)
            params, invars = _WIDEN[_compat.name_of(eqn)](eqn, widen, new, invars)
        elif all(new is old for new, old in zip(invars, eqn.invars, strict=True)):
            return eqn
        return eqn.replace(invars=invars, params={**eqn.params, **params})

    def _held_in_bodies(self, eqn: JaxprEqn) -> tuple[Identity, ...]:
        """Return the wanted arrays in the bodies of an equation, each once, in order."""
        inner = bodies(eqn)
        if not inner or _compat.name_of(eqn) not in _WIDEN:
            return ()
        return tuple(dict.fromkeys(identity for body in inner for identity in self._held_in(body)))

    def _held_in(self, jaxpr: Any) -> tuple[Identity, ...]:
        if id(jaxpr) not in self._held:  # the program is alive, so no other has this address
            body = open_jaxpr(jaxpr)
            values = list(constants(jaxpr))
            values += [atom.val for atom in body.outvars if isinstance(atom, Literal)]
            held: list[Identity] = []
            for eqn in body.eqns:
                values += [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
                held += self._held_in_bodies(eqn)
            held += [
                identity for identity in map(array_identity, values) if identity in self._types
            ]
            self._held[id(jaxpr)] = tuple(dict.fromkeys(held))
        return self._held[id(jaxpr)]


_Body: TypeAlias = Callable[[Any], Any]  # gives a body with the new inputs first
_Widened: TypeAlias = tuple[dict[str, Any], list[Atom]]  # parameters and operands


def _widen_jit(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    params = {
        name: (value,) * len(new) + tuple(eqn.params[name])
        for name, value in _compat.jit_operand_params().items()
    }
    return {**params, "jaxpr": widen(eqn.params["jaxpr"])}, [*new, *invars]


def _widen_call(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    params = {name: widen(eqn.params[name])}
    if "num_consts" in eqn.params:  # the first operands, which are hidden from the user's rules
        params["num_consts"] = eqn.params["num_consts"] + len(new)
    return params, [*new, *invars]


def _widen_cond(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    index, *rest = invars
    return {"branches": tuple(map(widen, eqn.params["branches"]))}, [index, *new, *rest]


def _widen_while(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    params = {name: widen(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr")}
    count = eqn.params["cond_nconsts"]
    params["cond_nconsts"] = count + len(new)
    params["body_nconsts"] = eqn.params["body_nconsts"] + len(new)
    return params, [*new, *invars[:count], *new, *invars[count:]]


def _widen_scan(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    params = _compat.scan_with_constants(eqn.params, len(new))
    return {**params, "jaxpr": widen(eqn.params["jaxpr"])}, [*new, *invars]


def _widen_shard_map(eqn: JaxprEqn, widen: _Body, new: list[Atom], invars: list[Atom]) -> _Widened:
    """Each device gets the whole arrays."""
    in_specs = (*[P()] * len(new), *eqn.params["in_specs"])
    return {"in_specs": in_specs, "jaxpr": widen(eqn.params["jaxpr"])}, [*new, *invars]


_WIDEN: dict[str, Callable[..., _Widened]] = {
    "jit": _widen_jit,
    "remat2": _widen_call,
    "custom_jvp_call": _widen_call,
    "custom_vjp_call": _widen_call,
    "cond": _widen_cond,
    "while": _widen_while,
    "scan": _widen_scan,
    "shard_map": _widen_shard_map,
}  # by primitive; the bodies of others are left as they are
