"""Gathers, what stands for their values, and what they cost; what a rule says of an equation.

A gathered value is never built: every device keeps its own block, and a state says how the blocks
of all devices would lie side by side. A rule gives the states of the results from those of the
operands, and a way to compute the blocks; or it refuses.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._rewrite.interpreter import Handler, Values, bodies, named_axes, open_jaxpr, replay
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import AxisName, Same

# `n` devices take part, and `b` are the bytes of the result on one device.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


def ring_bytes(kind: str, result_bytes: float, size: int) -> float:
    """The bytes that one device sends on a ring, in one call, by the bytes of its result.

    `kind` is one of HLO's: all-gather, all-reduce, all-to-all, collective-permute or
    reduce-scatter; `size` says how many devices take part: those of the axes, or of one group.

    >>> ring_bytes("all-gather", 400, 4), ring_bytes("all-reduce", 100, 4)
    (300.0, 150.0)

    Raises:
      ValueError: another kind.
    """
    if kind not in _SENT:
        raise ValueError(f"no collective of the name {kind!r}; there are {', '.join(_SENT)}")
    return float(_SENT[kind](result_bytes, size))


# --- what stands for a value that a gather would make, and what a rule says about one equation


Site: TypeAlias = tuple[int, ...]  # the places that lead to a gather, from the outermost body in


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How one dimension lies over devices: block `k` of `size` is that of device `k`."""

    names: tuple[AxisName, ...]  # the first is the most major
    groups: tuple[tuple[int, ...], ...] | None  # as axis_index_groups
    size: int  # devices, or devices of one group


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """Stands for blocks of all devices, concatenated along each spread dimension."""

    spreads: tuple[tuple[int, Spread], ...]  # by dimension, in order
    sites: tuple[Site, ...]  # the gathers that it comes from, in order of the program

    @property
    def names(self) -> tuple[AxisName, ...]:
        return tuple(dict.fromkeys(name for _, spread in self.spreads for name in spread.names))

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(dimension for dimension, _ in self.spreads)

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole `shape`, what one device keeps."""
        sizes = list(shape)
        for dimension, spread in self.spreads:
            sizes[dimension] //= spread.size
        return tuple(sizes)

    def at(self, spreads: dict[int, Spread]) -> "Gathered":
        """From the same gathers, spread over other dimensions."""
        ordered = sorted(spreads.items(), key=lambda item: item[0])
        return dataclasses.replace(self, spreads=tuple(ordered))

    def inserted(self, dimension: int) -> "Gathered":
        """With a new dimension, which is not spread."""
        return self.at({d + (d >= dimension): spread for d, spread in self.spreads})

    def without(self, gone: Sequence[int]) -> "Gathered":
        """With other dimensions gone."""
        return self.at({d - sum(other < d for other in gone): s for d, s in self.spreads})


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A value that every device holds as the program says."""

    same: Same  # the axes along which all devices hold the same


State: TypeAlias = Gathered | Whole


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedCollective:
    """One that a rewritten equation makes, in the place of gathers."""

    primitive: str  # of the user's equation: "reduce_sum"
    name: str  # "psum"
    kind: str  # as HLO spells it
    bytes: float  # of the result, on one device
    size: int  # devices that take part


@dataclasses.dataclass(frozen=True, slots=True)
class GatherStep:
    """What one equation becomes."""

    results: tuple[Gathered | None, ...]  # None: whole again
    emit: Handler  # from the blocks of gathered operands, and whole other ones
    collectives: tuple[EmittedCollective, ...] = ()


class Refuse(Exception):
    """Some gather has to be made after all; the text says why, for a report."""


def sites_of(states: Sequence[State]) -> tuple[Site, ...]:
    """The gathers that some values come from, in order of the program."""
    return tuple(
        sorted({s for state in states if isinstance(state, Gathered) for s in state.sites})
    )


