"""What a collective costs on a ring of devices: the bytes that each device sends.

`n` is the number of devices that take part, `b` the bytes of the result on one device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist.passes.interpreter import Handler
from jax_dist.passes.uniformity import AxisName, Same

_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "all-reduce": lambda b, n: b * 2 * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b if n > 1 else 0.0,
    "reduce-scatter": lambda b, n: b * (n - 1),  # of n blocks, each as large as the result
}


def ring_bytes(kind: str, result_bytes: float, size: int) -> float:
    """The bytes that one device sends on a ring, in one call.

    >>> ring_bytes("all-gather", 400, 4), ring_bytes("all-reduce", 100, 4)
    (300.0, 150.0)

    Args:
      kind: as HLO spells it: all-gather, all-reduce, all-to-all, collective-permute or
        reduce-scatter.
      result_bytes: of the result of the collective on one device.
      size: how many devices take part: those of the axes, or of one group.

    Raises:
      ValueError: another kind.
    """
    if kind not in _SENT:
        raise ValueError(f"no collective of the name {kind!r}; there are {', '.join(_SENT)}")
    return float(_SENT[kind](result_bytes, size))


# --- what stands for a value that a gather would make, and what a rule says about one equation
#
# A gathered value is never built: every device keeps its own block, and a state says how the
# blocks of all devices would lie side by side. A rule gives the states of the results from those
# of the operands, and a way to compute the blocks; or it refuses.


Shape: TypeAlias = tuple[int, ...]
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

    def block(self, shape: Shape) -> Shape:
        """Of the whole `shape`, what one device keeps."""
        sizes = list(shape)
        for dimension, spread in self.spreads:
            sizes[dimension] //= spread.size
        return tuple(sizes)

    def at(self, spreads: dict[int, Spread]) -> "Gathered":
        """From the same gathers, spread over other dimensions."""
        return dataclasses.replace(self, spreads=tuple(sorted(spreads.items(), key=_dimension)))


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A value that every device holds as the program says."""

    same: Same  # the axes along which all devices hold the same


State: TypeAlias = Gathered | Whole


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedCollective:
    """One that a rewritten equation makes."""

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


Rule: TypeAlias = Callable[[JaxprEqn, Sequence[State]], GatherStep]
RULES: dict[str, Rule] = {}  # by primitive; an equation without a rule needs the whole value


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    def register(law: Rule) -> Rule:
        for primitive in primitives:
            RULES[primitive] = law
        return law

    return register


def no_rule(eqn: JaxprEqn, states: Sequence[State]) -> GatherStep:
    """The law of all other primitives."""
    del states
    raise Refuse(f"{eqn.primitive.name} needs the whole gathered value")


def spelled(names: Sequence[AxisName]) -> str:
    """'i' for one axis, ('i', 'j') for two."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def aval_of(atom: Any) -> Any:
    """Of arrays; a token would have no shape."""
    return atom.aval


def shape_of(atom: Any) -> Shape:
    return tuple(atom.aval.shape)


def no_collective(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive.name} of the gathered dimension has no matching collective"


def demand_same(eqn: JaxprEqn, gathered: Gathered, other: Whole) -> None:
    """A device may use its own copy of the other operand only if all copies are the same."""
    differing = [name for name in gathered.names if name not in other.same]
    if differing:
        raise Refuse(
            f"{eqn.primitive.name} mixes the gathered value with one that may differ between "
            f"the devices of {spelled(differing)}"
        )


def demand_no_sharding(eqn: JaxprEqn) -> None:
    """Inside a shard_map only the trivial sharding is seen, made by differentiation."""
    for name in ("sharding", "out_sharding"):
        sharding = eqn.params.get(name)
        if sharding is not None and any(part is not None for part in sharding.spec):
            raise Refuse(f"{eqn.primitive.name} asks for a sharding")


def with_params(eqn: JaxprEqn, **params: Any) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def as_typed(value: Any, atom: Any) -> Any:
    """The value with the type of `atom`: what a reduction made alike may be typed as varying."""
    missing = _compat.varying_axes(atom.aval) - _compat.varying_axes(jax.typeof(value))
    return _compat.to_varying(value, sorted(missing, key=str)) if missing else value


def _dimension(item: tuple[int, Spread]) -> int:
    return item[0]
