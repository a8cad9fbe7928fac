"""Where a training loop's first state belongs: where the program will return the next one.

A state that starts on one device comes back cut over all of them. To jit that is another signature,
so the same program is compiled twice. What is donated and returned is put in its place before the
first call; jit alone cannot, for it learns of the pmaps inside only while it traces.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding

from jax_dist._compat import JitOptions
from jax_dist.passes import interpreter
from jax_dist.rewriting import remesh
from jax_dist.rewriting.pmap_sites import pmap_site


def first_places(
    jaxpr: ClosedJaxpr, donated: Collection[int], mesh: Mesh | None
) -> dict[int, NamedSharding]:
    """The inputs that are donated, read by pmaps, and returned in the same type: the state.

    Args:
      jaxpr: the program, before it is rewritten.
      donated: inputs that the program itself donates; those that a pmap inside donates count too.
      mesh: where pmaps are moved; None if they stay.

    Returns:
      By number of the input, how the pmap that reads it wants it to lie.
    """
    numbers = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}
    found: dict[int, set[NamedSharding]] = {}
    _collect(jaxpr.jaxpr, numbers, set(donated), mesh, found)
    returned = set(map(_type, jaxpr.out_avals))
    return {
        number: next(iter(wanted))
        for number, wanted in found.items()
        if len(wanted) == 1 and _type(jaxpr.in_avals[number]) in returned
    }


def donated_leaves(options: JitOptions, args: tuple, kwargs: Mapping[str, Any]) -> set[int]:
    """Which leaves of the arguments the user's own jit donates."""
    owners: list[int | str] = []
    for owner, value in [*enumerate(args), *sorted(kwargs.items())]:
        owners += [owner] * len(jax.tree.leaves(value))
    donated = {*options.donate_argnums, *options.donate_argnames}
    return {index for index, owner in enumerate(owners) if owner in donated}


def is_anywhere(leaf: Any) -> bool:
    """Whether nobody has said on which devices it should lie."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed
    return isinstance(leaf, np.ndarray)


def _collect(
    jaxpr: Jaxpr,
    numbers: Mapping[Var, int],
    donated: set[int],
    mesh: Mesh | None,
    found: dict[int, set[NamedSharding]],
) -> None:
    for eqn in jaxpr.eqns:
        read = _read(eqn, numbers)
        if not read:
            continue
        site = pmap_site(eqn)
        if site is not None:
            wanted = remesh.operand_shardings(site, mesh) if donated & set(read.values()) else None
            for place, number in read.items():
                if wanted and number in donated:
                    found.setdefault(number, set()).add(wanted[place])
        elif "donated_invars" in eqn.params:  # a jit
            body = interpreter.open_jaxpr(eqn.params["jaxpr"])
            inner = {body.invars[place]: number for place, number in read.items()}
            too = {number for place, number in read.items() if eqn.params["donated_invars"][place]}
            _collect(body, inner, donated | too, mesh, found)


def _read(eqn: JaxprEqn, numbers: Mapping[Var, int]) -> dict[int, int]:
    """By place among its operands, the inputs of the program."""
    return {
        place: numbers[atom]
        for place, atom in enumerate(eqn.invars)
        if isinstance(atom, Var) and atom in numbers
    }


def _type(aval: Any) -> tuple:
    return aval.shape, aval.dtype