def spelled(names: Sequence[AxisName]) -> str:
    """'i' for one axis, ('i', 'j') for two."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def aval_of(atom: Any) -> Any:
    """Of arrays; a token would have no shape."""
    return atom.aval


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


# --- the gathers of a program: what stands for them, which belong together, and what they cost
#
# Gathers whose values meet in one equation are kept or deferred together, so they are one group,
# and it is the group that has to be worth its while.


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """One all_gather; equal ones of the same operand are one."""

    eqn: JaxprEqn

    @property
    def bytes(self) -> float:
        """Of the result, on one device."""
        aval = aval_of(self.eqn.outvars[0])
        return math.prod(aval.shape) * aval.dtype.itemsize

    @property
    def spread(self) -> Spread:
        params, groups = self.eqn.params, self.eqn.params["axis_index_groups"]
        groups = None if groups is None else tuple(tuple(group) for group in groups)
        return Spread(named_axes(self.eqn), groups, params["axis_size"])

    def why_never(self) -> str | None:
        """Why it is none to look at; None: it is."""
        if self.eqn.params["axis_size"] == 1:
            return ""  # it sends nothing
        aval = aval_of(self.eqn.invars[0])
        if _compat.is_unreduced(aval):
            return "the gathered value is of an unreduced type"
        if self.spread.groups is not None and _compat.varying_axes(aval):
            return "JAX has no reduction over groups of devices under check_vma=True"
        if not all(isinstance(size, int) for size in aval.shape):
            return "the gathered value has a dimension of unknown size"
        return None

    def deferred(self, state: State, site: Site) -> Gathered:
        """The state of what it gives. Of a gathered operand, it adds another spread."""
        params, spread = self.eqn.params, self.spread
        dimension = int(params["all_gather_dimension"])
        before = state if isinstance(state, Gathered) else Gathered((), ())
        if set(before.names) & set(spread.names):
            raise Refuse(f"all_gather over {spelled(spread.names)} of what was gathered over it")
        sites = tuple(sorted({*before.sites, site}))
        spreads = dict((before if params["tiled"] else before.inserted(dimension)).spreads)
        if dimension in spreads:  # the blocks of both, the last outermost
            inner = spreads[dimension]
            if spread.groups is not None or inner.groups is not None:
                raise Refuse("all_gather in groups along the gathered dimension")
            spread = Spread(spread.names + inner.names, None, spread.size * inner.size)
        return Gathered((), sites).at({**spreads, dimension: spread})


class _Group(NamedTuple):
    """Gathers that go together, and all that would come in their place."""

    sites: tuple[Site, ...]
    made: tuple[EmittedCollective, ...]


class Groups:
    """Which sites have met so far."""

    def __init__(self) -> None:
        self._first: dict[Site, Site] = {}
        self._made: list[tuple[Site, EmittedCollective]] = []

    def meet(self, sites: Sequence[Site], made: Iterable[EmittedCollective]) -> None:
        first = self._root(sites[0])
        for site in sites:
            self._first[self._root(site)] = first
        self._made.extend((first, each) for each in made)

    def all(self) -> list[_Group]:
        """In order of the program."""
        sites: dict[Site, list[Site]] = {}
        for site in sorted(self._first):
            sites.setdefault(self._root(site), []).append(site)
        made: dict[Site, list[EmittedCollective]] = {}
        for site, each in self._made:
            made.setdefault(self._root(site), []).append(each)
        return [_Group(tuple(sites[root]), tuple(made.get(root, ()))) for root in sites]

    def _root(self, site: Site) -> Site:
        while self._first.setdefault(site, site) != site:
            site = self._first[site]
        return site


def why_not_worth(gathers: Sequence[Gather], made: Sequence[EmittedCollective]) -> str:
    """Why the rewrite of a group would cost more than it saves; "" if it would not."""
    before = sum(ring_bytes("all-gather", each.bytes, each.spread.size) for each in gathers)
    after = sum(ring_bytes(each.kind, each.bytes, each.size) for each in made)
    if after < before or (after == before and len(made) <= len(gathers)):
        return ""
    return (
        f"{counted(len(made), 'reduction')} would send {after:,.0f} bytes from each device, "
        f"{counted(len(gathers), 'gather')} {'sends' if len(gathers) == 1 else 'send'} "
        f"{before:,.0f}"
    )


def counted(count: int, noun: str) -> str:
    return f"{'one' if count == 1 else count} {noun}{'' if count == 1 else 's'}"


# --- what the rules of `gather_rules` share


Cut: TypeAlias = Callable[[Any], Any] | None  # gives the block of a whole value; None: not needed


def only(states: Sequence[State]) -> Gathered:
    (state,) = states
    if not isinstance(state, Gathered):  # a rule is asked only for what has a gathered operand
        raise AssertionError("the one operand is not gathered")
    return state


def agreeing(eqn: JaxprEqn, states: Sequence[State]) -> Gathered:
    """The one way in which all gathered operands are spread."""
    gathered = [state for state in states if isinstance(state, Gathered)]
    if any(state.spreads != gathered[0].spreads for state in gathered):
        raise Refuse(f"{_compat.name_of(eqn)} mixes values that are gathered in different ways")
    return Gathered(gathered[0].spreads, sites_of(states))


def replayed(eqn: JaxprEqn, result: Gathered, **params: Any) -> GatherStep:
    """The same equation on the block, with other parameters where they hold sizes."""
    emit = lambda eqn, values: replay(with_params(eqn, params), values)
    return GatherStep((result,) * len(eqn.outvars), emit)


def replayed_together(
    eqn: JaxprEqn, states: Sequence[State], gathered: Gathered, result: Gathered
) -> GatherStep:
    """The same equation on the blocks of all operands, `gathered` or whole."""
    for state in states:
        if isinstance(state, Whole):
            demand_same(eqn, gathered, state)
    cuts = [
        block_cutter(eqn, shape_of(atom), dict(gathered.spreads))
        if isinstance(state, Whole)
        else None
        for atom, state in zip(eqn.invars, states, strict=True)
    ]
    emit = lambda eqn, values: replay(eqn, blocks_of(cuts, values))
    return GatherStep((result,) * len(eqn.outvars), emit)


def block_cutter(eqn: JaxprEqn, shape: tuple[int, ...], spreads: dict[int, Spread]) -> Cut:
    """Takes this device's block of a whole value, which may be all of it."""
    cut = {d: spread for d, spread in spreads.items() if shape and shape[d] != 1}
    if any(spread.groups is not None for spread in cut.values()):
        raise Refuse(f"{_compat.name_of(eqn)} mixes what is gathered in groups with a whole value")

    def take(value: Any) -> Any:
        for dimension, spread in cut.items():
            length = shape[dimension] // spread.size
            start = lax.axis_index(spread.names) * length
            value = lax.dynamic_slice_in_dim(value, start, length, dimension)
        return value

    return take


