"""Arrays that are part of a program, and making inputs of them.

They are the constants of the program and of the bodies in it; and where JAX is told to
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands and results.
"""

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
    Builder,
    bodies,
    constants,
    evaluate,
    open_jaxpr,
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


def _literal_identity(atom: Any) -> Identity | None:
    """Return the identity of an array that is a literal; None for a variable or a scalar."""
    return array_identity(atom.val) if isinstance(atom, Literal) else None


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
        self._held: dict[int, tuple[Identity, ...]] = {}  # those in a body, by the body's id
        self._changed: dict[Hashable, Any] = {}  # bodies, by the id of the old one and its inputs

    def add_inputs(self, jaxpr: Any, inputs: tuple[Identity, ...]) -> Any:
        """Return a jaxpr, open or closed as it came, with these arrays as its first inputs."""
        key = (id(jaxpr), inputs)
        if key not in self._changed:
            self._changed[key] = self._rebuild(jaxpr, inputs)
        return self._changed[key]

    def _rebuild(self, jaxpr: Any, inputs: tuple[Identity, ...]) -> Any:
        """Return the jaxpr with `inputs`, each in the place of the array that it was."""
        body, builder = open_jaxpr(jaxpr), Builder(jaxpr)
        new = {identity: Var(self._types[identity]) for identity in inputs}
        kept: dict[Var, Any] = {}  # the constants that stay

        def read_all(atoms: Sequence[Atom]) -> list[Atom]:
            return [new.get(_literal_identity(atom), atom) for atom in builder.read_all(atoms)]

        for var, value in zip(body.constvars, constants(jaxpr), strict=False):
            if (identity := array_identity(value)) in new:
                builder.env[var] = new[identity]
            else:
                kept[var] = value
        for eqn in body.eqns:
            widened = self._widen(eqn, new)
            builder.copy(widened, read_all(widened.invars))
        changed = body.replace(
            constvars=list(kept),
            invars=[*new.values(), *body.invars],
            eqns=builder.eqns,
            outvars=read_all(body.outvars),
            debug_info=body.debug_info._replace(arg_names=None),
        )
        is_closed = isinstance(jaxpr, ClosedJaxpr)
        return ClosedJaxpr(changed, list(kept.values())) if is_closed else changed

    def _widen(self, eqn: JaxprEqn, new: Mapping[Identity, Var]) -> JaxprEqn:
        """Return an equation with the arrays to lift in its bodies, here `new`, as operands."""
        needed = self._collect_from_bodies(eqn)
        if not needed:
            return eqn
        change = lambda body: self.add_inputs(body, needed)
        return _add_operands(eqn, change, [new[identity] for identity in needed])

    def _collect_from_bodies(self, eqn: JaxprEqn) -> tuple[Identity, ...]:
        """Return the arrays to lift in the bodies of an equation, each once, in order."""
        inner = bodies(eqn)
        if not inner or reason_to_keep(eqn):
            return ()
        return tuple(dict.fromkeys(identity for body in inner for identity in self._collect(body)))

    def _collect(self, jaxpr: Any) -> tuple[Identity, ...]:
        """Return the arrays to lift in a jaxpr and the bodies in it, each once, in order."""
        if id(jaxpr) not in self._held:  # the program is alive, so no other has this address
            body = open_jaxpr(jaxpr)
            arrays = [*map(array_identity, constants(jaxpr)), *map(_literal_identity, body.outvars)]
            for eqn in body.eqns:
                arrays += map(_literal_identity, eqn.invars)
                arrays += self._collect_from_bodies(eqn)
            self._held[id(jaxpr)] = tuple(dict.fromkeys(i for i in arrays if i in self._types))
        return self._held[id(jaxpr)]


# The primitives whose bodies can take more operands.
_WIDENED = frozenset(
    "jit remat2 custom_jvp_call custom_vjp_call cond while scan shard_map".split(),  # noqa: SIM905
)


def reason_to_keep(eqn: JaxprEqn) -> str:
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
