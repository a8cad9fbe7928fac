"""How the values of several devices relate to the value that one device computes.

A right program goes through few relations: all devices have the value (same), each has its rows of
it (rows), or each has a part, and their sum, mean, maximum or minimum is the value (parts). What is
in none of them is lost, as a rule: no collective brings it back. A result is also judged as a
whole: it is the same, or it differs in a way that has a name.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

_Kind: TypeAlias = Literal["same", "rows", "parts", "own", "lost"]
_Part: TypeAlias = Literal["sum", "mean", "max", "min"]


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """Of one value, in every round of the loops around it."""

    kind: _Kind
    good: np.ndarray  # by round
    part: _Part | None = None  # by which the parts make the value
    factor: float = 1.0  # all devices have this many times the value (lost), or each row has
    alike: bool = True  # whether all devices have the same
    before: "Relation | None" = None  # of a value that is lost in a later round of a loop

    @property
    def is_good(self) -> bool:
        return bool(self.good.all())

    @property
    def early(self) -> "Relation":
        """What it is before it is lost."""
        return self if self.before is None else self.before

    @classmethod
    def of(cls, values: np.ndarray, expected: "Expected", *, extremes: bool = True) -> "Relation":
        """The relation of `[devices, rounds, *shape]` to what one device has.

        Of several that hold, the one that is named first in the module's text. `extremes`: whether
        parts may make the value by their maximum; a first row may by chance.
        """
        alike = are_alike(values, expected.tolerance)
        held = _held(values, expected, alike, extremes=extremes)
        held = [relation for relation in held if relation.good.any()]
        best = max(held, key=lambda relation: relation.good.sum(), default=None)
        if best is not None and best.is_good:
            return best
        good = np.any([relation.good for relation in held], axis=0) if held else np.zeros(1, bool)
        good = np.broadcast_to(good, (values.shape[1],)).copy()
        start = int(np.argmin(good))  # the first round in which no relation holds
        before = next((each for each in held if start and each.good[:start].all()), None)
        all_alike = bool(alike.all())
        factor = _factor(values, expected) if all_alike else 1.0
        return cls("lost", good, factor=factor, alike=all_alike, before=before)


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What one device computes, and how far rounding may move it."""

    value: np.ndarray  # [rounds, *shape]
    tolerance: float  # of each element, as the most sensitive one needs it
    average: float  # of the mean distance of all elements
    unit: float  # the distance from 1 to the next number of its type; 0: it does not round


