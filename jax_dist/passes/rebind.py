"""Evaluates a jaxpr by binding each equation again, in the context of now.

What a traced body says of its mesh (in types, literals, contexts and some parameters) is left out,
and each inner body is traced again: JAX then types all of it for the mesh and the axes of the
context. On the way, chosen equations can be handled otherwise, at any depth, also in the rules of
custom_jvp and custom_vjp.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding

from jax_dist.passes import custom_rules, interpreter
from jax_dist.passes.interpreter import Atom, Handler, Values
from jax_dist.passes.primitives import INLINED

HandlerOf: TypeAlias = Callable[[JaxprEqn], Handler | None]
AxisEnv: TypeAlias = Sequence[tuple[Any, int]]


class CannotRebind(Exception):
    """An equation is tied to the mesh that it was traced under; the text says which."""


def no_handler(eqn: JaxprEqn) -> None:
    """Every equation is bound again as it is."""
    del eqn


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    handler_of: HandlerOf = no_handler,
    axis_env: AxisEnv = (),
) -> Values:
    """The values of a jaxpr, with each equation bound again.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handler_of: gives what to do with an equation instead; None for the usual.
      axis_env: the axes, with their sizes, that the jaxpr was traced with and that have others now.
    """
    context = _context_here()

    def bind(eqn: JaxprEqn, values: Values) -> Values:
        handler = handler_of(eqn)
        values = untied_literals(eqn.invars, values)
        if handler is not None:
            return handler(eqn, values)
        return _bind(eqn, values, handler_of, axis_env, context)

    body = interpreter.open_jaxpr(jaxpr)
    handlers = dict.fromkeys(range(len(body.eqns)), bind)
    return untied_literals(body.outvars, interpreter.run(jaxpr, args, handlers, anew=True))


def check_rebindable(jaxpr: Any) -> None:
    """Raises CannotRebind if an equation, at any depth, is tied to the mesh of its trace."""
    for eqn in interpreter.equations(jaxpr):
        if eqn.primitive.name in ("sharding_constraint", "mesh_cast", "reshard"):
            where = interpreter.source_line(eqn)
            raise CannotRebind(f"the mapped function constrains a sharding itself, at {where}")


def bind_again(eqn: JaxprEqn, values: Values) -> Values:
    """One equation, bound again."""
    values = untied_literals(eqn.invars, values)
    return _bind(eqn, values, no_handler, (), _context_here())


def without_mesh(eqn: JaxprEqn, params: Mapping[str, Any] | None = None) -> JaxprEqn:
    """The equation in the context of now, with no mesh in its parameters, and some of them new."""
    return _untied(eqn.replace(ctx=_context_here(), params={**eqn.params, **(params or {})}))


def type_of(aval: Any, sizes: Mapping[int, int] | None = None) -> jax.ShapeDtypeStruct:
    """The type without its mesh, some dimensions of another size."""
    shape = [(sizes or {}).get(dim, size) for dim, size in enumerate(aval.shape)]
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _bind(
    eqn: JaxprEqn, values: Values, handler_of: HandlerOf, axis_env: AxisEnv, context: Any
) -> Values:
    def again(jaxpr: Any, args: Sequence[Any]) -> Values:
        return evaluate(jaxpr, args, handler_of, axis_env)

    def trace_again(body: Any) -> Any:
        types = [type_of(aval) for aval in interpreter.open_jaxpr(body).in_avals]
        return interpreter.in_form_of(body, jax.make_jaxpr(lambda *args: again(body, args))(*types))

    name, params = eqn.primitive.name, eqn.params
    if name in INLINED:
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return _named_jit(lambda *args: again(inner, args), params.get("name", name))(*values)
    if name == "shard_map":
        body = params["jaxpr"]
        return interpreter.call_shard_map(eqn, lambda *blocks: again(body, blocks), values)
    if name == "custom_jvp_call":
        return custom_rules.custom_jvp_anew(eqn, values, again, axis_env)
    if name == "custom_vjp_call":
        return custom_rules.custom_vjp_anew(eqn, values, again, axis_env)
    eqn = _untied(eqn.replace(ctx=context))
    return interpreter.replay(interpreter.with_bodies(eqn, trace_again), values)


def _untied(eqn: JaxprEqn) -> JaxprEqn:
    params = {
        key: None if isinstance(value, NamedSharding) else value
        for key, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def _named_jit(fun: Callable[..., Values], name: str) -> Callable[..., Values]:
    fun.__name__ = fun.__qualname__ = name
    return jax.jit(fun)


def untied_literals(atoms: Sequence[Atom], values: Values) -> Values:
    """The values, with those of literals as plain scalars: a literal has a type, and so a mesh."""
    return [
        _plain(atom) if isinstance(atom, Literal) else value
        for atom, value in zip(atoms, values, strict=True)
    ]


def _plain(literal: Literal) -> Any:
    aval: Any = literal.aval
    array = np.asarray(literal.val)
    if aval.weak_type and array.ndim == 0:
        scalar = array.item()
        if jax.typeof(scalar).dtype == aval.dtype:
            return scalar
    return array.astype(aval.dtype, copy=False)


def _context_here() -> Any:
    """The context that JAX gives to an equation that is traced now."""
    return jax.make_jaxpr(lax.neg)(1.0).eqns[0].ctx
