"""Where the operands and the results of loops and branches are in their bodies."""

from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.primitive_facts import record_of


def operands_of_bodies(eqn: JaxprEqn) -> list[list[int]]:
    """For each body of a call, a loop or a branch, which operand each of its inputs is."""
    places = list(range(len(eqn.invars)))
    if _compat.name_of(eqn) == "while":
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        found = {"cond_jaxpr": places[:first], "body_jaxpr": places[first:second]}
        return [found[name] + places[second:] for name in bodies_of_while(eqn)]
    first = int(record_of(eqn).kind == "branch")  # which its first operand picks
    return [places[first:] for _ in interpreter.bodies(eqn)]


def bodies_of_while(eqn: JaxprEqn) -> list[str]:
    """The parameters that its bodies are in, in the order of `interpreter.bodies`."""
    return [name for name in eqn.params if name in ("cond_jaxpr", "body_jaxpr")]


def carries(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Of a loop, the places of each carry: among its operands, and among its results."""
    if _compat.name_of(eqn) == "while":
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [(first + out, out) for out in range(len(eqn.outvars))]
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    return list(zip(layout.carries_in, layout.carries_out, strict=True))


def fixed_in(eqn: JaxprEqn) -> range:
    """Of a loop, the operands that are the same in all its turns."""
    if _compat.name_of(eqn) == "while":
        return range(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"])
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    return range(len(layout.constants))
