"""Numbers for equations: the same one for those that do the same to other operands.

What is compared is the primitive, its parameters, the shapes and dtypes of the operands, the whole
types of the results, effects and context. Not compared are the operands themselves, where a slice
starts, and names that exist for people only.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist.passes.gather_words import is_of_jax
from jax_dist.passes.interpreter import Atom, bodies, constants, open_jaxpr

LOOPS = frozenset({"cond", "scan", "while"})


class Keys:
    """Numbers equations and jaxprs; only good while the jaxprs are alive."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._jaxprs: dict[int, int] = {}
        self._weights: dict[int, int] = {}
        self._loops: dict[int, bool] = {}

    def of(self, eqn: JaxprEqn) -> int:
        """The same number for two equations that differ in their operands only."""
        return self._number((self._operation(eqn), tuple(_form(atom.aval) for atom in eqn.invars)))

    def weight(self, eqn: JaxprEqn) -> int:
        """How many equations it is, with those of its bodies."""
        return 1 + sum(map(self._weight_of_body, bodies(eqn)))

    def has_loop(self, eqn: JaxprEqn) -> bool:
        """Whether it is, or holds, a loop or a branch."""
        return eqn.primitive.name in LOOPS or any(map(self._loop_in_body, bodies(eqn)))

    def _loop_in_body(self, body: Any) -> bool:
        jaxpr = open_jaxpr(body)
        if id(jaxpr) not in self._loops:
            self._loops[id(jaxpr)] = any(map(self.has_loop, jaxpr.eqns))
        return self._loops[id(jaxpr)]

    def _weight_of_body(self, body: Any) -> int:
        jaxpr = open_jaxpr(body)
        if id(jaxpr) not in self._weights:
            self._weights[id(jaxpr)] = sum(map(self.weight, jaxpr.eqns))
        return self._weights[id(jaxpr)]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _operation(self, eqn: JaxprEqn) -> Any:
        ignored = _ignored(eqn)
        params = tuple(
            (name, self._value(value)) for name, value in eqn.params.items() if name not in ignored
        )
        results = tuple(var.aval for var in eqn.outvars)
        return eqn.primitive, params, results, frozenset(eqn.effects), eqn.ctx

    def _value(self, value: Any) -> Any:
        """Equal for equal parameters, and never for unequal ones."""
        if isinstance(getattr(value, "jaxpr", value), Jaxpr):
            return "jaxpr", self._jaxpr(value)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, dict):
            return "dict", tuple((name, self._value(part)) for name, part in value.items())
        if isinstance(value, (float, complex, np.ndarray, np.generic)):
            return scalar_or_array(value)
        try:
            hash(value)
        except TypeError:
            return "object", id(value)
        return type(value), value  # with the type, for True equals 1

    def _jaxpr(self, closed: Any) -> int:
        """By structure: variables are numbered in the order in which they appear."""
        jaxpr = open_jaxpr(closed)
        found = self._jaxprs.get(id(closed))
        if found is None:
            key = (_Structure(self, jaxpr).key, tuple(id(value) for value in constants(closed)))
            found = self._jaxprs[id(closed)] = self._number(key)
        return found


class _Structure:
    """A jaxpr without the names of its variables."""

    def __init__(self, keys: Keys, jaxpr: Jaxpr) -> None:
        self._places: dict[Var, int] = {}
        inputs = tuple(self._bind(var) for var in (*jaxpr.constvars, *jaxpr.invars))
        equations = tuple(self._equation(keys, eqn) for eqn in jaxpr.eqns)
        results = self._read(jaxpr.outvars)
        self.key = (len(jaxpr.constvars), inputs, equations, results)

    def _bind(self, var: Var) -> Any:
        self._places[var] = len(self._places)
        return var.aval

    def _equation(self, keys: Keys, eqn: JaxprEqn) -> Any:
        key = (keys._operation(eqn), _starts(eqn), self._read(eqn.invars))
        for var in eqn.outvars:
            self._bind(var)
        return key

    def _read(self, atoms: Sequence[Atom]) -> tuple:
        return tuple(
            literal_key(atom) if isinstance(atom, Literal) else self._places[atom] for atom in atoms
        )


def _form(aval: Any) -> Any:
    """Shape and dtype; the whole type of what is no array."""
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else aval


def literal_key(literal: Literal) -> Any:
    """Equal for literals of the same value, bit for bit, and of the same type."""
    return literal.aval, scalar_or_array(literal.val)


def scalar_or_array(value: Any) -> Any:
    """By bytes: 0.0 equals -0.0, and no NaN equals itself."""
    array = np.asarray(value)
    return type(value), array.dtype, array.shape, array.tobytes()


def _starts(eqn: JaxprEqn) -> Any:
    return eqn.params["start_indices"] if eqn.primitive.name == "slice" else None


def _ignored(eqn: JaxprEqn) -> tuple[str, ...]:
    name = eqn.primitive.name
    if name == "slice":
        return "start_indices", "limit_indices"
    if name == "custom_jvp_call" and is_of_jax(eqn.params["call_jaxpr"]):
        # A new object for each call; of one of JAX's own functions it is always the same rule.
        return ("jvp_jaxpr_fun",)
    return ()
