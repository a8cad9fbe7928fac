"""Arrays that are part of a program, and making inputs of them.

They are the constants of the program and of the bodies in it; and where JAX is told to
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands and results.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from jax_dist import _compat
from jax_dist._passes.interpreter import (
    Atom,
    bodies,
    constants,
    evaluate,
    open_jaxpr,
    source_line,
    with_bodies,
)

Identity: TypeAlias = Hashable


def array_identity(value: Any) -> Identity | None:
    """Return a key that two constants share if they are one array; None for what is no array.

    JAX wraps a NumPy array again at each use, so its key is its memory address and layout. The
    caller must keep the array alive while it uses the key, or another one may get the address.
    """
    if isinstance(value, Tracer):  # of a trace around this one, so it is no constant
        return None
    if isinstance(value, jax.Array):
        return id(value)
    if not hasattr(value, "__array__") or np.ndim(value) == 0:  # a Python or NumPy scalar
        return None
    array = np.asarray(value)
    return (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.name)


def is_key(value: Any) -> bool:
    """Return whether a value is an array of random keys of the new kind."""
    dtype: Any = getattr(value, "dtype", None)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


# --- copies


def put_copy(value: Any, where: Sharding | None) -> Any:
    """Return a copy with the sharding `where`, in buffers that no owner can donate or delete.

    `where` is None for the default device. A global array of several processes is resharded. A
    value of this process alone goes to its own devices of `where`, and each process may have
    another one, as with constants of a program. On devices that only compile, the type is returned.
    """
    kind = jax.typeof(value)
    if where is not None and any(map(_compat.is_compile_only, where.device_set)):
        return jax.ShapeDtypeStruct(
            kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=where
        )
    if is_key(value):  # JAX sends no keys to other processes
        data = put_copy(jax.random.key_data(value), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    is_jax = isinstance(value, jax.Array)
    is_global = is_jax and not value.is_fully_addressable
    if where is not None and not (where.is_fully_addressable or is_global):
        # `device_put` would first compare the values of all processes, and wait for them.
        host = np.array(value, kind.dtype)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])
    if is_jax:  # copied where it is, for device_put to other devices may share buffers
        current = value.sharding if value.committed else None
        value = jax.device_put(value, current, may_alias=False)
    return jax.device_put(value, where)


# --- finding them


@dataclasses.dataclass(slots=True, eq=False)
class ArrayUse:
    """An array that is part of a jaxpr or of a body in it, and how it is used there."""

    value: Any
    used_at: str = ""  # "train.py:12", the first equation that reads it; "" if only returned
    refused: str = ""  # why a body that has it cannot take it as an operand; "" if all can
    is_key: bool = False  # whether an equation takes it for the data of a random key


class ArrayUses:
    """The arrays in the jaxprs of one program; a body that many equations share is read once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Identity, ArrayUse]] = {}  # by the id of a jaxpr

    def find(self, jaxpr: Any) -> dict[Identity, ArrayUse]:
        """Return the arrays in a jaxpr and in the bodies in it, each once, in program order."""
        if id(jaxpr) in self._known:  # the program is alive, so no other has this address
            return self._known[id(jaxpr)]
        uses: dict[Identity, ArrayUse] = {}

        def add(value: Any, eqn: JaxprEqn | None = None, inner: ArrayUse | None = None) -> None:
            """Add a use by `eqn` itself, or by a body of it, in which it is used as `inner`."""
            if (identity := array_identity(value)) is None:
                return
            use = uses.setdefault(identity, ArrayUse(value))
            if eqn is None:
                return
            use.used_at = use.used_at or (inner and inner.used_at) or source_line(eqn)
            if inner is None:
                use.is_key = use.is_key or _compat.name_of(eqn) == "random_wrap"
            else:
                use.is_key = use.is_key or inner.is_key
                use.refused = use.refused or inner.refused or _reason_to_keep(eqn)

        opened = open_jaxpr(jaxpr)
        values = dict(zip(opened.constvars, constants(jaxpr), strict=False))
        for value in values.values():
            add(value)
        for eqn in opened.eqns:
            for body in bodies(eqn):
                for inner in self.find(body).values():
                    add(inner.value, eqn, inner)
            for atom in eqn.invars:
                add(atom.val if isinstance(atom, Literal) else values.get(atom), eqn)
        for atom in opened.outvars:
            add(atom.val if isinstance(atom, Literal) else None)
        self._known[id(jaxpr)] = uses
        return uses


# --- inputs in the place of arrays
#
# An array in a body comes in as one more operand of the equation that holds the body, at each level
# down to it. It is a new input, not what the program is differentiated by: the rules of a
# custom_jvp or a custom_vjp take it for a constant.


def lift_arrays(jaxpr: ClosedJaxpr, arrays: Sequence[Any]) -> ClosedJaxpr:
    """Return the program with some of its arrays as its first inputs; of random keys, their data.

    A compiled program of JAX can hold data of a key among its constants, and no key.
    """
    if not arrays:
        return jaxpr
    types = {array_identity(value): jax.typeof(value) for value in arrays}
    lifted = _Lifting(types).add_inputs(jaxpr, tuple(types))
    if not any(map(is_key, arrays)):
        return lifted

    def program(*inputs: Any) -> Any:
        keys_or_arrays = [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(array)) if is_key(array) else x
            for array, x in zip(arrays, inputs, strict=False)
        ]
        return evaluate(lifted, [*keys_or_arrays, *inputs[len(arrays) :]])

    data = [jax.random.key_data(array) if is_key(array) else array for array in arrays]
    return jax.make_jaxpr(program)(*map(jax.typeof, data), *lifted.in_avals[len(arrays) :])


