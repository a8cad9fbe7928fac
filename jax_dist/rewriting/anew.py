"""Evaluates a jaxpr under another mesh than the one it was traced under.

Types, literals, contexts and some parameters of a traced body carry the mesh of its shard_map. Each
equation is bound again without them, and each inner body is traced again; JAX then types all of it
for the mesh of the context.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import Atom, Values
from jax_dist.rewriting import custom_rules


class CannotMove(Exception):
    """An equation names its mesh in a way that cannot be told anew; the text says which."""


def evaluate_anew(jaxpr: Any, args: Sequence[Any]) -> Values:
    """The values of a jaxpr, with each equation bound again under the mesh of the context.

    Raises:
      CannotMove: see `check_movable`.
    """
    body = interpreter.open_jaxpr(jaxpr)
    places = dict.fromkeys(range(len(body.eqns)), bind_anew)
    return literals_anew(body.outvars, interpreter.run(jaxpr, args, places, anew=True))


def check_movable(jaxpr: Any) -> None:
    """Raises CannotMove if an equation, at any depth, is tied to the mesh it was traced under."""
    for eqn in interpreter.equations(jaxpr):
        if eqn.primitive.name in ("sharding_constraint", "mesh_cast", "reshard"):
            where = interpreter.source_line(eqn)
            raise CannotMove(f"the mapped function constrains a sharding itself, at {where}")


def bind_anew(eqn: JaxprEqn, values: Values) -> Values:
    name, params = eqn.primitive.name, eqn.params
    values = literals_anew(eqn.invars, values)
    if name == "jit":
        inner = params["jaxpr"]

        def evaluate(*args: Any) -> Values:
            return evaluate_anew(inner, args)

        evaluate.__name__ = evaluate.__qualname__ = params["name"]
        return jax.jit(evaluate)(*values)
    if name == "shard_map":
        return interpreter.call_shard_map(
            eqn, lambda *blocks: evaluate_anew(params["jaxpr"], blocks), values
        )
    if name == "custom_jvp_call":
        return custom_rules.custom_jvp_anew(eqn, values, evaluate_anew)
    if name == "custom_vjp_call":
        return custom_rules.custom_vjp_anew(eqn, values, evaluate_anew)
    return interpreter.replay(interpreter.with_bodies(without_mesh(eqn), _trace_anew), values)


def without_mesh(eqn: JaxprEqn, params: Mapping[str, Any] | None = None) -> JaxprEqn:
    """The equation in the context of now, with no mesh in its parameters, and some of them new."""
    untied = {
        key: None if isinstance(value, NamedSharding) else value
        for key, value in eqn.params.items()
    }
    return eqn.replace(ctx=_context_here(), params={**untied, **(params or {})})


def type_of(aval: Any, sizes: Mapping[int, int] | None = None) -> jax.ShapeDtypeStruct:
    """The type without its mesh, some dimensions of another size."""
    shape = [(sizes or {}).get(dim, size) for dim, size in enumerate(aval.shape)]
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _trace_anew(body: Any) -> Any:
    types = [type_of(aval) for aval in interpreter.open_jaxpr(body).in_avals]
    new = jax.make_jaxpr(lambda *args: evaluate_anew(body, args))(*types)
    return interpreter.in_form_of(body, new)


def literals_anew(atoms: Sequence[Atom], values: Values) -> Values:
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
