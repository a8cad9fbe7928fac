"""The arrays that are part of a program, instead of arguments of it.

They are the constants of the program and of the bodies in it, and, where JAX simplifies constants
(`JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS`), literals among the operands.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.bodies import operands_of_bodies
from jax_dist._rewrite.interpreter import (
    Values,
    bodies,
    call_shard_map,
    constants,
    in_form_of,
    open_jaxpr,
    replay,
    run,
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

    @property
    def refused(self) -> str:
        """Why no operand can take its place; "" if one can."""
        stuck = [primitive for primitive in self.within if primitive not in _RULES]
        return f"it sits in the body of '{stuck[0]}', which takes no more operands" if stuck else ""


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
            baked = self.found.setdefault(
                identity, Baked(value if isinstance(value, jax.Array) else np.asarray(value))
            )
            baked.within = tuple(dict.fromkeys((*baked.within, *within)))
        return identity

    def _pass(self, eqn: JaxprEqn, held: Mapping[Var, Any], within: tuple[str, ...]) -> None:
        read = {
            place: self._meet(atom.val, within) if isinstance(atom, Literal) else held.get(atom)
            for place, atom in enumerate(eqn.invars)
        }
        outer, inside = len(self.unlocated), (*within, _compat.name_of(eqn))
        for body, operands in zip(bodies(eqn), _operands_of_bodies(eqn), strict=True):
            given = {var: read[place] for place, var in operands.items() if read[place] is not None}
            unlocated = any(not self.found[identity].used_at for identity in given.values())
            key = (id(body), inside)
            if unlocated or key not in self.seen:
                self.seen.add(key)
                self.enter(body, given, inside)
        for identity in read.values():
            if identity is not None and not self.found[identity].used_at:
                baked = self.found[identity]
                baked.first_use = baked.first_use or eqn
                self.unlocated.append(baked)
        if len(self.unlocated) > outer and (line := source_line(eqn)):
            # What was used in an equation without a line is used at the line around it.
            for baked in self.unlocated[outer:]:
                baked.used_at = baked.used_at or line
            del self.unlocated[outer:]


def own_copy(value: Any) -> Any:
    """A NumPy array that nobody else can write to; a jax array as it is."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def put_copy(value: Any, where: Sharding | None) -> Any:
    """A copy that shares no buffer with a jax array, which its owner may donate or delete.

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
        eqns = [
            eqn
            if all(_frozen(inner, known) is inner for inner in bodies(eqn))
            else with_bodies(eqn, lambda inner: _frozen(inner, known))
            for eqn in body.eqns
        ]
        if any(new is not old for new, old in zip(eqns, body.eqns, strict=True)):
            body = body.replace(eqns=eqns)
        held = constants(jaxpr)
        if body is not open_jaxpr(jaxpr) or any(isinstance(value, np.ndarray) for value in held):
            consts = [own_copy(value) for value in held]
            known[id(jaxpr)] = ClosedJaxpr(body, consts) if isinstance(jaxpr, ClosedJaxpr) else body
        else:
            known[id(jaxpr)] = jaxpr
    return known[id(jaxpr)]


def _operands_of_bodies(eqn: JaxprEqn) -> list[dict[int, Var]]:
    """For each body of an equation, its inputs by the place of the operand they stand for."""
    inner = [open_jaxpr(body).invars for body in bodies(eqn)]
    return [
        # Of an unknown form: what the body reads counts as read by the equation.
        dict(zip(places, inputs, strict=True)) if len(places) == len(inputs) else {}
        for places, inputs in zip(operands_of_bodies(eqn), inner, strict=True)
    ]


# --- evaluates a program with operands in the place of arrays that are baked into it
#
# An array that sits in a body comes in as one more operand of the equation that holds the body, at
# each level down to it. Bodies that hold none of the arrays are replayed as they are.
#
# The operands are new inputs, not what the program is differentiated by: the rules of a custom_jvp
# or a custom_vjp take them for constants.


_Given: TypeAlias = Mapping[Identity, Any]  # what to put in the place of which array
_Rule: TypeAlias = Callable[["Substitution", JaxprEqn, Values, _Given], Values]
_RULES: dict[str, _Rule] = {}  # by primitive; the bodies of others are left as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Substitution:
    """One evaluation; remembers what it found out about bodies that occur many times."""

    wanted: frozenset[Identity]
    _held: dict[int, tuple[Identity, ...]] = dataclasses.field(default_factory=dict)
    _jitted: dict[tuple, Callable] = dataclasses.field(default_factory=dict)

    def evaluate(self, jaxpr: Any, args: Sequence[Any], given: _Given) -> Values:
        """The results of a jaxpr on `args`, with what is given instead of its arrays."""

        def handle(eqn: JaxprEqn, values: Values) -> Values:
            values = instead(eqn.invars, values)
            rule = _RULES.get(_compat.name_of(eqn))
            needed = self.held_in(*bodies(eqn)) if rule else ()
            if rule is None or not needed:
                return replay(eqn, values)
            return rule(self, eqn, values, {identity: given[identity] for identity in needed})

        def instead(atoms: Sequence[Any], values: Sequence[Any]) -> Values:
            return [
                _instead(atom.val, given) if isinstance(atom, Literal) else value
                for atom, value in zip(atoms, values, strict=True)
            ]

        body = open_jaxpr(jaxpr)
        handlers = {place: handle for place, eqn in enumerate(body.eqns) if self._held_by(eqn)}
        consts = [_instead(value, given) for value in constants(jaxpr)]
        return instead(body.outvars, run(jaxpr, args, handlers, consts=consts))

    def held_in(self, *jaxprs: Any) -> tuple[Identity, ...]:
        """The wanted arrays in some bodies, at any depth, each once, in order."""
        for jaxpr in jaxprs:
            if id(jaxpr) not in self._held:  # the program is alive, so no other has this address
                body = open_jaxpr(jaxpr)
                held = self._wanted_of([*constants(jaxpr), *_literals(body.outvars)])
                held += [identity for eqn in body.eqns for identity in self._held_by(eqn)]
                self._held[id(jaxpr)] = tuple(dict.fromkeys(held))
        return tuple(dict.fromkeys(held for jaxpr in jaxprs for held in self._held[id(jaxpr)]))

    def _held_by(self, eqn: JaxprEqn) -> tuple[Identity, ...]:
        inner = bodies(eqn) if _compat.name_of(eqn) in _RULES else ()
        return (*self._wanted_of(_literals(eqn.invars)), *self.held_in(*inner))

    def _wanted_of(self, values: Sequence[Any]) -> list[Identity]:
        return [identity for value in values if (identity := array_identity(value)) in self.wanted]

    def evaluator(self, jaxpr: Any, wanted: Iterable[Identity]) -> Callable[..., Values]:
        """The results of a jaxpr, as a function of the wanted arrays and then its inputs."""
        identities = tuple(wanted)

        def evaluate(*args: Any) -> Values:
            count = len(identities)
            given = dict(zip(identities, args[:count], strict=True))
            return self.evaluate(jaxpr, args[count:], given)

        return evaluate

    def widened(self, jaxpr: Any, given: _Given) -> Any:
        """The body with the arrays as its first inputs."""
        types = [jax.typeof(value) for value in given.values()]
        new = jax.make_jaxpr(self.evaluator(jaxpr, given))(*types, *open_jaxpr(jaxpr).in_avals)
        if list(new.out_avals) != list(open_jaxpr(jaxpr).out_avals):
            raise AssertionError(f"a body with operands added has other results: {new.out_avals}")
        return in_form_of(jaxpr, new)

    def jitted(self, eqn: JaxprEqn, given: _Given) -> Callable[..., Values]:
        """The jit of an equation, which takes the arrays first.

        One object for all equations of one body: it is then traced once and lowered once.
        """
        params = eqn.params
        key = (id(params["jaxpr"]), *(id(params[name]) for name in _JIT_PARAMS), *given)
        if key in self._jitted:
            return self._jitted[key]
        count, body = len(given), self.evaluator(params["jaxpr"], given)
        body.__name__ = body.__qualname__ = params["name"]  # it is part of the cache key
        in_shardings = [None] * count + _told(params["in_shardings"])
        out_shardings = _told(params["out_shardings"])
        donated = [count + place for place, gone in enumerate(params["donated_invars"]) if gone]
        self._jitted[key] = jax.jit(
            body,
            in_shardings=tuple(in_shardings) if any(in_shardings) else None,
            out_shardings=out_shardings if any(out_shardings) else None,
            donate_argnums=donated,
            keep_unused=params["keep_unused"],
            inline=params["inline"],
            compiler_options=dict(params["compiler_options_kvs"]) or None,
        )
        return self._jitted[key]


_JIT_PARAMS = ("name", "in_shardings", "out_shardings", "donated_invars", "compiler_options_kvs")


def _instead(value: Any, given: _Given) -> Any:
    identity = array_identity(value)
    return value if identity is None else given.get(identity, value)


def _literals(atoms: Sequence[Any]) -> list[Any]:
    return [atom.val for atom in atoms if isinstance(atom, Literal)]


def _told(shardings: Sequence[Any]) -> list[Any]:
    """None where the user said nothing; JAX has no public name for what it puts there."""
    return [item if isinstance(item, jax.sharding.Sharding) else None for item in shardings]


def _rule(*primitives: str) -> Callable[[_Rule], _Rule]:
    def add(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(primitives, function))
        return function

    return add


@_rule("jit")
def _jit(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    return substitution.jitted(eqn, given)(*given.values(), *values)


@_rule("remat2", "custom_jvp_call", "custom_vjp_call")
def _call(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    """Not called again through `jax.checkpoint`, which cannot say that it is differentiated."""
    name = "jaxpr" if _compat.name_of(eqn) == "remat2" else "call_jaxpr"
    params = {**eqn.params, name: substitution.widened(eqn.params[name], given)}
    if "num_consts" in params:  # the first operands, which are hidden from the user's rules
        params["num_consts"] += len(given)
    return replay(eqn.replace(params=params), [*given.values(), *values])


@_rule("cond")
def _cond(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    """All branches take what any of them needs."""
    branches = [substitution.widened(branch, given) for branch in eqn.params["branches"]]
    index, *rest = values
    params = {**eqn.params, "branches": tuple(branches)}
    return replay(eqn.replace(params=params), [index, *given.values(), *rest])


@_rule("while")
def _while(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    """Not called again through `lax.while_loop`: a vmapped condition is not a scalar."""
    params, count = eqn.params, eqn.params["cond_nconsts"]
    condition, body = (
        {held: given[held] for held in substitution.held_in(params[name])}
        for name in ("cond_jaxpr", "body_jaxpr")
    )
    params = {
        **params,
        "cond_jaxpr": substitution.widened(params["cond_jaxpr"], condition),
        "cond_nconsts": count + len(condition),
        "body_jaxpr": substitution.widened(params["body_jaxpr"], body),
        "body_nconsts": params["body_nconsts"] + len(body),
    }
    operands = [*condition.values(), *values[:count], *body.values(), *values[count:]]
    return replay(eqn.replace(params=params), operands)


@_rule("scan")
def _scan(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    """Called again through `lax.scan`: how the equation counts its operands is version-bound."""
    params = eqn.params
    layout = _compat.scan_layout(params, len(eqn.invars), len(eqn.outvars))
    consts_end, carry_size = len(layout.constants), len(layout.carries_in)
    carry_end = consts_end + carry_size

    def step(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = substitution.evaluate(params["jaxpr"], [*values[:consts_end], *carry, *xs], given)
        return outs[:carry_size], outs[carry_size:]

    carry, ys = lax.scan(
        step,
        values[consts_end:carry_end],
        values[carry_end:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


@_rule("shard_map")
def _shard_map(substitution: Substitution, eqn: JaxprEqn, values: Values, given: _Given) -> Values:
    """Each device gets the whole arrays."""
    body = substitution.evaluator(eqn.params["jaxpr"], given)
    in_specs = (*[P()] * len(given), *eqn.params["in_specs"])
    widened = eqn.replace(params={**eqn.params, "in_specs": in_specs})
    return call_shard_map(widened, body, [*given.values(), *values])
