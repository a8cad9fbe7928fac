"""Evaluation of a jaxpr by binding each equation again, in the current context.

The mesh that a body was traced for (in types, literals, contexts and some parameters) is dropped,
and each inner body is traced again: JAX then types all of it for the mesh and the axes of the
context. On the way, chosen equations can be handled otherwise, at any depth.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.constants import is_key
from jax_dist._passes.interpreter import Atom, Handler, Values, record_of

_Evaluate: TypeAlias = Callable[[Any, Sequence[Any]], Values]  # a jaxpr on values
_HandlerOf: TypeAlias = Callable[[JaxprEqn], Handler | None]


def evaluate(jaxpr: Any, args: Sequence[Any], handler_of: _HandlerOf = lambda _: None) -> Values:
    """Return the results of a jaxpr on `args`, each equation bound again in the current context.

    `handler_of` replaces equations: for these it returns a function `(eqn, values) -> results`, to
    which the values of the operands are passed, and for all others None.
    """
    context = interpreter.context_here()
    bind = lambda eqn, values: bind_again(eqn, values, handler_of, context)
    outs = interpreter.run(jaxpr, args, lambda eqn: bind)  # the same function for all equations
    return drop_mesh_of_literals(interpreter.open_jaxpr(jaxpr).outvars, outs)


def bind_again(
    eqn: JaxprEqn, values: Values, handler_of: _HandlerOf = lambda _: None, context: Any = None
) -> Values:
    """Return the results of one equation on values, typed for the mesh of the current context.

    `handler_of` is asked about this equation and those in its bodies, see `evaluate`. `context` is
    the one that JAX gives to new equations, if the caller has it.
    """
    values = drop_mesh_of_literals(eqn.invars, values)
    if (handler := handler_of(eqn)) is not None:
        return handler(eqn, values)
    evaluate_body = functools.partial(evaluate, handler_of=handler_of)
    name, call = _compat.name_of(eqn), record_of(eqn).call
    if call == "inline":  # a jit
        (inner,) = interpreter.bodies(eqn)
        run_inner = lambda *args: evaluate_body(inner, args)
        run_inner.__name__ = run_inner.__qualname__ = eqn.params.get("name", name)
        return jax.jit(run_inner)(*values)
    if call == "custom_rule":  # a custom_jvp or custom_vjp
        return _call_without_rule(eqn, values, evaluate_body)
    if name == "shard_map":
        return _call_shard_map(eqn, values, evaluate_body)
    # All others keep their parameters, except for bodies, which are traced again, and shardings: a
    # NamedSharding, such as `out_sharding`, is of the mesh of the first trace.
    params = {k: None if isinstance(v, NamedSharding) else v for k, v in eqn.params.items()}
    eqn = eqn.replace(ctx=context or interpreter.context_here(), params=params)
    trace_body = functools.partial(_trace_again, evaluate_body)
    return interpreter.replay(interpreter.with_bodies(eqn, trace_body), values)


def _trace_again(evaluate_body: _Evaluate, body: Any) -> Any:
    """Return a body of an equation, open or closed as it came, traced without its mesh."""
    avals: list[Any] = interpreter.open_jaxpr(body).in_avals
    if any(type(aval).__name__ == "AbstractRef" for aval in avals):  # a kernel knows no mesh
        return body
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    traced = jax.make_jaxpr(lambda *args: evaluate_body(body, args))(*types)
    is_closed = isinstance(body, ClosedJaxpr)
    if not traced.consts:
        return traced if is_closed else traced.jaxpr
    # The equation has no operands for new constants: they become literals.
    source = traced.jaxpr.replace(constvars=[])
    builder = interpreter.Builder(ClosedJaxpr(source, ()) if is_closed else source)
    return builder.finish(builder.add(traced, source.invars))


def _call_shard_map(eqn: JaxprEqn, values: Values, evaluate_body: _Evaluate) -> Values:
    """Call `jax.shard_map` with the specs of an equation, on a body that is traced again."""
    params = eqn.params
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    mapped = jax.shard_map(
        lambda *blocks: evaluate_body(params["jaxpr"], blocks),
        # Inside another shard_map, the mesh of the context says which axes are manual already.
        mesh=None if is_inside else params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


def _call_without_rule(eqn: JaxprEqn, values: Values, evaluate_body: _Evaluate) -> Values:
    """Call the function of a custom_jvp or custom_vjp; to differentiate the result is an error.

    Its own rule was traced for another mesh, and differentiating through its body instead could
    silently give another derivative.
    """

    @jax.custom_jvp
    def call(*args: Any) -> Values:
        return evaluate_body(eqn.params["call_jaxpr"], args)

    @call.defjvp
    def raise_error(primals: Any, tangents: Any) -> Any:
        line = interpreter.source_line(eqn) or "an unknown line"
        raise NotImplementedError(
            f"The function with a derivative of its own at {line} is moved to another mesh, where "
            "it cannot be differentiated. Take the gradient inside: rewrite(jax.grad(f))."
        )

    return call(*values)


def drop_mesh_of_literals(atoms: Sequence[Atom], values: Values) -> Values:
    """Return the values of atoms, with those of literals as Python or NumPy values.

    JAX may hold a literal as an array whose type names a mesh: `Array(2.0)`, weakly typed, becomes
    the Python number 2.0, which can be combined with arrays on any mesh.
    """
    pairs = zip(atoms, values, strict=True)
    return [
        _drop_mesh_of_literal(atom) if isinstance(atom, Literal) else value for atom, value in pairs
    ]


def _drop_mesh_of_literal(literal: Literal) -> Any:
    """Return a literal as a Python number if it has the type of one, else as a NumPy array."""
    aval: Any = literal.aval
    if is_key(literal.val):
        return literal.val
    array = np.asarray(literal.val)
    if aval.weak_type and array.ndim == 0:
        number = array.item()
        if jax.typeof(number).dtype == aval.dtype:
            return number
    return array.astype(aval.dtype, copy=False)
