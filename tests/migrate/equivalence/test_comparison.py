"""Arrays and calls, before and after."""

import pytest

from jax_dist.migrate.verify.calls import compare
from jax_dist.migrate.verify.evidence import Array, CallRecord, SiteRecord
from jax_dist.migrate.verify.ledger import SiteComparison


def _site(*calls: CallRecord, count: int | None = None) -> SiteRecord:
    return SiteRecord(
        process=0,
        file="a.py",
        line=1,
        within=("<module>",),
        function="f",
        is_mapped=True,
        calls=list(calls),
        count=len(calls) if count is None else count,
    )


def _compared(before: Array, after: Array, tolerance: float = 0.0) -> SiteComparison:
    ones, others = CallRecord((), (before,), None), CallRecord((), (after,), None)
    return compare(_site(ones), _site(others), tolerance)


def _problems(before: Array, after: Array, tolerance: float = 0.0) -> tuple[str, ...]:
    return _compared(before, after, tolerance).problems


def _difference(before: Array, after: Array) -> tuple[str, float, float]:
    found = _compared(before, after, tolerance=1.0)
    assert found.problems == ()
    (how,) = found.how
    return how, found.absolute, found.relative


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], "as is"),
        ([1.0, float("nan")], [1.0, float("nan")], "as is"),
        ([[1, 2], [1, 2]], [1, 2], "one of equal copies"),
        ([7.0, 7.0], 7.0, "one of equal copies"),
        ([[[1], [2]], [[3], [4]]], [[1], [2], [3], [4]], "device axis merged"),
    ],
)
def test_the_ways_in_which_two_arrays_are_the_same(kept, before, after, how):
    assert _difference(kept(before), kept(after)) == (how, 0.0, 0.0)


def test_copies_that_are_not_equal_cannot_become_one(kept):
    said = "call 1, result: [2, 2] before, [2] after"
    assert _problems(kept([[1, 2], [1, 3]]), kept([1, 2])) == (said,)
    assert _problems(kept([[0.0], [-0.0]]), kept([0.0]))


def test_merged_in_the_wrong_order(kept):
    how, absolute, relative = _difference(kept([[1, 2], [3, 4]]), kept([1, 3, 2, 4]))

    assert (how, absolute, relative) == ("device axis merged", 1.0, 0.25)


def test_a_difference_within_the_tolerance_is_reported_and_allowed(kept):
    one, other = kept([2.0, 4.0]), kept([2.0, 4.0 + 2**-20])
    compared = _compared(one, other, tolerance=1e-6)

    assert (compared.problems, compared.absolute, compared.relative) == ((), 2**-20, 2**-22)
    assert _problems(one, other) == (
        "call 1, result: differs by up to 9.54e-07, 2.4e-07 times its largest value",
    )


def test_an_integer_has_no_tolerance(kept):
    problems = _problems(kept([100], "int32"), kept([101], "int32"), tolerance=1.0)

    assert problems == ("call 1, result: differs by up to 1, inf times its largest value",)


def test_a_nan_on_one_side(kept):
    found = _compared(kept([1.0, 2.0]), kept([1.0, float("nan")]), tolerance=1.0)

    assert found.problems == ("call 1, result: differs by up to inf, inf times its largest value",)
    assert found.to_dict()["largest_absolute_difference"] is None  # JSON has no infinity


def test_a_nan_on_both_sides_hides_no_difference_and_makes_none(kept):
    nan, infinity = float("nan"), float("inf")
    found = _difference(kept([1.0, nan, infinity]), kept([1.5, nan, infinity]))

    assert found == ("as is", 0.5, 0.5)


def test_a_constant_factor_is_named(kept):
    assert _problems(kept([1.0, 2.0]), kept([8.0, 16.0])) == (
        "call 1, result: differs by up to 14, 7 times its largest value: 8 times what it was",
    )


def test_fewer_devices(kept):
    assert _problems(kept([1.0]), kept([1.0], devices=1)) == (
        "call 1, result: on 8 devices before, on 1 after",
    )


def test_every_device_holding_everything(kept):
    """Eight devices that all compute the whole are no migration of eight that share it."""
    assert _problems(kept([1.0]), kept([1.0], parts=1)) == (
        "call 1, result: cut into 8 parts before, and into 1 after",
    )
    assert _problems(kept([[1.0], [1.0]]), kept([1.0], parts=1)) == ()  # one copy is enough


