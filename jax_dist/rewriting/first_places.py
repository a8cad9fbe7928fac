"""Where arguments belong that nobody has put anywhere: where the pmaps that read them want them.

A state that starts on one device comes back cut over all of them. To jit that is another signature,
so the same program is compiled twice. So what pmaps read is put in its place before the program is
called; jit alone cannot, for it learns of the pmaps inside only while it traces.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding

from jax_dist.passes import interpreter
from jax_dist.rewriting import remesh
from jax_dist.rewriting.pmap_sites import pmap_site


def first_places(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> dict[int, NamedSharding]:
    """The inputs that pmaps read, all in the same way.

    Args:
      jaxpr: the program, before it is rewritten.
      mesh: where pmaps are moved; None if they stay.

    Returns:
      By number of the input, how the pmaps want it to lie.
    """
    numbers = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}
    found: dict[int, set[NamedSharding]] = {}
    _collect(jaxpr.jaxpr, numbers, mesh, found)
    return {number: next(iter(wanted)) for number, wanted in found.items() if len(wanted) == 1}


def is_anywhere(leaf: Any) -> bool:
    """Whether nobody has said on which devices it should lie."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed
    return isinstance(leaf, np.ndarray)


def _collect(
    jaxpr: Jaxpr,
    numbers: Mapping[Var, int],
    mesh: Mesh | None,
    found: dict[int, set[NamedSharding]],
) -> None:
    for eqn in jaxpr.eqns:
        read = _read(eqn, numbers)
        if not read:
            continue
        site = pmap_site(eqn)
        if site is not None:
            wanted = remesh.operand_shardings(site, mesh)
            for place, number in read.items():
                if wanted:
                    found.setdefault(number, set()).add(wanted[place])
        elif eqn.primitive.name == "jit":
            body = interpreter.open_jaxpr(eqn.params["jaxpr"])
            inner = {body.invars[place]: number for place, number in read.items()}
            _collect(body, inner, mesh, found)


def _read(eqn: JaxprEqn, numbers: Mapping[Var, int]) -> dict[int, int]:
    """By place among its operands, the inputs of the program."""
    return {
        place: numbers[atom]
        for place, atom in enumerate(eqn.invars)
        if isinstance(atom, Var) and atom in numbers
    }
