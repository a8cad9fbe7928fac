"""The gathers of a program: which there are, what they cost, and which of them belong together.

Gathers whose values meet in one equation are kept or deferred together, so they are one group, and
it is the group that has to be worth its while.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn

from jax_dist.passes.gather_states import Collective, Site, Spread, aval_of
from jax_dist.passes.ring import ring_bytes


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


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A collective that takes the place of gathers."""

    primitive: str  # of the user's equation: "reduce_sum"
    collective: Collective


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
        """Those for which a collective is made, in order of the program."""
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
