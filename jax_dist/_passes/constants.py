"""Arrays that are part of a program, and making inputs of them.

They are the constants of the program and of the bodies in it; and where JAX is told to
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands and results.
"""

import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import Atom, bodies, open_jaxpr
from jax_dist._usage import human_bytes

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


_LARGE = 1024  # bytes


@dataclasses.dataclass(slots=True, eq=False)
class Capture:
    """An array that a program holds, and where it comes from."""

    name: str  # as the user would type it: "params['w']"; "<derived>" if `fun` does not reach it
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    captured_at: str = ""  # "train.py:10", where the function begins that captures it, if known
    used_at: str = ""  # "train.py:12", the first equation that reads it; "" if it is only returned
    action: typing.Literal["lifted", "kept"] = "kept"
    refused: str = ""  # why it cannot be lifted; "" if it can
    is_key: bool = False  # whether it is a random key, of the new kind or the old
    # Until it is lifted or not; a NumPy one shares the user's memory.
    value: Any = dataclasses.field(default=None, repr=False)

    @classmethod
    def describe(cls, value: Any) -> "Capture":
        """Return the capture of an array, without name and lines: these are found later."""
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        shape, dtype = tuple(array.shape), str(array.dtype)
        return cls("<derived>", shape, dtype, int(array.nbytes), is_key=is_key(array), value=array)

    @property
    def is_large(self) -> bool:
        """True if it is worth a warning."""
        return self.bytes >= _LARGE

    @property
    def is_worth_lifting(self) -> bool:
        return self.is_large or self.is_key

    @property
    def type(self) -> str:  # "float32[8,4]"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        details = {"captured at": self.captured_at, "used at": self.used_at}
        details["not lifted:"] = self.refused
        texts = [f"{label} {detail}" for label, detail in details.items() if detail]
        return f"{self.name}: {', '.join([self.type, human_bytes(self.bytes), *texts])}"


class CaptureFinder:
    """The captures of the jaxprs of one program; a body that many equations share is read once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Identity, Capture]] = {}  # by the id of a jaxpr

    def find(self, jaxpr: Any) -> dict[Identity, Capture]:
        """Return the arrays that a jaxpr and the bodies in it hold, in program order.

        Of `{lambda w; x. sin(x @ w)}` that is a capture of w, by the identity of the array; it has
        the line of `x @ w`. An array that several equations use has one capture for all.
        """
        if id(jaxpr) in self._known:  # the program is alive, so no other has this address
            return self._known[id(jaxpr)]
        captures: dict[Identity, Capture] = {}

        def capture_of(value: Any) -> Capture | None:
            """Return the capture of an array, made if there is none yet; None for other values."""
            identity = array_identity(value)
            if identity is not None and identity not in captures:
                captures[identity] = Capture.describe(value)
            return captures.get(identity)

        opened = open_jaxpr(jaxpr)
        values = dict(zip(opened.constvars, interpreter.constants(jaxpr), strict=False))
        for value in values.values():
            capture_of(value)
        for eqn in opened.eqns:
            for inner in itertools.chain(*[self.find(body).values() for body in bodies(eqn)]):
                capture = capture_of(inner.value)
                assert capture is not None  # a capture has an array
                # The first line that uses it; whether an equation takes it for a key; and the first
                # reason not to lift it, if it is in a body that takes no more operands.
                capture.used_at = capture.used_at or inner.used_at or interpreter.source_line(eqn)
                capture.is_key = capture.is_key or inner.is_key
                capture.refused = capture.refused or inner.refused or _reason_to_keep(eqn)
            for atom in eqn.invars:
                value = atom.val if isinstance(atom, Literal) else values.get(atom)
                if value is not None and (capture := capture_of(value)):
                    capture.used_at = capture.used_at or interpreter.source_line(eqn)
                    # A key of the old kind, an array of integers, shows by its use.
                    capture.is_key = capture.is_key or _compat.name_of(eqn) == "random_wrap"
        for atom in opened.outvars:
            if isinstance(atom, Literal):
                capture_of(atom.val)
        self._known[id(jaxpr)] = captures
        return captures


# An array in a body comes in as one more operand of the equation that holds the body, at each level
# down to it. It is a new input, not what the program is differentiated by: the rules of a
# custom_jvp or a custom_vjp take it for a constant.


def lift_arrays(jaxpr: ClosedJaxpr, arrays: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the program with some of its arrays as its first inputs, and the values of these.

    `{lambda w; x. x @ w}` becomes `{lambda ; w x. x @ w}`, with `[w]`. For a random key the input
    is its data, an array of integers, of which the program makes the key: where the values become
    constants of a compiled program, JAX can hold no key.
    """
    if not arrays:  # a new object, which a weak dictionary can hold by the key `jaxpr`
        return ClosedJaxpr(jaxpr.jaxpr, jaxpr.consts), []
    types = {array_identity(value): jax.typeof(value) for value in arrays}
    lifted = _Lifting(types).add_inputs(jaxpr, tuple(types))
    if not any(map(is_key, arrays)):
        return lifted, [*arrays]

    def wrap_keys_and_run(*inputs: Any) -> Any:
        keys_or_arrays = [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(array)) if is_key(array) else x
            for array, x in zip(arrays, inputs, strict=False)
        ]
        return interpreter.evaluate(lifted, [*keys_or_arrays, *inputs[len(arrays) :]])

    data = [jax.random.key_data(array) if is_key(array) else array for array in arrays]
    types_of_inputs = (*map(jax.typeof, data), *lifted.in_avals[len(arrays) :])
    return jax.make_jaxpr(wrap_keys_and_run)(*types_of_inputs), data


