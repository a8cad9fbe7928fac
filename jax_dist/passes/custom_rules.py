"""custom_jvp and custom_vjp calls under another mesh, with their rules.

The rules of such a call are Python functions that JAX runs when it differentiates, on the types of
the mesh that the call was traced under. So they are traced there, when they are wanted, and what
they do is evaluated under the new mesh like the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import Values

Evaluate = Callable[[Any, Sequence[Any]], Values]  # a jaxpr on values, under the new mesh
AxisEnv = Sequence[tuple[Any, int]]  # as the call was traced with


def custom_jvp_anew(
    eqn: JaxprEqn, values: Values, evaluate: Evaluate, axis_env: AxisEnv = ()
) -> Values:
    """The call of a function with a jvp rule."""
    smooth = [place for place, var in enumerate(eqn.invars) if _is_inexact(var.aval)]

    @jax.custom_jvp
    def call(*args: Any) -> Values:
        return evaluate(eqn.params["call_jaxpr"], args)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        def push(*given: Any) -> tuple[Values, Values]:
            args, pushed = list(given[: len(values)]), given[len(values) :]
            return jax.jvp(_of_smooth(eqn, args, smooth), [args[n] for n in smooth], list(pushed))

        types = [*_types(eqn.invars), *[eqn.invars[place].aval for place in smooth]]
        jaxpr, tree = _traced_there(eqn, push, types, axis_env)
        flat = evaluate(jaxpr, [*primals, *[tangents[place] for place in smooth]])
        return jax.tree.unflatten(tree, flat)

    call.defjvp(rule)
    return call(*values)


def custom_vjp_anew(
    eqn: JaxprEqn, values: Values, evaluate: Evaluate, axis_env: AxisEnv = ()
) -> Values:
    """The call of a function with a vjp rule."""
    smooth = [place for place, var in enumerate(eqn.invars) if _is_inexact(var.aval)]
    smooth_out = [place for place, var in enumerate(eqn.outvars) if _is_inexact(var.aval)]
    residuals: list[Any] = []  # their types, and the pullback's structure

    @jax.custom_vjp
    def call(*args: Any) -> Values:
        return evaluate(eqn.params["call_jaxpr"], args)

    def forward(*args: Any) -> tuple[Values, Values]:
        def run(*given: Any) -> tuple[Values, Values]:
            chosen = [given[place] for place in smooth]
            outs, pullback = jax.vjp(_of_smooth(eqn, given, smooth), *chosen)
            leaves, structure = jax.tree.flatten(pullback)
            residuals[:] = [structure]
            return outs, leaves

        jaxpr, tree = _traced_there(eqn, run, _types(eqn.invars), axis_env)
        residuals.append(jaxpr.out_avals[len(eqn.outvars) :])
        return jax.tree.unflatten(tree, evaluate(jaxpr, args))

    def backward(kept: Values, cotangents: Values) -> tuple[Any, ...]:
        structure, types = residuals

        def run(*given: Any) -> Values:
            pullback = jax.tree.unflatten(structure, given[: len(kept)])
            coming = iter(given[len(kept) :])
            whole = [
                next(coming) if place in smooth_out else _no_cotangent(var.aval)
                for place, var in enumerate(eqn.outvars)
            ]
            return list(pullback(whole))

        coming = [eqn.outvars[place].aval for place in smooth_out]
        jaxpr, _ = _traced_there(eqn, run, [*types, *coming], axis_env)
        found = evaluate(jaxpr, [*kept, *[cotangents[place] for place in smooth_out]])
        given = dict(zip(smooth, found, strict=True))
        return tuple(given.get(place) for place in range(len(values)))

    call.defvjp(forward, backward)
    return call(*values)


def _of_smooth(eqn: JaxprEqn, args: Sequence[Any], smooth: Sequence[int]) -> Callable[..., Values]:
    """The call as a function of the arguments that have derivatives."""

    def call(*chosen: Any) -> Values:
        whole = list(args)
        for place, value in zip(smooth, chosen, strict=True):
            whole[place] = value
        return interpreter.replay(eqn, whole)

    return call


def _traced_there(
    eqn: JaxprEqn, fun: Callable, types: Sequence[Any], axis_env: AxisEnv
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fun` in the context of `eqn`, and the structure of its result."""
    trees = []

    def flat(*args: Any) -> Values:
        leaves, tree = jax.tree.flatten(fun(*args))
        trees.append(tree)
        return leaves

    with eqn.ctx.manager:
        jaxpr = jax.make_jaxpr(flat, axis_env=axis_env)(*types)
    return jaxpr, trees[-1]


def _types(atoms: Sequence[Any]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _no_cotangent(aval: Any) -> Any:
    return jnp.zeros(aval.shape, jax.dtypes.float0)
