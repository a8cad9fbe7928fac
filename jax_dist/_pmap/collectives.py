"""Collectives of a body, where its axis is not simply a mesh axis of the same name.

A mapped axis can lie over a mesh axis of another name, or hold several slices on each device, which
run as one vmap. JAX has a vmap rule for each collective, and some are wrong or missing. Here all
but sums are made from one gather: every slice gets the slices of all, `[N, *s]`, and takes its
part. That moves more than need be, and is exact.

A vmap also draws other bits from keys that are no threefry keys, and cannot call back to Python.
Such equations run slice by slice.

Shapes: `N` is the size of the axes that a collective goes over, `G` that of a group.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import Handler, Values, equations, named_axes
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.reductions import extreme, has_extremes
from jax_dist.errors import AxesError, UnsupportedError, refusal

MeshAxis: TypeAlias = str | tuple[str, ...]  # several count as one, the first the outermost


@dataclasses.dataclass(frozen=True, slots=True)
class AxisPlace:
    """Where a mapped axis lies."""

    name: Any  # as the collectives of the body say
    size: int  # slices in all
    mesh_axis: MeshAxis | None  # None: all on every device
    local: int  # slices on each device; more than 1 run as a vmap
    idle_axes: tuple[str, ...] = ()  # of the mesh: the same is computed all along them
    nested: bool = False  # whether it is used in a region inside another one

    @property
    def is_plain(self) -> bool:
        """Whether collectives can stay as they are."""
        return self.name == self.mesh_axis and self.local == 1 and not self.hides_index

    @property
    def hides_index(self) -> bool:
        """Whether JAX cannot be asked for the index of a device here."""
        return self.nested and not _compat.NESTED_MANUAL_AXIS_INDEX

    @property
    def local_name(self) -> str:
        """Of the vmap. Fixed, for it may be part of the program."""
        return f"{'_'.join(self.mesh_axes()) or self.name}_on_device"

    def mesh_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that it lies over."""
        return interpreter.names_of(self.mesh_axis)

    def names(self) -> list[MeshAxis]:
        """What the collectives have to name, the outer one first."""
        mesh_axis = [] if self.mesh_axis is None else [self.mesh_axis]
        return [*mesh_axis, *([self.local_name] if self.local > 1 else [])]

    def index(self) -> jax.Array:
        """Of this slice."""
        index = jnp.int32(0)
        if self.mesh_axis is not None and self.hides_index:
            rows = self.size // self.local
            index = lax.psum_scatter(jnp.arange(rows), self.mesh_axis) // rows
        elif self.mesh_axis is not None:
            index = lax.axis_index(self.mesh_axis)
        if self.local > 1:
            index = index * self.local + lax.axis_index(self.local_name)
        return index

    def gather(self, x: jax.Array) -> jax.Array:
        """The slices of all: `[*s] -> [size, *s]`."""
        shape = (self.size, *x.shape)
        for name in reversed(self.names()):
            x = lax.all_gather(x, name)
        return x.reshape(shape)


def handler_of(eqn: JaxprEqn, places: Mapping[Any, AxisPlace], fun_name: str) -> Handler | None:
    """What to do with an equation, given all mapped axes around; None for one that can stay."""
    if _compat.name_of(eqn) == "sharding_constraint":  # on a mesh that the body does not run on
        return lambda _, values: values
    named = [name for name in named_axes(eqn) if name in places]
    if any(not places[name].is_plain for name in named):
        rule = _RULES.get(_compat.name_of(eqn))
        if rule is None:
            raise _without_rule(eqn, fun_name)
        return lambda eqn, values: rule(
            _Over.of(places, eqn, fun_name), eqn, [jnp.asarray(x) for x in values]
        )
    batched = _batched(places)
    if batched and _runs_alone(eqn):
        return functools.partial(_slice_by_slice, batched)
    for body in interpreter.bodies(eqn):
        if any(_compat.is_ref(aval) for aval in interpreter.open_jaxpr(body).in_avals):
            for each in equations(body):  # which stay as they are
                if handler_of(each, places, fun_name) is not None:
                    raise _without_rule(each, fun_name)
    return None


def slice_by_slice(
    eqn: JaxprEqn, values: Values, places: Mapping[Any, AxisPlace], fun_name: str
) -> Values:
    """What an equation gives for each slice, where a vmap has no rule for it.

    Raises UnsupportedError where the slices have to meet in it.
    """
    if _collects_inside(eqn):
        raise _without_rule(eqn, fun_name)
    return _slice_by_slice(_batched(places), eqn, values)


def _without_rule(eqn: JaxprEqn, fun_name: str) -> UnsupportedError:
    return refusal(
        UnsupportedError,
        what=f"pmap of '{fun_name}' cannot run a collective on several slices a device",
        which=[_located(eqn)],
        why="the slices of one device run as one vmap, for which it has no rule here",
        do="Give it as many devices as slices, or use another collective.",
    )