def rows_along(shape: tuple[int, ...], whole: tuple[int, ...], devices: int) -> int | None:
    """The dimension of which each device has its share; None if there is not just one."""
    if len(shape) != len(whole):
        return None
    cut = [at for at, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    if len(cut) != 1 or shape[cut[0]] * devices != whole[cut[0]]:
        return None
    return cut[0]


def distance(values: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """By how much elements differ; infinite where one is no number and the other is."""
    if values.dtype == bool or not np.issubdtype(values.dtype, np.number):
        return (values != whole).astype(np.float64)
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    wide, wide_whole = values.astype(kind), whole.astype(kind)
    with np.errstate(invalid="ignore"):
        apart = np.abs(wide - wide_whole)
    equal = (values == whole) | (np.isnan(wide) & np.isnan(wide_whole))
    return np.where(equal, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _held(
    values: np.ndarray, expected: Expected, alike: np.ndarray, *, extremes: bool
) -> Iterator[Relation]:
    """The relations, each with the rounds in which it holds."""
    whole, devices, all_alike = expected.value, len(values), bool(alike.all())
    if values[0].size == whole.size:  # if gathered, perhaps in another shape
        good = _rounds_equal(values[0].reshape(whole.shape), whole, expected.tolerance)
        yield Relation("same", good & alike, alike=all_alike)
    along = rows_along(values.shape[2:], whole.shape[1:], devices)
    if along is not None:
        merged = np.concatenate(list(values), axis=along + 1)
        # The gradient of a mean over the rows of each has the number of devices as a factor.
        for factor in (1, devices) if expected.unit else (1,):
            scaled = whole * factor if factor != 1 else whole
            good = _rounds_equal(merged, scaled, expected.tolerance * factor)
            yield Relation("rows", good, factor=float(factor), alike=all_alike)
    if values.shape[1:] == whole.shape:
        # Where the devices differ: equal values times a number are no parts of anything.
        for part, merged, tolerance in _merges(values, expected, extremes=extremes):
            good = _rounds_equal(merged, whole, tolerance)
            yield Relation("parts", good & ~alike, part, alike=False)


def _merges(
    values: np.ndarray, expected: Expected, *, extremes: bool
) -> Iterator[tuple[_Part, np.ndarray, float]]:
    """What parts may make, and how far that may be off."""
    if values.dtype != bool:
        wide = values.astype(_wide(values))
        with np.errstate(invalid="ignore"):  # inf - inf
            added = wide.sum(0)
        sizes = np.abs(np.nan_to_num(wide, posinf=0.0, neginf=0.0)).sum(0)
        slack = expected.tolerance + 4 * expected.unit * float(sizes.max(initial=0.0))
        yield "sum", added, slack + expected.tolerance
        if expected.unit:
            yield "mean", added / len(values), slack / len(values) + expected.tolerance
    if extremes and not np.iscomplexobj(values):
        yield "max", values.max(0), expected.tolerance
        yield "min", values.min(0), expected.tolerance


def _factor(values: np.ndarray, expected: Expected) -> float:
    """How many times too large what all devices have is; 1 where that is not all."""
    value, devices = values[0], len(values)
    if value.shape != expected.value.shape or not np.issubdtype(value.dtype, np.number):
        return 1.0
    if not np.abs(expected.value).max(initial=0) > 0:
        return 1.0
    for factor in (devices, 1 / devices):
        scaled = expected.value.astype(_wide(value)) * factor
        if distance(value, scaled).max(initial=0.0) <= expected.tolerance * max(factor, 1):
            return float(factor)
    return 1.0


def are_alike(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Of each round, whether all devices have the same."""
    apart = distance(values, np.broadcast_to(values[:1], values.shape)).max(axis=0)
    return _within(apart, tolerance)


def _rounds_equal(values: np.ndarray, whole: np.ndarray, tolerance: float) -> np.ndarray:
    """Of each round, whether no element is farther off than rounding explains."""
    return _within(distance(values, whole), tolerance)


def _within(apart: np.ndarray, tolerance: float) -> np.ndarray:
    return apart.reshape(len(apart), -1).max(axis=1, initial=0.0) <= tolerance


def _wide(values: np.ndarray) -> type:
    return np.complex128 if np.iscomplexobj(values) else np.float64


_UNDECIDED = 0.5  # of the mean size: from such a tolerance on, a factor of 2 could hide


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One result on so many devices, compared with that of one."""

    name: str  # "result['loss']"
    devices: int
    same: bool
    words: str  # how it differs: "4 times too large"; "" where it is the same
    relation: Relation
    apart: float  # the largest distance
    tolerance: float
    undecided: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        values: np.ndarray,
        expected: Expected,
        out_axis: int | None,
        *,
        is_key: bool,
    ) -> "Verdict":
        """Judges `[devices, *shape]` by the value of one device.

        `out_axis` is the dimension along which the shares of the devices make the whole (None:
        found out); of random keys, `is_key`, devices may have their own.
        """
        devices = len(values)
        relation = Relation.of(values[:, None], expected)
        one = whole = expected.value[0]
        along = rows_along(values.shape[1:], one.shape, devices)
        if out_axis is not None and values[0].ndim:
            along = out_axis % values[0].ndim
        if along is None:
            merged, whole = values, np.broadcast_to(one, (devices, *one.shape))
        else:
            merged = np.concatenate(list(values), axis=along)
        same = merged.shape == whole.shape and (along is not None or relation.kind == "same")
        apart = average = float("inf")
        if merged.shape == whole.shape:
            distances = distance(merged, whole)
            apart = float(distances.max(initial=0.0))
            average = float(distances.mean()) if distances.size else 0.0
        same = same and apart <= expected.tolerance and average <= expected.average
        if is_key and values[0].shape == one.shape:
            same = True
        words = "" if same else _words(values, merged, one, along, relation)
        undecided = False
        if same and not is_key and expected.unit:
            size = float(np.abs(np.nan_to_num(expected.value)).mean()) if one.size else 0.0
            undecided = expected.average > _UNDECIDED * size > 0
        return cls(name, devices, same, words, relation, apart, expected.tolerance, undecided)


def _words(
    values: np.ndarray, merged: np.ndarray, whole: np.ndarray, along: int | None, relation: Relation
) -> str:
    shape = values.shape[1:]
    if along is None and shape != whole.shape:
        return f"shape {list(shape)} on each device, {list(whole.shape)} on one"
    if along is not None and merged.shape != whole.shape:
        return f"shape {list(merged.shape)}, {list(whole.shape)} on one device"
    if along is None and relation.part is not None:
        return f"each device has its own; their {relation.part} is right"
    if relation.factor != 1:
        return times(relation.factor)
    if along is None and not relation.alike:
        return "each device has its own"
    return "other values"


def times(factor: float) -> str:
    """ "4 times too large", or "1/4 of what it should be"."""
    if factor < 1:
        return f"1/{round(1 / factor)} of what it should be"
    return f"{round(factor)} times too large"
