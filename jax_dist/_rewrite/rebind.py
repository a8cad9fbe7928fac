"""Evaluation of a jaxpr by binding each equation again, in the context of now.

What a traced body says of its mesh (in types, literals, contexts and some parameters) is left out,
and each inner body is traced again: JAX then types all of it for the mesh and the axes of the
context. On the way, chosen equations can be handled otherwise, at any depth, also in the rules of
custom_jvp and custom_vjp.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import Atom, Handler, Values
from jax_dist._rewrite.primitive_facts import record_of

_Evaluate: TypeAlias = Callable[[Any, Sequence[Any]], Values]  # a jaxpr on values
_AxisEnv: TypeAlias = Sequence[tuple[Any, int]]  # as the call was traced with
_HandlerOf: TypeAlias = Callable[[JaxprEqn], Handler | None]


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    handler_of: _HandlerOf = lambda _: None,
    axis_env: _AxisEnv = (),
) -> Values:
    """Return the values of a jaxpr, with each equation bound again.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handler_of: gives what to do with an equation instead; None for the usual.
      axis_env: the axes, with their sizes, that the jaxpr was traced with and that have others now.
    """
    context = interpreter.context_here()
    again = lambda jaxpr, args: evaluate(jaxpr, args, handler_of, axis_env)

    def bind(eqn: JaxprEqn, values: Values) -> Values:
        handler = handler_of(eqn)
        values = untied_literals(eqn.invars, values)
        return handler(eqn, values) if handler else _bind(eqn, values, again, axis_env, context)

    body = interpreter.open_jaxpr(jaxpr)
    handlers = dict.fromkeys(range(len(body.eqns)), bind)
    return untied_literals(body.outvars, interpreter.run(jaxpr, args, handlers, anew=True))


def bind_again(eqn: JaxprEqn, values: Values, handler_of: _HandlerOf = lambda _: None) -> Values:
    """Return the values of one equation, bound again if it has no handler; and those in it."""
    values = untied_literals(eqn.invars, values)
    handler = handler_of(eqn)
    if handler is not None:
        return handler(eqn, values)
    again = functools.partial(evaluate, handler_of=handler_of)
    return _bind(eqn, values, again, (), interpreter.context_here())


def _bind(
    eqn: JaxprEqn, values: Values, again: _Evaluate, axis_env: _AxisEnv, context: Any
) -> Values:
    def trace_again(body: Any) -> Any:
        avals: list[Any] = interpreter.open_jaxpr(body).in_avals
        if any(map(_compat.is_ref, avals)):  # of a kernel, which knows no mesh
            return body
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.make_jaxpr(lambda *args: again(body, args))(*types)

    name, params = _compat.name_of(eqn), eqn.params
    if record_of(eqn).call == "inline":
        (inner,) = interpreter.bodies(eqn)
        call = lambda *args: again(inner, args)
        call.__name__ = call.__qualname__ = params.get("name", name)
        return jax.jit(call)(*values)
    if name == "shard_map":
        body = params["jaxpr"]
        return interpreter.call_shard_map(eqn, lambda *blocks: again(body, blocks), values)
    if name == "custom_jvp_call":
        return _custom_jvp_anew(eqn, values, again, axis_env)
    if name == "custom_vjp_call":
        return _custom_vjp_anew(eqn, values, again, axis_env)
    without = {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}
    return interpreter.replay_with(eqn.replace(ctx=context, params=without), trace_again, values)


def untied_literals(atoms: Sequence[Atom], values: Values) -> Values:
    """Return the values, with those of literals as plain scalars: their types name a mesh."""

    def plain(literal: Literal) -> Any:
        aval: Any = literal.aval
        array = np.asarray(literal.val)
        if aval.weak_type and array.ndim == 0:
            scalar = array.item()
            if jax.typeof(scalar).dtype == aval.dtype:
                return scalar
        return array.astype(aval.dtype, copy=False)

    pairs = zip(atoms, values, strict=True)
    return [plain(atom) if isinstance(atom, Literal) else value for atom, value in pairs]


# --- functions with a rule of differentiation: a new function, whose rule is the derivative of the
# equation, traced where the equation was, and evaluated here


def _custom_jvp_anew(
    eqn: JaxprEqn, values: Values, evaluate: _Evaluate, axis_env: _AxisEnv
) -> Values:
    smooth = _smooth(eqn.invars)

    @jax.custom_jvp
    def call(*args: Any) -> Values:
        return evaluate(eqn.params["call_jaxpr"], args)

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        def push(*inputs: Any) -> tuple[Values, Values]:
            args, pushed = inputs[: len(values)], inputs[len(values) :]
            return jax.jvp(*_at_smooth(eqn, args, smooth), list(pushed))

        types = [*_types(eqn.invars), *[eqn.invars[place].aval for place in smooth]]
        jaxpr, tree = _traced_there(eqn, push, types, axis_env)
        flat = evaluate(jaxpr, [*primals, *[tangents[place] for place in smooth]])
        return jax.tree.unflatten(tree, flat)

    return call(*values)


def _custom_vjp_anew(
    eqn: JaxprEqn, values: Values, evaluate: _Evaluate, axis_env: _AxisEnv
) -> Values:
    smooth, smooth_out = _smooth(eqn.invars), _smooth(eqn.outvars)
    residuals: list[Any] = []  # the pullback's structure, and the types of its leaves

    @jax.custom_vjp
    def call(*args: Any) -> Values:
        return evaluate(eqn.params["call_jaxpr"], args)

    def forward(*args: Any) -> tuple[Values, Values]:
        def run(*args: Any) -> tuple[Values, Values]:
            fun, primals = _at_smooth(eqn, args, smooth)
            outs, pullback = jax.vjp(fun, *primals)
            leaves, structure = jax.tree.flatten(pullback)
            residuals[:] = [structure]
            return outs, leaves

        jaxpr, tree = _traced_there(eqn, run, _types(eqn.invars), axis_env)
        residuals.append(jaxpr.out_avals[len(eqn.outvars) :])
        return jax.tree.unflatten(tree, evaluate(jaxpr, args))

    def backward(kept: Values, cotangents: Values) -> tuple[Any, ...]:
        structure, types = residuals

        def run(*inputs: Any) -> Values:
            pullback = jax.tree.unflatten(structure, inputs[: len(kept)])
            whole = [jnp.zeros(aval.shape, jax.dtypes.float0) for aval in _types(eqn.outvars)]
            for place, cotangent in zip(smooth_out, inputs[len(kept) :], strict=True):
                whole[place] = cotangent
            return list(pullback(whole))

        types = [*types, *[eqn.outvars[place].aval for place in smooth_out]]
        jaxpr, _ = _traced_there(eqn, run, types, axis_env)
        grads = evaluate(jaxpr, [*kept, *[cotangents[place] for place in smooth_out]])
        by_place = dict(zip(smooth, grads, strict=True))
        return tuple(by_place.get(place) for place in range(len(values)))

    call.defvjp(forward, backward)
    return call(*values)


def _smooth(atoms: Sequence[Any]) -> list[int]:
    """Return the places of the values that have derivatives."""
    return [n for n, aval in enumerate(_types(atoms)) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def _types(atoms: Sequence[Any]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _at_smooth(
    eqn: JaxprEqn, args: Sequence[Any], smooth: Sequence[int]
) -> tuple[Callable[..., Values], list[Any]]:
    """Return the equation as a function of the arguments that have derivatives, and these."""

    def call(*chosen: Any) -> Values:
        whole = list(args)
        for place, value in zip(smooth, chosen, strict=True):
            whole[place] = value
        return interpreter.replay(eqn, whole)

    return call, [args[place] for place in smooth]


def _traced_there(
    eqn: JaxprEqn, fun: Callable, types: Sequence[Any], axis_env: _AxisEnv
) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of `fun` in the context of `eqn`, and the structure of its result."""
    with eqn.ctx.manager:
        # A function of its own each time, for JAX remembers what it has traced.
        jaxpr, shape = jax.make_jaxpr(
            lambda *args: fun(*args), axis_env=axis_env, return_shape=True
        )(*types)
    return jaxpr, jax.tree.structure(shape)
