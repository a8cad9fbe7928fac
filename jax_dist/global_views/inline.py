"""Calls that hold both what is shared and what varies, written out in the body around them.

An equation goes to one place: outside, or into an island. A jit around a whole step would have to
go into an island as one, and its update of shared parameters with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import INLINED, Atom, Values


def flattened(jaxpr: Any, is_inlined: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, list[Any]]:
    """A body without the calls that are to be written out, and the values of its first inputs.

    These are the constants. An open jaxpr of jax 0.12 has none of its own, so that here they are
    inputs on all versions.

    Args:
      jaxpr: open or closed.
      is_inlined: of a call, whether to write it out; asked of those in it, too.
    """
    flat = _Flat(is_inlined)
    body = interpreter.open_jaxpr(jaxpr)
    known: dict[Var, Atom] = {}
    constvars = list(body.constvars)
    flat.add(body.eqns, known)
    outvars = [flat.renamed(atom, known) for atom in body.outvars]
    values = [*interpreter.constants(jaxpr), *flat.const_values]
    made = Jaxpr(
        (),
        [*constvars, *flat.constvars, *body.invars],
        outvars,
        flat.eqns,
        body.effects,
        interpreter.unnamed(),
    )
    return made, values


class _Flat:
    """The equations so far. Each body that is written out gets variables of its own."""

    def __init__(self, is_inlined: Callable[[JaxprEqn], bool]):
        self.eqns: list[JaxprEqn] = []
        self.constvars: list[Var] = []
        self.const_values: Values = []
        self._is_inlined = is_inlined

    def add(self, eqns: Sequence[JaxprEqn], known: dict[Var, Atom]) -> None:
        for eqn in eqns:
            invars = [self.renamed(atom, known) for atom in eqn.invars]
            if eqn.primitive.name in INLINED and self._is_inlined(eqn):
                outs = self._written_out(eqn, invars)
                known.update(zip(eqn.outvars, outs, strict=True))
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                known.update(zip(eqn.outvars, outvars, strict=True))
                self.eqns.append(eqn.replace(invars=invars, outvars=outvars))

    def renamed(self, atom: Atom, known: Mapping[Var, Atom]) -> Atom:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    def _written_out(self, eqn: JaxprEqn, invars: Sequence[Atom]) -> list[Atom]:
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Var, Atom] = dict(zip(body.invars, invars, strict=True))
        for var, value in zip(body.constvars, interpreter.constants(jaxpr), strict=True):
            known[var] = new = Var(var.aval)
            self.constvars.append(new)
            self.const_values.append(value)
        self.add(body.eqns, known)
        return [self.renamed(atom, known) for atom in body.outvars]