def test_where_nothing_is_held_nothing_is_cut(kept):
    """XLA lays an array without elements on its devices as it likes."""
    assert _problems(kept([[]] * 8), kept([[]] * 8, parts=1)) == ()


def test_another_dtype(kept):
    assert _problems(kept([1.0]), kept([1.0], "float64")) == (
        "call 1, result: float32 before, float64 after",
    )


def test_results_are_paired_by_path_even_in_another_order(kept):
    before = CallRecord((), (kept([1.0], path="['a']"), kept([2.0], path="['b']")), None)
    after = CallRecord((), (kept([2.0], path="['b']"), kept([1.0], path="['a']")), None)

    assert compare(_site(before), _site(after), 0.0).problems == ()


def test_a_result_that_is_missing(kept):
    before = CallRecord((), (kept([1.0], path="[0]"), kept([2.0], path="[1]")), None)
    after = CallRecord((), (kept([1.0], path="[0]"),), None)

    assert compare(_site(before), _site(after), 0.0).problems == (
        "call 1, result: 2 arrays before, 1 after",
    )


def test_arguments_that_went_into_the_function_are_a_note(kept):
    before = CallRecord((kept([1.0], path="[0]"), kept([2.0], path="[1]")), (kept([3.0]),), None)
    after = CallRecord((kept([1.0], path="[0]"),), (kept([3.0]),), None)
    compared = compare(_site(before), _site(after), 0.0)

    assert compared.problems == ()
    assert compared.notes == ("the arguments were not compared: 2 arrays before, 1 after",)


def test_an_error_on_one_side():
    before, after = CallRecord((), (), "ValueError"), CallRecord((), (), None)

    assert compare(_site(before), _site(after), 0.0).problems == (
        "call 1, error: raised ValueError before, nothing after",
    )
    assert compare(_site(before), _site(before), 0.0).problems == ()


def test_another_number_of_calls(kept):
    call = CallRecord((), (kept([1.0]),), None)

    assert compare(_site(call, call), _site(call)).problems == ("calls: 2 before, 1 after",)
    assert compare(_site(call), _site(call, call)).problems == ("calls: 1 before, 2 after",)


def test_large_arrays_are_compared_by_their_digests(kept):
    """A digest is of the bytes, whichever run kept the values."""
    whole = Array("", "float32", (2, 2), 8, 8, None, digest=_AB, rows=(_A, _B), mean=2.5)

    assert _difference(whole, whole) == ("as is", 0.0, 0.0)
    assert _difference(whole, kept([1, 2, 3, 4])) == ("device axis merged", 0.0, 0.0)
    assert _problems(whole, kept([1, 2])) == ("call 1, result: [2, 2] before, [2] after",)
    copies = Array("", "float32", (2, 2), 8, 8, None, digest=_AB, rows=(_A, _A), mean=1.5)
    assert _difference(copies, kept([1, 2])) == ("one of equal copies", 0.0, 0.0)
    said = "call 1, result: a large array differs: mean 2.5 before, None after"
    assert _problems(whole, kept([[1, 2], [3, 5]])) == (said,)


def test_a_large_array_of_equal_rows(kept):
    """Where only digests are known, of both or of one; a row of copies is one row of its own."""
    copies = Array("", "float32", (2, 2), 8, 8, None, digest="d", rows=(_A, _A))
    merged = Array("", "float32", (4,), 8, 8, None, digest="d")
    one = Array("", "float32", (1, 2), 8, 8, None, digest="e", rows=(_A,))

    assert _difference(copies, merged) == ("device axis merged", 0.0, 0.0)
    assert _difference(one, kept([1, 2])) == ("one of equal copies", 0.0, 0.0)
    assert _problems(copies, Array("", "float32", (3,), 8, 8, None, digest="d"))
    assert _problems(copies, Array("", "float32", (2,), 8, 8, None, digest=_B))