def blocks_of(cuts: Sequence[Cut], values: Sequence[Any]) -> Values:
    return [cut(value) if cut else value for cut, value in zip(cuts, values, strict=True)]


def demand_same(eqn: JaxprEqn, gathered: Gathered, other: Whole) -> None:
    """A device may use its own copy of the other operand only if all copies are the same."""
    differing = [name for name in gathered.names if name not in other.same]
    if differing:
        raise Refuse(
            f"{_compat.name_of(eqn)} mixes the gathered value with one that may differ between "
            f"the devices of {spelled(differing)}"
        )


def demand_no_sharding(eqn: JaxprEqn) -> None:
    """Inside a shard_map only the trivial sharding is seen, made by differentiation."""
    for name in ("sharding", "out_sharding"):
        sharding = eqn.params.get(name)
        if sharding is not None and any(part is not None for part in sharding.spec):
            raise Refuse(f"{_compat.name_of(eqn)} asks for a sharding")


def demand_other_axes(eqn: JaxprEqn, gathered: Gathered) -> None:
    names, name = named_axes(eqn), _compat.name_of(eqn).removesuffix("_invariant")
    if set(names) & set(gathered.names):
        raise Refuse(f"{name} over {spelled(names)} of what was gathered over it")


def demand_other(eqn: JaxprEqn, gathered: Gathered, dimension: Any) -> None:
    if int(dimension) in gathered.dimensions:
        raise no_collective(eqn)


def no_collective(eqn: JaxprEqn) -> Refuse:
    name = _compat.name_of(eqn)
    return Refuse(f"{name} of the gathered dimension has no matching collective")


def with_params(eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


# --- names and reasons for reports, in the words of the user


def why_outside(eqn: JaxprEqn) -> str:
    """Why an equation with bodies takes no gathered value."""
    record = record_of(eqn)
    if record.kind == "loop":
        return (
            f"the gather is outside the {plain_name(eqn)} and its use inside: a reduction over "
            "devices would run in every iteration"
        )
    if record.kind == "branch":
        return (
            "the gather is outside the cond and its use inside: a reduction over devices would "
            "stand in a branch that some of them may not take"
        )
    if record.call == "ruled":
        return (
            f"{plain_name(eqn)} has its own rule of differentiation, which is for the whole "
            "value: apply it to the block, before the gather"
        )
    return f"{plain_name(eqn)} takes the gathered value whole: gather inside it"


def plain_name(eqn: JaxprEqn) -> str:
    """In the user's words: "relu" of a custom_jvp_call."""
    name, call = _compat.name_of(eqn), record_of(eqn).call
    if call == "ruled":
        return _traced_function(bodies(eqn)[0])[0] or name
    return "checkpoint" if call == "checkpoint" else "while loop" if name == "while" else name


def _traced_function(jaxpr: Any) -> tuple[str, str]:
    """Name and file of the function that a jaxpr was traced from; "" where unknown."""
    info = open_jaxpr(jaxpr).debug_info
    return (info.func_name or "", info.func_filename or "") if info.func_src_info else ("", "")


def is_of_jax(jaxpr: Any) -> bool:
    """Whether it is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller in the process.
    """
    return _traced_function(jaxpr)[1].startswith(os.path.dirname(jax.__file__) + os.sep)
