"""Whether a result is the same on any number of devices, and if not, in which way."""

import dataclasses

import numpy as np

from jax_dist.consistency import relations
from jax_dist.consistency.relations import Expected, Relation

UNDECIDED = 0.5  # of the mean size: from such a tolerance on, a factor of 2 could hide


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
    relation = relations.relation_of(values[:, None], expected)
    whole = expected.value[0]
    along = relations.rows_along(values.shape[1:], whole.shape, devices)
    if out_axis is not None and values[0].ndim:
        along = out_axis % values[0].ndim
    if along is None:
        merged, whole = values, np.broadcast_to(whole, (devices, *whole.shape))
        same = values.shape == whole.shape and relation.kind == "same"
    else:
        merged = relations.put_together(values, along)
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
    return expected.average > UNDECIDED * size > 0


def _words(values: np.ndarray, whole: np.ndarray, along: int | None, relation: Relation) -> str:
    devices, shape = len(values), values.shape[1:]
    if along is None and shape != whole.shape:
        return f"shape {list(shape)} on each device, {list(whole.shape)} on one"
    if along is not None and (shares := relations.put_together(values, along).shape) != whole.shape:
        return f"shape {list(shares)}, {list(whole.shape)} on one device"
    if along is None and relation.part is not None:
        return f"each device has its own; their {relation.part} is right"
    if relation.factor == devices:
        return f"{devices} times too large"
    if relation.factor == 1 / devices:
        return f"1/{devices} of what it should be"
    if relation.factor == devices**2:
        return f"{devices}\N{SUPERSCRIPT TWO} times too large"
    if relation.factor == 1 / devices**2:
        return f"1/{devices}\N{SUPERSCRIPT TWO} of what it should be"
    if along is None and not relation.alike:
        return "each device has its own"
    return "other values"


def _distances(values: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The largest and the mean one."""
    if values.shape != whole.shape:
        return float("inf"), float("inf")
    apart = relations.distance(values, whole)
    return float(apart.max(initial=0.0)), float(apart.mean()) if apart.size else 0.0
