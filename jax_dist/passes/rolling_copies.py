"""Copies of the same equations, one after the other: how they are wired, and what one scan needs.

An operand is the same place's result in its own copy, or in the copy before (then it is carried),
or comes from before all copies: the same in each (shared), or another in each (stacked).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist.passes.interpreter import Atom, bodies
from jax_dist.passes.rolling_keys import literal_key
from jax_dist.passes.rolling_repeats import Stretch


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """What one copy gives to the next."""

    var: Var  # in the block
    first: Atom  # for the first copy, from before
    result: Var  # of the block


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """What each copy takes from before, another in each."""

    var: Var  # in the block
    atoms: tuple[Atom, ...]  # one for each copy
    slices: tuple[JaxprEqn, ...] = ()  # if so, each takes its slice of its atom

    @property
    def bytes(self) -> int:
        """That are copied: none where the slices lie in one array side by side."""
        return 0 if window(self) is not None else len(self.atoms) * bytes_of(self.var.aval)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What is read after the copies."""

    var: Var  # of the block
    outs: tuple[Var | None, ...]  # of each copy; None: not read

    @property
    def bytes(self) -> int:
        return len(self.outs) * bytes_of(self.var.aval)


@dataclasses.dataclass(frozen=True, slots=True)
class Roll:
    """A number of copies as a scan over one of them."""

    start: int  # place of the first equation of all
    copies: int
    period: int  # equations in a copy
    block: tuple[JaxprEqn, ...]  # one copy, without the slices that were taken before
    shared: tuple[Var, ...]
    carried: tuple[Carried, ...]
    stacked: tuple[Stacked, ...]
    last: tuple[Result, ...]  # of the last copy, and carried anyway
    results: tuple[Result, ...]  # stacked

    @property
    def stop(self) -> int:
        return self.start + self.copies * self.period

    @property
    def stacked_bytes(self) -> int:
        """On one device."""
        return sum(each.bytes for each in (*self.stacked, *self.results))


def shape_of(var: Var) -> tuple[int, ...]:
    aval: Any = var.aval
    return aval.shape


