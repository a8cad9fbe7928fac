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


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What one device computes, and how far rounding may move it."""

    value: np.ndarray  # [rounds, *shape]
    tolerance: float  # of each element, as the most sensitive one needs it
    average: float  # of the mean distance of all elements
    unit: float  # the distance from 1 to the next number of its type; 0: it does not round


def relation_of(values: np.ndarray, expected: Expected, *, extremes: bool = True) -> Relation:
    """The relation of `[devices, rounds, *shape]` to what one device has.

    Of several that hold, the one that is named first in the module's text.

    Args:
      values: what the devices have.
      expected: what one device has.
      extremes: whether parts may make the value by their maximum; a first row may by chance.
    """
    whole, devices = expected.value, len(values)
    alike = are_alike(values, expected.tolerance)
    held = _held(values, expected, alike, extremes=extremes)
    held = [relation for relation in held if relation.good.any()]
    best = max(held, key=lambda relation: relation.good.sum(), default=None)
    if best is not None and best.is_good:
        return best
    good = np.any([relation.good for relation in held], axis=0) if held else np.zeros(1, bool)
    good = np.broadcast_to(good, (values.shape[1],)).copy()
    factor = 1.0
    if alike.all() and values.shape[1:] == whole.shape:
        factor = _factor(values[0], expected, devices)
    start = int(np.argmin(good))  # the first round in which no relation holds
    before = next((each for each in held if start and each.good[:start].all()), None)
    return Relation("lost", good, factor=factor, alike=bool(alike.all()), before=before)


def rows_along(shape: tuple[int, ...], whole: tuple[int, ...], devices: int) -> int | None:
    """The dimension of which each device has its share; None if there is not just one."""
    if len(shape) != len(whole):
        return None
    cut = [at for at, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    if len(cut) != 1 or shape[cut[0]] * devices != whole[cut[0]]:
        return None
    return cut[0]


def _put_together(values: np.ndarray, along: int) -> np.ndarray:
    """`[devices, *shape]` -> one array, the devices' shares one after the other."""
    return np.concatenate(list(values), axis=along)


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
        merged = _put_together(values, along + 1)
        # The gradient of a mean over the rows of each has the number of devices as a factor.
        for factor in (1, devices) if expected.unit else (1,):
            scaled = whole * factor if factor != 1 else whole
            good = _rounds_equal(merged, scaled, expected.tolerance * factor)
            yield Relation("rows", good, factor=float(factor), alike=all_alike)
    if values.shape[1:] == whole.shape:
        yield from _sums(values, expected, alike)
        if extremes and not np.iscomplexobj(values):
            merges: tuple[tuple[_Part, np.ndarray], ...]
            merges = (("max", values.max(0)), ("min", values.min(0)))
            for part, value in merges:
                good = _rounds_equal(value, whole, expected.tolerance)
                yield Relation("parts", good & ~alike, part, alike=False)


def _sums(values: np.ndarray, expected: Expected, alike: np.ndarray) -> Iterator[Relation]:
    """Where the devices differ: equal values times a number are no parts of anything."""
    if values.dtype == bool:
        return
    devices, whole = len(values), expected.value
    with np.errstate(invalid="ignore"):  # inf - inf
        added = values.astype(_wide(values)).sum(0)
    sizes = np.abs(np.nan_to_num(values.astype(_wide(values)), posinf=0.0, neginf=0.0)).sum(0)
    slack = expected.tolerance + 4 * expected.unit * float(sizes.max(initial=0.0))
    factors: tuple[tuple[_Part, int], ...] = (("sum", 1), ("mean", devices))
    for part, factor in factors if expected.unit else factors[:1]:
        good = _rounds_equal(added / factor, whole, slack / factor + expected.tolerance)
        yield Relation("parts", good & ~alike, part, alike=False)


def _factor(value: np.ndarray, expected: Expected, devices: int) -> float:
    if not np.issubdtype(value.dtype, np.number) or not np.abs(expected.value).max(initial=0) > 0:
        return 1.0
    for factor in (devices, 1 / devices, devices**2, 1 / devices**2):
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


def verdict(
    name: str, values: np.ndarray, expected: Expected, out_axis: int | None, *, is_key: bool
) -> Verdict:
    """Judges `[devices, *shape]` by the value of one device.

    Args:
      name: of the result.
      values: what each device returns.
      expected: what one device returns.
      out_axis: along which dimension the shares of the devices make the whole; None: found out.
      is_key: whether it is a random key; devices may have their own.
    """
    devices = len(values)
    relation = relation_of(values[:, None], expected)
    whole = expected.value[0]
    along = rows_along(values.shape[1:], whole.shape, devices)
    if out_axis is not None and values[0].ndim:
        along = out_axis % values[0].ndim
    if along is None:
        merged, whole = values, np.broadcast_to(whole, (devices, *whole.shape))
        same = values.shape == whole.shape and relation.kind == "same"
    else:
        merged = _put_together(values, along)
        same = merged.shape == whole.shape
    apart, average = _distances(merged, whole)
    same = same and apart <= expected.tolerance and average <= expected.average
    if is_key and values[0].shape == expected.value[0].shape:
        same = True
    words = "" if same else _words(values, expected.value[0], along, relation)
    undecided = same and not is_key and bool(expected.unit) and _hides(expected)
    return Verdict(name, devices, same, words, relation, apart, expected.tolerance, undecided)


def _hides(expected: Expected) -> bool:
    size = float(np.abs(np.nan_to_num(expected.value)).mean()) if expected.value.size else 0.0
    return expected.average > _UNDECIDED * size > 0


def _words(values: np.ndarray, whole: np.ndarray, along: int | None, relation: Relation) -> str:
    devices, shape = len(values), values.shape[1:]
    if along is None and shape != whole.shape:
        return f"shape {list(shape)} on each device, {list(whole.shape)} on one"
    if along is not None and (shares := _put_together(values, along).shape) != whole.shape:
        return f"shape {list(shares)}, {list(whole.shape)} on one device"
    if along is None and relation.part is not None:
        return f"each device has its own; their {relation.part} is right"
    for power, shown in ((1, f"{devices}"), (2, f"{devices}\N{SUPERSCRIPT TWO}")):
        if relation.factor == devices**power:
            return f"{shown} times too large"
        if relation.factor == 1 / devices**power:
            return f"1/{shown} of what it should be"
    if along is None and not relation.alike:
        return "each device has its own"
    return "other values"


def _distances(values: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The largest and the mean one."""
    if values.shape != whole.shape:
        return float("inf"), float("inf")
    apart = distance(values, whole)
    return float(apart.max(initial=0.0)), float(apart.mean()) if apart.size else 0.0