class _Lifting:
    """One lifting; a body that many equations share is changed once, and stays one object."""

    def __init__(self, types: Mapping[Identity, Any]):
        self._types = types  # of the arrays to lift, by `array_identity`
        self._finder = CaptureFinder()
        self._changed: dict[Hashable, Any] = {}  # bodies, by the id of the old one and its inputs

    def add_inputs(self, jaxpr: Any, arrays: tuple[Identity, ...]) -> Any:
        """Return a jaxpr, open or closed as it came, with these arrays as its first inputs."""
        key = (id(jaxpr), arrays)
        if key not in self._changed:
            self._changed[key] = self._rebuild(jaxpr, arrays)
        return self._changed[key]

    def _rebuild(self, jaxpr: Any, arrays: tuple[Identity, ...]) -> Any:
        """Return a jaxpr with some arrays as its first inputs, in place of constants and literals.

        `{lambda w; x. x @ w}` with the constant w becomes `{lambda ; w x. x @ w}`. If the array is
        in the body of an equation, such as a jit, so does the body, and the equation gets w as a
        further operand. `arrays` has the `array_identity` of each, as do the keys of dictionaries.
        """
        body = open_jaxpr(jaxpr)
        new_inputs = {identity: Var(self._types[identity]) for identity in arrays}
        input_of: dict[Var, Var] = {}  # by the constant that it replaces
        kept_constants: dict[Var, Any] = {}  # with their values
        for var, value in zip(body.constvars, interpreter.constants(jaxpr), strict=False):
            if (identity := array_identity(value)) in new_inputs:
                input_of[var] = new_inputs[identity]
            else:
                kept_constants[var] = value

        def replace(atom: Atom) -> Atom:
            if isinstance(atom, Literal):
                return new_inputs.get(array_identity(atom.val), atom)
            return input_of.get(atom, atom)

        eqns = []
        for eqn in body.eqns:
            in_bodies = itertools.chain(*map(self._finder.find, bodies(eqn)))
            if needed := tuple(dict.fromkeys(key for key in in_bodies if key in self._types)):
                change_body = functools.partial(self.add_inputs, arrays=needed)
                eqn = _add_operands(eqn, change_body, [new_inputs[key] for key in needed])
            invars = [*map(replace, eqn.invars)]
            is_same = all(map(operator.is_, invars, eqn.invars))
            eqns.append(eqn if is_same else eqn.replace(invars=invars))
        changed = body.replace(
            constvars=[*kept_constants],
            invars=[*new_inputs.values(), *body.invars],
            eqns=eqns,
            outvars=[*map(replace, body.outvars)],
            debug_info=body.debug_info._replace(arg_names=None),
        )
        is_closed = isinstance(jaxpr, ClosedJaxpr)
        return ClosedJaxpr(changed, [*kept_constants.values()]) if is_closed else changed


# The primitives whose bodies can take more operands.
_WIDENED = {"jit", "remat2", "cond", "while", "scan", "shard_map"}
_WIDENED |= {"custom_jvp_call", "custom_vjp_call"}


def _reason_to_keep(eqn: JaxprEqn) -> str:
    """Return why the bodies of an equation keep their arrays; "" if they can take them."""
    name = _compat.name_of(eqn)
    if name in _WIDENED:
        return ""
    return f"it is in the body of '{name}', which takes no more operands"


def _add_operands(eqn: JaxprEqn, change: Callable[[Any], Any], new: Sequence[Atom]) -> JaxprEqn:
    """Return an equation with the operands `new`, which its bodies after `change` take first.

    Its parameters that count or describe operands are adapted: a scan of operands `c, x` with
    `num_consts=1` takes `new, c, x` with `num_consts=2`.
    """
    params, count, changed = eqn.params, len(new), dict[str, Any]()
    invars = [*new, *eqn.invars]
    match _compat.name_of(eqn):
        case "jit":
            for key, value in _compat.jit_operand_params().items():
                changed[key] = (value,) * count + tuple(params[key])
        case "scan":
            changed = _compat.scan_with_constants(params, count)
        case "while":  # both bodies take them: the constants of the body follow the condition's
            changed = {key: params[key] + count for key in ("cond_nconsts", "body_nconsts")}
            for_condition = changed["cond_nconsts"]
            invars = [*invars[:for_condition], *new, *invars[for_condition:]]
        case "shard_map":  # each device gets the whole arrays
            changed = {"in_specs": (*[P()] * count, *params["in_specs"])}
        case "cond":  # after the index of the branch, which no branch takes
            invars = [eqn.invars[0], *new, *eqn.invars[1:]]
        case _ if "num_consts" in params:  # a custom rule: it does not see the first operands
            changed = {"num_consts": params["num_consts"] + count}
    params = {**interpreter.with_bodies(eqn, change).params, **changed}
    return eqn.replace(invars=invars, params=params)