def bytes_of(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def window(stacked: Stacked) -> tuple[int, int] | None:
    """Dimension and start of the slices of one array that lie in it side by side, in order."""
    if not stacked.slices or len(set(map(id, stacked.atoms))) > 1:
        return None
    params = [eqn.params for eqn in stacked.slices]
    if any(stride != 1 for each in params for stride in each["strides"] or ()):
        return None
    shape = shape_of(stacked.var)
    starts = [each["start_indices"] for each in params]
    moved = [axis for axis in range(len(shape)) if len({start[axis] for start in starts}) > 1]
    if len(moved) != 1:
        return None
    (axis,) = moved
    first = starts[0][axis]
    wanted = [first + number * shape[axis] for number in range(len(starts))]
    return (axis, first) if [start[axis] for start in starts] == wanted else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A value that a copy makes."""

    place: int  # of the equation in its copy
    result: int
    age: int  # in copies: 0 in the same one, 1 in the next


_Source: TypeAlias = "_Made | Atom"


class Copies:
    """Equations of the same keys, over and over."""

    def __init__(self, eqns: Sequence[JaxprEqn], stretch: Stretch) -> None:
        self.start, self.period, self.copies = stretch.start, stretch.period, stretch.copies
        self._eqns = eqns[stretch.start : stretch.start + stretch.period * stretch.copies]
        self._made = {
            var: (place, result)
            for place, eqn in enumerate(self._eqns)
            for result, var in enumerate(eqn.outvars)
        }

    def longest_alike(self) -> tuple[int, int]:
        """The first copy and the number of the longest run that is wired alike."""
        best, first = (0, 1), 0
        while first < self.copies - best[1]:
            count = self._alike_from(first)
            if count > best[1]:
                best = first, count
            # What the first copy alone has in another way is outside of a run without it.
            first += 1 if first < _PEELED else max(count - 1, 1)
        return best

    def _alike_from(self, first: int) -> int:
        for copy in range(first + 1, self.copies):
            if not all(self._follows(first, copy, place) for place in range(self.period)):
                return copy - first
        return self.copies - first

    def _follows(self, first: int, copy: int, place: int) -> bool:
        """Whether an equation has its operands from where the first copies have them."""
        eqns = [self._eqn(number, place) for number in (first, first + 1, copy)]
        for atoms in zip(*[eqn.invars for eqn in eqns], strict=True):
            at_first, at_second, here = (
                self.source(first, number, atom)
                for number, atom in zip((first, first + 1, copy), atoms, strict=True)
            )
            if _differs(eqns[0], eqns[2]) and (_is_made(at_first) or _is_made(here)):
                return False
            if _is_made(at_first):
                alike = here == at_first
            elif isinstance(at_second, _Made):
                alike = at_second.age == 1 and here == at_second
            else:
                alike = not _is_made(here)
            if not alike or not _fits(eqns[0], atoms[0].aval, atoms[2].aval):
                return False
        return True

    def _eqn(self, copy: int, place: int) -> JaxprEqn:
        return self._eqns[copy * self.period + place]

    def source(self, first: int, copy: int, atom: Atom) -> _Source:
        """Where a copy has an operand from, if all before the first copy is outside."""
        found = None if isinstance(atom, Literal) else self._made.get(atom)
        if found is None or found[0] < first * self.period:
            return atom
        made_in, place = divmod(found[0], self.period)
        return _Made(place, found[1], copy - made_in)

    def rolled(self, first: int, count: int, last_read: Mapping[Any, int]) -> Roll:
        """The scan of so many copies, which are wired alike.

        Args:
          first: the first copy.
          count: how many.
          last_read: the place of the last equation that reads each variable.
        """
        return _Builder(self, first, count).roll(last_read)

    def column(self, first: int, count: int, place: int) -> tuple[JaxprEqn, ...]:
        """The equation at one place of the copies."""
        return tuple(self._eqn(copy, place) for copy in range(first, first + count))


# So many copies at the beginning are tried to be left out, one by one.
_PEELED = 3


class _Builder:
    """Makes the block: the second copy, with variables of its own for what comes from outside.

    The second, for the first may take values of weaker types for what is carried.
    """

    def __init__(self, copies: Copies, first: int, count: int) -> None:
        self._copies, self._first, self._count = copies, first, count
        self._shared: dict[Var, None] = {}
        self._carried: dict[Any, Carried] = {}
        self._stacked: dict[Any, Stacked] = {}
        self._slices: list[Stacked] = []

    def roll(self, last_read: Mapping[Any, int]) -> Roll:
        copies, first, count = self._copies, self._first, self._count
        columns = [copies.column(first, count, place) for place in range(copies.period)]
        block = []
        for column in columns:
            by_operand = list(zip(*[eqn.invars for eqn in column], strict=True))
            if any(_differs(column[0], eqn) for eqn in column):
                self._slices.append(Stacked(column[1].outvars[0], by_operand[0], column))
            else:
                operands = list(map(self._operand, by_operand))
                block.append(column[1].replace(invars=operands))
        start = copies.start + first * copies.period
        stop = start + count * copies.period
        carried = tuple(self._carried.values())
        last, results = [], []
        for result in _read_later(columns, last_read, stop):
            once = not any(result.outs[:-1]) and any(each.result is result.var for each in carried)
            (last if once else results).append(result)
        return Roll(
            start=start,
            copies=count,
            period=copies.period,
            block=tuple(block),
            shared=tuple(self._shared),
            carried=carried,
            stacked=(*self._slices, *self._stacked.values()),
            last=tuple(last),
            results=tuple(results),
        )

    def _operand(self, atoms: tuple[Atom, ...]) -> Atom:
        """What the block reads where the copies read these."""
        first = self._first
        sources = [self._copies.source(first, first + n, atoms[n]) for n in range(2)]
        if _is_made(sources[0]):
            return atoms[1]
        if isinstance(sources[1], _Made):
            key = _name(atoms[0]), sources[1]
            return self._carried.setdefault(key, self._carry(atoms[0], sources[1])).var
        names = tuple(map(_name, atoms))
        if len(set(names)) > 1:
            return self._stacked.setdefault(names, Stacked(Var(atoms[1].aval), atoms)).var
        if isinstance(atoms[1], Var):
            self._shared.setdefault(atoms[1])
        return atoms[1]

    def _carry(self, first: Atom, source: _Made) -> Carried:
        """The result is named as the second copy names it."""
        eqn = self._copies.column(self._first, 2, source.place)[1]
        result = eqn.outvars[source.result]
        return Carried(Var(result.aval), first, result)


def _read_later(
    columns: Sequence[tuple[JaxprEqn, ...]], last_read: Mapping[Any, int], stop: int
) -> Iterator[Result]:
    for column in columns:
        for number, var in enumerate(column[1].outvars):
            each = (eqn.outvars[number] for eqn in column)
            outs = tuple(out if last_read.get(out, -1) >= stop else None for out in each)
            if any(out is not None for out in outs):
                yield Result(var, outs)


def _differs(first: JaxprEqn, other: JaxprEqn) -> bool:
    """Of equations with the same key, only slices may."""
    if first.primitive.name != "slice":
        return False
    return first.params["start_indices"] != other.params["start_indices"]


def _is_made(source: _Source) -> bool:
    return isinstance(source, _Made)


def _fits(eqn: JaxprEqn, one: Any, other: Any) -> bool:
    """Whether the block may take either type in the same place."""
    if one == other:
        return True
    if not hasattr(one, "weak_type") or not hasattr(other, "weak_type"):
        return False
    same = one.update(weak_type=False) == other.update(weak_type=False)
    return same and not bodies(eqn) and _is_strong(eqn)


def _is_strong(eqn: JaxprEqn) -> bool:
    """Whether its results stay of the types that they have if an operand is no longer weak."""
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return not any(aval.weak_type for aval in avals)


def _name(atom: Atom) -> Any:
    return literal_key(atom) if isinstance(atom, Literal) else atom
