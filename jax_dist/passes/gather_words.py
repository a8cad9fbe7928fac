"""Names and reasons for reports, in the words of the user."""

import os
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jax_dist.passes.interpreter import bodies, open_jaxpr


def why_outside(eqn: JaxprEqn) -> str:
    """Why an equation with bodies takes no gathered value."""
    name = eqn.primitive.name
    if name in ("scan", "while"):
        return (
            f"the gather is outside the {plain_name(eqn)} and its use inside: a reduction over "
            "devices would run in every iteration"
        )
    if name == "cond":
        return (
            "the gather is outside the cond and its use inside: a reduction over devices would "
            "stand in a branch that some of them may not take"
        )
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return (
            f"{plain_name(eqn)} has its own rule of differentiation, which is for the whole "
            "value: apply it to the block, before the gather"
        )
    return f"{plain_name(eqn)} takes the gathered value whole: gather inside it"


def plain_name(eqn: JaxprEqn) -> str:
    """In the user's words: "relu" of a custom_jvp_call."""
    plain = {"remat2": "checkpoint", "while": "while loop"}.get(eqn.primitive.name)
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return traced_function(bodies(eqn)[0])[0] or eqn.primitive.name
    return plain or eqn.primitive.name


def traced_function(jaxpr: Any) -> tuple[str, str]:
    """Name and file of the function that a jaxpr was traced from; "" where unknown."""
    info = open_jaxpr(jaxpr).debug_info
    return (info.func_name or "", info.func_filename or "") if info.func_src_info else ("", "")


def is_of_jax(jaxpr: Any) -> bool:
    """Whether it is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller in the process.
    """
    return traced_function(jaxpr)[1].startswith(os.path.dirname(jax.__file__) + os.sep)
