"""Names and reasons for reports, in the words of the user."""

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist.passes.gather_moves import inserted
from jax_dist.passes.gather_states import (
    EmittedCollective,
    Gathered,
    Refuse,
    Site,
    Spread,
    State,
    aval_of,
    ring_bytes,
    spelled,
)
from jax_dist.passes.interpreter import bodies, open_jaxpr
from jax_dist.passes.uniformity import axes_of


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
        return _traced_function(bodies(eqn)[0])[0] or eqn.primitive.name
    return plain or eqn.primitive.name


def _traced_function(jaxpr: Any) -> tuple[str, str]:
    """Name and file of the function that a jaxpr was traced from; "" where unknown."""
    info = open_jaxpr(jaxpr).debug_info
    return (info.func_name or "", info.func_filename or "") if info.func_src_info else ("", "")


def is_of_jax(jaxpr: Any) -> bool:
    """Whether it is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller in the process.
    """
    return _traced_function(jaxpr)[1].startswith(os.path.dirname(jax.__file__) + os.sep)


# --- the gathers of a program: what stands for them, which belong together, and what they cost
#
# Gathers whose values meet in one equation are kept or deferred together, so they are one group,
# and it is the group that has to be worth its while.


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """One all_gather; equal ones of the same operand are one."""

    eqn: JaxprEqn
    spread: Spread

    @property
    def bytes(self) -> float:
        """Of the result, on one device."""
        aval = aval_of(self.eqn.outvars[0])
        return math.prod(aval.shape) * aval.dtype.itemsize


def spread_of(eqn: JaxprEqn) -> Spread:
    groups = eqn.params["axis_index_groups"]
    return Spread(
        names=axes_of(eqn),
        groups=None if groups is None else tuple(tuple(group) for group in groups),
        size=eqn.params["axis_size"],
    )


def why_never(eqn: JaxprEqn, spread: Spread) -> str | None:
    """Why this gather is none to look at; None: it is."""
    if spread.size == 1:
        return ""  # it sends nothing
    aval = aval_of(eqn.invars[0])
    if _compat.is_unreduced(aval):
        return "the gathered value is of an unreduced type"
    if not all(isinstance(size, int) for size in aval.shape):
        return "the gathered value has a dimension of unknown size"
    return None


def deferred(eqn: JaxprEqn, state: State, spread: Spread, site: Site) -> Gathered:
    """The state of what a gather gives. Of a gathered operand, it adds another spread."""
    dimension = int(eqn.params["all_gather_dimension"])
    before = state if isinstance(state, Gathered) else Gathered((), ())
    if set(before.names) & set(spread.names):
        raise Refuse(f"all_gather over {spelled(spread.names)} of what was gathered over it")
    sites = tuple(sorted({*before.sites, site}))
    if not eqn.params["tiled"]:
        spreads = inserted(before, dimension)
        return Gathered((), sites).at({**spreads, dimension: spread})
    spreads = dict(before.spreads)
    if dimension in spreads:
        spread = _beside(spread, spreads[dimension])
    return Gathered((), sites).at({**spreads, dimension: spread})


def _beside(outer: Spread, inner: Spread) -> Spread:
    """A tiled gather along a dimension that is gathered: the blocks of both, the last outermost."""
    if outer.groups is not None or inner.groups is not None:
        raise Refuse("all_gather in groups along the gathered dimension")
    return Spread(outer.names + inner.names, None, outer.size * inner.size)


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A collective that takes the place of gathers."""

    primitive: str  # of the user's equation: "reduce_sum"
    collective: EmittedCollective


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Gathers that go together, and all that would come in their place."""

    sites: tuple[Site, ...]
    made: tuple[Made, ...]


class Groups:
    """Which sites have met so far."""

    def __init__(self) -> None:
        self._first: dict[Site, Site] = {}
        self._made: list[tuple[Site, Made]] = []

    def meet(self, sites: Sequence[Site], made: Iterable[Made]) -> None:
        first = min(self._root(site) for site in sites)
        for site in sites:
            self._first[self._root(site)] = first
        self._made.extend((first, each) for each in made)

    def all(self) -> list[Group]:
        """In order of the program."""
        sites: dict[Site, list[Site]] = {}
        for site in sorted(self._first):
            sites.setdefault(self._root(site), []).append(site)
        made: dict[Site, list[Made]] = {}
        for site, each in self._made:
            made.setdefault(self._root(site), []).append(each)
        return [Group(tuple(sites[root]), tuple(made.get(root, ()))) for root in sites]

    def _root(self, site: Site) -> Site:
        while self._first.setdefault(site, site) != site:
            site = self._first[site]
        return site


def why_not_worth(gathers: Sequence[Gather], made: Sequence[Made]) -> str:
    """Why the rewrite of a group would cost more than it saves; "" if it would not."""
    before = sum(ring_bytes("all-gather", each.bytes, each.spread.size) for each in gathers)
    after = sum(
        ring_bytes(each.collective.kind, each.collective.bytes, each.collective.size)
        for each in made
    )
    if after < before or (after == before and len(made) <= len(gathers)):
        return ""
    return (
        f"{_counted(len(made), 'reduction')} would send {after:,.0f} bytes from each device, "
        f"{_counted(len(gathers), 'gather')} {'sends' if len(gathers) == 1 else 'send'} "
        f"{before:,.0f}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{'one' if count == 1 else count} {noun}{'' if count == 1 else 's'}"
