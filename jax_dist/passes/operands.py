"""Evaluates a program with operands in the place of arrays that are baked into it.

An array that sits in a body comes in as one more operand of the equation that holds the body, at
each level down to it. Bodies that hold none of the arrays are replayed as they are.

The operands are new inputs, not what the program is differentiated by: the rules of a custom_jvp
or a custom_vjp take them for constants.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.passes.constants import Identity, array_identity
from jax_dist.passes.interpreter import (
    Values,
    bodies,
    call_shard_map,
    constants,
    in_form_of,
    open_jaxpr,
    replay,
    run,
)

Given: TypeAlias = Mapping[Identity, Any]  # what to put in the place of which array
Rule: TypeAlias = Callable[["Substitution", JaxprEqn, Values, Given], Values]
RULES: dict[str, Rule] = {}  # by primitive; the bodies of others are left as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Substitution:
    """One evaluation; remembers what it found out about bodies that occur many times."""

    wanted: frozenset[Identity]
    _held: dict[int, tuple[Identity, ...]] = dataclasses.field(default_factory=dict)
    _jitted: dict[tuple, Callable] = dataclasses.field(default_factory=dict)

    def evaluate(self, jaxpr: Any, args: Sequence[Any], given: Given) -> Values:
        """The results of a jaxpr on `args`, with what is given instead of its arrays."""
        body = open_jaxpr(jaxpr)
        handlers = {
            place: functools.partial(self._handle, given)
            for place, eqn in enumerate(body.eqns)
            if self._held_by(eqn)
        }
        consts = [_instead(value, given) for value in constants(jaxpr)]
        outs = run(jaxpr, args, handlers, consts=consts)
        return [
            _instead(atom.val, given) if isinstance(atom, Literal) else out
            for atom, out in zip(body.outvars, outs, strict=True)
        ]

    def held_in(self, *jaxprs: Any) -> tuple[Identity, ...]:
        """The wanted arrays in some bodies, at any depth, each once, in order."""
        return tuple(dict.fromkeys(held for jaxpr in jaxprs for held in self._held_in(jaxpr)))

    def _held_in(self, jaxpr: Any) -> tuple[Identity, ...]:
        if id(jaxpr) not in self._held:  # the program is alive, so no other has this address
            body = open_jaxpr(jaxpr)
            values = [*constants(jaxpr), *_literals(body.outvars)]
            held = [*self._wanted_of(values), *[h for eqn in body.eqns for h in self._held_by(eqn)]]
            self._held[id(jaxpr)] = tuple(dict.fromkeys(held))
        return self._held[id(jaxpr)]

    def _held_by(self, eqn: JaxprEqn) -> tuple[Identity, ...]:
        inner = bodies(eqn) if eqn.primitive.name in RULES else ()
        return (*self._wanted_of(_literals(eqn.invars)), *self.held_in(*inner))

    def _wanted_of(self, values: Sequence[Any]) -> list[Identity]:
        return [identity for value in values if (identity := array_identity(value)) in self.wanted]

    def _handle(self, given: Given, eqn: JaxprEqn, values: Values) -> Values:
        values = [
            _instead(value, given) if isinstance(atom, Literal) else value
            for atom, value in zip(eqn.invars, values, strict=True)
        ]
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            return replay(eqn, values)
        needed = {identity: given[identity] for identity in self.held_in(*bodies(eqn))}
        return rule(self, eqn, values, needed) if needed else replay(eqn, values)

    def widened(self, jaxpr: Any, given: Given, place: int = 0) -> Any:
        """The body with the arrays as inputs, from `place` on."""
        end = place + len(given)

        def evaluate(*args: Any) -> Values:
            taken = dict(zip(given, args[place:end], strict=True))
            return self.evaluate(jaxpr, [*args[:place], *args[end:]], taken)

        avals = list(open_jaxpr(jaxpr).in_avals)
        avals[place:place] = [jax.typeof(value) for value in given.values()]
        new = jax.make_jaxpr(evaluate)(*avals)
        if list(new.out_avals) != list(open_jaxpr(jaxpr).out_avals):
            raise AssertionError(f"a body with operands added has other results: {new.out_avals}")
        return in_form_of(jaxpr, new)

    def jitted(self, eqn: JaxprEqn, given: Given) -> Callable[..., Values]:
        """The jit of an equation, which takes the arrays first.

        One object for all equations of one body: it is then traced once and lowered once.
        """
        key = (id(eqn.params["jaxpr"]), *(id(eqn.params[name]) for name in _JIT_PARAMS), *given)
        if key not in self._jitted:
            self._jitted[key] = self._jit(eqn.params, tuple(given))
        return self._jitted[key]

    def _jit(self, params: Mapping[str, Any], identities: Sequence[Identity]) -> Callable:
        count = len(identities)

        def body(*args: Any) -> Values:
            given = dict(zip(identities, args[:count], strict=True))
            return self.evaluate(params["jaxpr"], args[count:], given)

        body.__name__ = body.__qualname__ = params["name"]  # it is part of the cache key
        in_shardings = [None] * count + _told(params["in_shardings"])
        out_shardings = _told(params["out_shardings"])
        donated = [count + place for place, given in enumerate(params["donated_invars"]) if given]
        return jax.jit(
            body,
            in_shardings=tuple(in_shardings) if any(in_shardings) else None,
            out_shardings=out_shardings if any(out_shardings) else None,
            donate_argnums=donated,
            keep_unused=params["keep_unused"],
            inline=params["inline"],
            compiler_options=dict(params["compiler_options_kvs"]) or None,
        )


_JIT_PARAMS = ("name", "in_shardings", "out_shardings", "donated_invars", "compiler_options_kvs")


def _instead(value: Any, given: Given) -> Any:
    identity = array_identity(value)
    return value if identity is None else given.get(identity, value)


def _literals(atoms: Sequence[Any]) -> list[Any]:
    return [atom.val for atom in atoms if isinstance(atom, Literal)]


def _told(shardings: Sequence[Any]) -> list[Any]:
    """None where the user said nothing; JAX has no public name for what it puts there."""
    return [item if isinstance(item, jax.sharding.Sharding) else None for item in shardings]


def _rule(*primitives: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return add


@_rule("jit")
def _jit(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
    return substitution.jitted(eqn, given)(*given.values(), *values)


@_rule("remat2")
def _remat(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
    """Not called again through `jax.checkpoint`, which cannot say that it is differentiated."""
    params = {**eqn.params, "jaxpr": substitution.widened(eqn.params["jaxpr"], given)}
    return replay(eqn.replace(params=params), [*given.values(), *values])


@_rule("custom_jvp_call", "custom_vjp_call")
def _custom(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
    """The first `num_consts` operands are hidden from the user's rules."""
    params = {
        **eqn.params,
        "call_jaxpr": substitution.widened(eqn.params["call_jaxpr"], given),
        "num_consts": eqn.params["num_consts"] + len(given),
    }
    return replay(eqn.replace(params=params), [*given.values(), *values])


@_rule("cond")
def _cond(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
    """All branches take what any of them needs."""
    branches = [substitution.widened(branch, given) for branch in eqn.params["branches"]]
    index, *rest = values
    params = {**eqn.params, "branches": tuple(branches)}
    return replay(eqn.replace(params=params), [index, *given.values(), *rest])


@_rule("while")
def _while(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
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
def _scan(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
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
def _shard_map(substitution: Substitution, eqn: JaxprEqn, values: Values, given: Given) -> Values:
    """Each device gets the whole arrays."""

    def body(*args: Any) -> Values:
        taken = dict(zip(given, args[: len(given)], strict=True))
        return substitution.evaluate(eqn.params["jaxpr"], args[len(given) :], taken)

    in_specs = (*[P()] * len(given), *eqn.params["in_specs"])
    widened = eqn.replace(params={**eqn.params, "in_specs": in_specs})
    return call_shard_map(widened, body, [*given.values(), *values])