class _Lifting:
    """One lifting; a body that many equations share is changed once, and stays one object."""

    def __init__(self, types: Mapping[Identity, Any]):
        self._types = types  # of the arrays to lift
        self._uses = ArrayUses()
        self._changed: dict[Hashable, Any] = {}  # bodies, by the id of the old one and its inputs

    def add_inputs(self, jaxpr: Any, inputs: tuple[Identity, ...]) -> Any:
        """Return a jaxpr, open or closed as it came, with these arrays as its first inputs."""
        key = (id(jaxpr), inputs)
        if key not in self._changed:
            self._changed[key] = self._rebuild(jaxpr, inputs)
        return self._changed[key]

    def _rebuild(self, jaxpr: Any, inputs: tuple[Identity, ...]) -> Any:
        body = open_jaxpr(jaxpr)
        new = {identity: Var(self._types[identity]) for identity in inputs}
        identities = map(array_identity, constants(jaxpr))
        of_constvar = dict(zip(body.constvars, identities, strict=False))

        def replace(atoms: Sequence[Atom]) -> list[Atom]:
            """Return the new input in the place of each atom that is one of the arrays."""
            is_literal = lambda atom: isinstance(atom, Literal)
            identities = [
                array_identity(a.val) if is_literal(a) else of_constvar.get(a) for a in atoms
            ]
            return [new.get(i, atom) for i, atom in zip(identities, atoms, strict=True)]

        eqns = []
        for eqn in body.eqns:
            needed = self._arrays_in_bodies(eqn)
            if needed:
                change = functools.partial(self.add_inputs, inputs=needed)
                eqn = _add_operands(eqn, change, [new[identity] for identity in needed])
            invars = replace(eqn.invars)
            is_same = all(map(operator.is_, invars, eqn.invars))
            eqns.append(eqn if is_same else eqn.replace(invars=invars))
        kept = [
            (v, x)
            for v, x in zip(body.constvars, constants(jaxpr), strict=False)
            if of_constvar[v] not in new
        ]
        changed = body.replace(
            constvars=[var for var, _ in kept],
            invars=[*new.values(), *body.invars],
            eqns=eqns,
            outvars=replace(body.outvars),
            debug_info=body.debug_info._replace(arg_names=None),
        )
        is_closed = isinstance(jaxpr, ClosedJaxpr)
        return ClosedJaxpr(changed, [value for _, value in kept]) if is_closed else changed

    def _arrays_in_bodies(self, eqn: JaxprEqn) -> tuple[Identity, ...]:
        """Return the arrays to lift in the bodies of an equation, each once, in order."""
        uses = itertools.chain(*map(self._uses.find, bodies(eqn)))
        return tuple(dict.fromkeys(identity for identity in uses if identity in self._types))


# The primitives whose bodies can take more operands.
_WIDENED = frozenset(
    "jit remat2 custom_jvp_call custom_vjp_call cond while scan shard_map".split(),  # noqa: SIM905
)


def _reason_to_keep(eqn: JaxprEqn) -> str:
    """Return why the bodies of an equation keep their arrays; "" if they can take them."""
    name = _compat.name_of(eqn)
    if name in _WIDENED:
        return ""
    return f"it is in the body of '{name}', which takes no more operands"


def _add_operands(eqn: JaxprEqn, change: Callable[[Any], Any], new: Sequence[Atom]) -> JaxprEqn:
    """Return an equation with the operands `new`, which its changed bodies take as first inputs.

    Each primitive of JAX has other parameters that count or describe operands, and places the
    operands of its bodies elsewhere; all are adapted here.
    """
    name, params, count = _compat.name_of(eqn), eqn.params, len(new)
    invars = eqn.invars
    changed: dict[str, Any] = {}
    first = 0  # the position of the new operands
    if name == "jit":
        for key, value in _compat.jit_operand_params().items():
            changed[key] = (value,) * count + tuple(params[key])
    elif name == "scan":
        changed = _compat.scan_with_constants(params, count)
    elif name == "while":  # operands of the condition come first, then those of the body
        changed = {key: params[key] + count for key in ("cond_nconsts", "body_nconsts")}
        of_cond = params["cond_nconsts"]
        invars = [*invars[:of_cond], *new, *invars[of_cond:]]
    elif name == "shard_map":  # each device gets the whole arrays
        changed = {"in_specs": (*[P()] * count, *params["in_specs"])}
    elif name == "cond":  # after the number of the branch
        first = 1
    elif "num_consts" in params:  # the first operands, which are hidden from the user's rules
        changed = {"num_consts": params["num_consts"] + count}
    params = {**with_bodies(eqn, change).params, **changed}
    return eqn.replace(invars=[*invars[:first], *new, *invars[first:]], params=params)
