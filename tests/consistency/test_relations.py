"""How the values of devices relate to that of one, on small arrays."""

import numpy as np
import pytest

from jax_dist.consistency.relations import Expected, Relation

_UNIT = 1e-7


def _relation(values, whole, unit=_UNIT, **options):
    values = np.asarray(values)
    whole = np.asarray(whole)[None]
    return Relation.of(values[:, None], Expected(whole, 1e-5, 1e-5, unit), **options)


@pytest.mark.parametrize(
    ("values", "whole", "kind", "part"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.0], "same", None),
        ([[1.0], [2.0]], [1.0, 2.0], "rows", None),
        ([[2.0], [4.0]], [1.0, 2.0], "rows", None),  # the gradient of a mean
        ([[2.0], [1.0]], [1.0, 2.0], "lost", None),
        ([1.0, 2.0], 3.0, "parts", "sum"),
        ([1.0, 2.0], 1.5, "parts", "mean"),
        ([1.0, 2.0], 2.0, "parts", "max"),
        ([1.0, 2.0], 1.0, "parts", "min"),
        ([1.0, 2.0], 7.0, "lost", None),
        ([3.0, 3.0], 6.0, "lost", None),  # equal halves are no parts: it is 1/2 too small
        ([[[1.0], [2.0]], [[1.0], [2.0]]], [[1.0, 2.0]], "same", None),  # gathered
        ([np.nan, np.nan], np.nan, "same", None),
        ([np.inf, np.inf], 1.0, "lost", None),
        ([True, False], True, "parts", "max"),
    ],
)
def test_the_relation(values, whole, kind, part):
    found = _relation(values, whole)
    assert (found.kind, found.part) == (kind, part)


@pytest.mark.parametrize(("times", "factor"), [(3.0, 3.0), (1 / 3, 1 / 3), (2.0, 1.0)])
def test_the_factor_of_what_all_devices_have(times, factor):
    found = _relation([[times, 2 * times]] * 3, [1.0, 2.0])
    assert found.kind == "lost"
    assert found.factor == pytest.approx(factor)


def test_extremes_count_only_where_they_are_taken():
    assert _relation([1.0, 2.0], 1.0, extremes=False).kind == "lost"


def test_integers_do_not_round_and_have_no_mean():
    assert _relation([1, 2], 3, unit=0).part == "sum"
    assert _relation([1, 5], 3, unit=0).kind == "lost"


def test_a_value_that_is_lost_in_a_later_round():
    values = np.asarray([[1.0, 1.0, 1.0], [2.0, 9.0, 1.0]])  # [devices, rounds]
    whole = np.asarray([1.5, 3.0, 1.0])
    found = Relation.of(values, Expected(whole, 1e-5, 1e-5, _UNIT))

    assert (found.kind, found.good.tolist()) == ("lost", [True, False, True])
    assert found.early.part == "mean"