def _located(eqn: JaxprEqn) -> str:
    return f"{_compat.name_of(eqn)} at {interpreter.source_line(eqn) or 'an unknown line'}"


def _dimensions(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dimensions that a sum goes over, too: the axes of vmaps in the body became them."""
    return tuple(dim for dim in eqn.params["axes"] if isinstance(dim, int))


def check_groups(eqn: JaxprEqn, sizes: Mapping[Any, int], fun_name: str) -> None:
    """Raises AxesError for groups that XLA would refuse in words of its own, or take in part.

    What goes over other axes than those of `sizes`, too, is not looked at.
    """
    groups, named = eqn.params.get("axis_index_groups"), named_axes(eqn)
    if groups is None or not sizes.keys() >= set(named):
        return
    size = math.prod(sizes[name] for name in named)
    if sorted(index for group in groups for index in group) != list(range(size)):
        raise refusal(
            AxesError,
            what=f"pmap of '{fun_name}' has axis_index_groups that do not hold each index once",
            which=[f"{[list(group) for group in groups]} in {_located(eqn)}"],
            why=f"the mapped axis has size {size}, and each of its devices takes part",
            do=f"Put the indices 0 to {size - 1} into groups, each of them once.",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Over:
    """What one collective goes over: its axes, and groups of slices along them."""

    places: tuple[AxisPlace, ...]  # outermost first
    groups: np.ndarray  # `[N, G]`: for each slice, the slices of its group, then the first again
    own: np.ndarray  # `[N]`: its place among them
    count: np.ndarray  # `[N]`: how many they are, up to `G`
    whole: bool  # whether there is one group

    @staticmethod
    def of(places: Mapping[Any, AxisPlace], eqn: JaxprEqn, fun_name: str) -> "_Over":
        named = tuple(  # the others are axes of vmaps around the mapped function
            places.get(name) or AxisPlace(name, lax.axis_size(name), name, 1)
            for name in named_axes(eqn)
        )
        size = math.prod(place.size for place in named)
        check_groups(eqn, {place.name: place.size for place in named}, fun_name)
        said = eqn.params.get("axis_index_groups")
        all_groups = said or [range(size)]
        longest = max(map(len, all_groups))
        if min(map(len, all_groups)) < longest and record_of(eqn).over not in _OF_ANY_SIZE:
            raise refusal(
                AxesError,
                what=f"pmap of '{fun_name}' has axis_index_groups of unlike sizes in a collective "
                "that takes none",
                which=[_located(eqn)],
                why="the shape of its result depends on the size of the group",
                do="Use groups of one size; psum, pmax and pmin take any.",
            )
        groups = np.zeros((size, longest), np.int32)
        own, count = np.zeros((2, size), np.int32)
        for group in all_groups:
            for place, member in enumerate(group):
                groups[member], own[member], count[member] = group[0], place, len(group)
                groups[member, : len(group)] = group
        return _Over(named, groups, own, count, said is None)

    def index(self) -> jax.Array:
        """Of this slice, along all axes together."""
        index = jnp.int32(0)
        for place in self.places:
            index = index * place.size + place.index()
        return index

    def all(self, x: jax.Array) -> jax.Array:
        """The slices of all: `[*s] -> [N, *s]`."""
        shape = (len(self.own), *x.shape)
        for place in reversed(self.places):
            x = place.gather(x)
        return x.reshape(shape)

    def of_group(self, x: jax.Array) -> jax.Array:
        """The slices of this one's group, then the first again: `[*s] -> [G, *s]`."""
        everyone = self.all(x)
        return everyone if self.whole else everyone[jnp.asarray(self.groups)[self.index()]]

    def sum_of_group(self, x: jax.Array) -> jax.Array:
        members = self.of_group(x)
        if len(set(self.count)) > 1:
            place = lax.broadcasted_iota(np.int32, members.shape, 0)
            is_own = place < jnp.asarray(self.count)[self.index()]
            members = jnp.where(is_own, members, jnp.zeros_like(members))
        return lax.reduce_sum(members, (0,))

    def own_place(self) -> jax.Array:
        """Among the slices of its group."""
        return self.index() if self.whole else jnp.asarray(self.own)[self.index()]

    def names(self) -> tuple[Any, ...]:
        return tuple(name for place in self.places for name in place.names())


def _axis_index(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    return [over.index()]


def _psum(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    values = [lax.reduce_sum(x, _dimensions(eqn)) for x in values]
    if not over.whole:
        return [over.sum_of_group(x) for x in values]
    for name in reversed(over.names()):
        values = [lax.psum(x, name) for x in values]
    return values


def _extreme(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    """With NaN, as a vmap has it; pmax on CPU loses it."""
    kind, dims = "max" if _compat.name_of(eqn) == "pmax" else "min", _dimensions(eqn)
    if over.names() and over.whole and all(has_extremes(x.dtype) for x in values):
        return [extreme(kind, x, dims, over.names()) for x in values]
    reduce = jnp.max if kind == "max" else jnp.min
    return [reduce(over.of_group(reduce(x, dims)), 0) for x in values]


def _all_gather(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    gathered = over.of_group(values[0])
    return [joined(gathered, eqn.params["all_gather_dimension"], tiled=eqn.params["tiled"])]


def _reduce_scatter(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    dim = eqn.params["scatter_dimension"]
    total = over.sum_of_group(values[0])
    part = jnp.moveaxis(split(total, dim, over.groups.shape[1]), dim, 0)[over.own_place()]
    return [part if eqn.params["tiled"] else lax.squeeze(part, [dim])]


def _all_to_all(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    """Each slice sends a part to every other one: `[.., G * n, ..]`."""
    dim = eqn.params["split_axis"]
    sent = jnp.moveaxis(split(values[0], dim, over.groups.shape[1]), dim, 0)  # by receiver
    received = over.of_group(sent)[:, over.own_place()]  # by sender
    return [joined(received, eqn.params["concat_axis"], tiled=True)]


def _ppermute(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    """What nobody sends to gets zeros."""
    pairs = eqn.params["perm"]
    sides = [set(side) for side in zip(*pairs, strict=True)]
    slices = range(len(over.own))
    if any(len(side) < len(pairs) or not side.issubset(slices) for side in sides):
        where = interpreter.source_line(eqn) or "an unknown line"
        raise refusal(
            AxesError,
            what="ppermute sources and destinations must be unique, and slices of its axes",
            which=[f"{[tuple(pair) for pair in pairs]} at {where}"],
            why=f"its axes have {len(slices)} slices, numbered from 0, and each gets one value",
            do=f"Give pairs of indices from 0 to {len(slices) - 1}, each of them at most once a "
            "side.",
        )
    sender = np.full(len(slices), -1, np.int32)
    for source, target in pairs:
        sender[target] = source
    mine = jnp.asarray(sender)[over.index()]
    return [jnp.where(mine < 0, jnp.zeros_like(x), over.all(x)[mine]) for x in values]


def _pbroadcast(over: _Over, eqn: JaxprEqn, values: Values) -> Values:
    return [over.of_group(x)[eqn.params["source"]] for x in values]


_OF_ANY_SIZE = ("sum", "max", "min")  # the groups may be

_RULES: dict[str, Callable[[_Over, JaxprEqn, Values], Values]] = {  # others are refused
    "axis_index": _axis_index,
    "psum": _psum,
    "pmax": _extreme,
    "pmin": _extreme,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}


def joined(slices: jax.Array, dim: int, *, tiled: bool) -> jax.Array:
    """`[G, .., n, ..]` with the first dimension at `dim`; tiled, `[.., G * n, ..]`."""
    moved = jnp.moveaxis(slices, 0, dim)
    if not tiled:
        return moved
    count, size = moved.shape[dim], moved.shape[dim + 1]
    return moved.reshape((*moved.shape[:dim], count * size, *moved.shape[dim + 2 :]))


def split(x: jax.Array, dim: int, count: int) -> jax.Array:
    """`[.., count * n, ..] -> [.., count, n, ..]`"""
    return x.reshape((*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]))


def _runs_alone(eqn: JaxprEqn) -> bool:
    """Whether a vmap over an equation is something else than the equation for each slice."""
    if _collects_inside(eqn):
        return False
    name, record = _compat.name_of(eqn), record_of(eqn)
    if record.kind == "callback":
        return True
    if record.kind == "branch":  # a vmap runs all branches
        return bool(eqn.effects)
    if name == "while" and eqn.effects:  # and goes on with those that are at an end
        return True
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    keys = [x.dtype for x in avals if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    # The bits of other keys than threefry keys depend on how many of them are used together.
    return name == "rng_bit_generator" or any("fry" not in str(kind) for kind in keys)


def _collects_inside(eqn: JaxprEqn) -> bool:
    return any(named_axes(each) for body in interpreter.bodies(eqn) for each in equations(body))


def _batched(places: Mapping[Any, AxisPlace]) -> list[str]:
    return [place.local_name for place in places.values() if place.local > 1]


def _slice_by_slice(names: Sequence[str], eqn: JaxprEqn, values: Values) -> Values:
    """Runs an equation once for each slice on this device, one after the other.

    What is gathered over the axis of a vmap is the same for all its slices, so that JAX runs the
    loop over it once.
    """
    if not names:
        return interpreter.replay(eqn, values)
    name, *others = names
    everyone = [lax.all_gather(x, name) for x in values]
    turns = jnp.arange(lax.axis_size(name))  # an equation may have no operands
    outs = lax.map(lambda given: _slice_by_slice(others, eqn, given[1]), (turns, everyone))
    own = lax.axis_index(name)
    return [lax.dynamic_index_in_dim(out, own, keepdims=False) for out in outs]