def test_a_large_array_of_more_dimensions():
    before = Array("", "float32", (2, 3, 5), 8, 8, None, digest="d")

    for shape in ((6, 5), (2, 3, 5)):
        after = Array("", "float32", shape, 8, 8, None, digest="d")
        assert _difference(before, after)[1:] == (0.0, 0.0)
    for shape in ((2, 15), (30,), (5, 5)):
        assert _problems(before, Array("", "float32", shape, 8, 8, None, digest="d"))
    number = Array("", "float32", (), 8, 8, None, digest="d")
    assert _problems(number, Array("", "float32", (1,), 8, 8, None, digest="d"))


def test_values_of_one_side(kept):
    """Nobody knows the rows of what was kept: it may stay as it was, or be merged."""
    said = "call 1, result: [2, 2] before, [2] after"

    for shape in ((2, 2), (4,)):
        digest = Array("", "float32", shape, 8, 8, None, digest=_AB)
        assert _problems(kept([[1, 2], [3, 4]]), digest) == ()
    copy = Array("", "float32", (2,), 8, 8, None, digest=_A)
    assert _problems(kept([[1, 2], [1, 2]]), copy) == (said,)


def test_numbers_have_no_rows(kept):
    assert _difference(kept(2.0), kept(2.0)) == ("as is", 0.0, 0.0)


def test_rows_that_are_alike_are_merged_too(kept):
    assert _difference(kept([[1, 2]] * 2), kept([1, 2, 1, 2])) == ("device axis merged", 0.0, 0.0)
    assert _difference(kept([[1, 2]]), kept([[1, 2]])) == ("as is", 0.0, 0.0)
    how = _difference(kept([[5, 6]], path="x"), kept([5, 6], path="x"))
    assert how == ("one of equal copies", 0.0, 0.0)
    six = [[[1, 2, 3], [4, 5, 6]]] * 3
    assert _difference(kept(six), kept([*six[0]] * 3)) == ("device axis merged", 0.0, 0.0)


def test_the_sign_of_a_zero(kept):
    (said,) = _problems(kept([0.0, 1.0]), kept([-0.0, 1.0]), tolerance=1.0)

    assert said == "call 1, result: differs in the sign of a zero, or in the bits of a NaN"
    found = _compared(kept([0.0]), kept([-0.0]))
    assert (found.absolute, found.relative) == (0.0, float("inf"))


def test_a_difference_is_relative_to_the_largest_value_before(kept):
    assert _difference(kept([0.5, 0.25]), kept([0.5, 0.5])) == ("as is", 0.25, 0.5)
    found = _compared(kept([0.0, 0.0]), kept([0.0, 1.0]), tolerance=1.0)
    assert (found.absolute, found.relative) == (1.0, float("inf"))


def test_complex_numbers(kept):
    one, other = kept([3 + 4j], "complex64"), kept([3 + 0j], "complex64")

    assert _difference(one, other) == ("as is", 4.0, 0.8)
    (said,) = _problems(kept([1 + 0j], "complex64"), kept([8 + 0j], "complex64"))
    assert not said.endswith("times what it was")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([1.0, 2.0], [1.5, 3.0], ": 1.5 times what it was"),
        ([0.0, 1.0], [5.0, 8.0], ": 8 times what it was"),
        ([1.0, 1.0, 2.0], [float("inf"), 3.0, 6.0], ": 3 times what it was"),
        ([float("nan"), 1.0], [5.0, 8.0], ": 8 times what it was"),
        ([1.0, 2.0], [0.0, 0.0], ": 0 times what it was"),
        ([1.0, 1.0], [2.0, 3.0], ""),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 5.0], ""),
        ([1000.0, 1000.0], [2000.0, 2001.0], ": 2 times what it was"),
        ([1.0, 1.0], [1.005, 1.005], ""),
        ([0.0], [1.0], ""),
    ],
)
def test_a_factor(kept, before, after, said: str):
    (problem,) = _problems(kept(before), kept(after))

    assert problem.partition(" largest value")[2] == said


# sha256 of the float32 numbers 1, 2; 3, 4; and 1, 2, 3, 4.
_A = "b9c80b5adeca450753a16950c3cc655d271f7bef7a485bc83f112b72fef21d37"
_B = "986c627ee6ef1bcc3d746256a7045624ceeb44c4ed557ca055b2d43933de3489"
_AB = "ad73b9acd6e4a74b2f5bb5386658ce3bb146cd040a1867646ab3b973fb6632b1"
