"""The calls of one function in two runs: what differs, what shows nothing, and their programs."""

from typing import Any

import numpy as np
import pytest

from jax_dist.migrate.verify.calls import compare, first_few
from jax_dist.migrate.verify.evidence import Array, CallRecord, SiteRecord
from jax_dist.migrate.verify.ledger import SiteComparison

_UNWRITTEN = "its program was not written down"


def _array(path: str = "", value: int = 1, shape: tuple[int, ...] = (2,), **more: Any) -> Array:
    """Of which there are digests: equal for equal values."""
    given = {"dtype": "float32", "devices": 8, "parts": 8, **more}
    rows = (f"row {value}",) * shape[0] if shape else ()
    return Array(path, shape=shape, archive=None, digest=f"row {value}", rows=rows, **given)


_COPIES = _array(shape=(8, 2))  # of _ONE
_ONE = _array()
_BATCH, _MERGED = _array(shape=(8, 2, 3)), _array(shape=(16, 3))


def _call(*returned: Array, given: Any = (), raised: str | None = None, **more: Any) -> CallRecord:
    return CallRecord(tuple(given), returned, raised, **more)


def _site(*calls: CallRecord, count: int | None = None) -> SiteRecord:
    count = len(calls) if count is None else count
    return SiteRecord(0, "a.py", 3, (), "f", is_mapped=True, calls=list(calls), count=count)


def _compared(before: CallRecord, after: CallRecord, **options: Any) -> SiteComparison:
    return compare(_site(before), _site(after), **options)


def _program(*paths: str, kind: str = "float32[2]", **more: Any) -> dict[str, Any]:
    """The text of a program with arguments of one kind."""
    text = {"in": [[path, kind] for path in paths], **more.pop("text", {})}
    return {"text": text, "paths": list(paths), "environment": {"jax": "1"}, **more}


def test_two_equal_calls():
    text = _program()
    call = _call(_array("[0]", devices=4), _array("[1]"), text=text)
    found = compare(_site(call, call), _site(call, call))

    signature = {"before": text["text"], "after": text["text"], "sizes": {}}
    signature |= {"environment": {"jax": "1"}, "arguments": [], "results": ["as is"] * 2}
    assert found == SiteComparison(
        **{"file": "a.py", "line": 3, "function": "f", "calls_before": 2, "calls_after": 2},
        **{"compared": 2, "equal": 2, "raised": 0, "devices_before": 4, "devices_after": 4},
        **{"absolute": 0.0, "relative": 0.0, "how": ("as is",), "problems": (), "notes": ()},
        signatures=(signature,),
    )


def test_nothing_after():
    found = compare(_site(_call(_ONE)), None)

    assert found.problems == ("it was called before, and no mapped function like it after",)
    assert found.differing == {("", "calls")}
    assert (found.calls_before, found.calls_after) == (1, 0)
    assert (found.devices_before, found.devices_after) == (8, 0)
    assert (found.compared, found.equal, found.raised) == (0, 0, 0)
    assert compare(_site(_call()), None).devices_before == 0


def test_no_call_after():
    found = compare(_site(_call(_ONE)), _site())

    assert found.problems == ("it was called before, and is not called after",)
    assert found.unproved == "not all of its programs were seen in both runs"


def test_no_float_may_differ_unless_that_is_said(kept):
    assert _compared(_call(kept([1.0])), _call(kept([1.5]))).problems


def test_the_first_few():
    assert first_few("abab") == ("a", "b")
    assert first_few("abc") == ("a", "b", "c")
    assert first_few("abcd") == ("a", "b", "c", "and 1 more")
    assert first_few("abcdef") == ("a", "b", "c", "and 3 more")


# --- which calls were written down, and seen in both runs


def test_calls_that_were_not_written_down():
    call, other = _call(_ONE, text=_program()), _call(_ONE)
    said = "not all of its calls were written down"

    assert compare(_site(call, count=2), _site(call, count=2)).unproved == said
    assert compare(_site(other, count=2), _site(other, count=2)).unproved == _UNWRITTEN
    found = compare(_site(call), _site(call, count=1))
    assert (found.unproved, len(found.signatures)) == ("", 1)


def test_programs_that_one_run_has_not_seen():
    one, other, none = (_call(_ONE, text=text) for text in (_program(), _program("x"), None))
    said = "not all of its programs were seen in both runs"

    assert compare(_site(one, one), _site(one)).unproved == ""
    assert compare(_site(one, other), _site(one)).unproved == said
    assert compare(_site(one, one, other), _site(one, one)).unproved == said
    assert compare(_site(none, one), _site(none)).unproved == _UNWRITTEN
    assert compare(_site(one), _site(one, other)).unproved == ""
    # Where they are counted, and not written down.
    assert compare(_site(one, other), _site(one, count=2)).unproved == said
    assert compare(_site(one, other), _site(one, count=2)).problems == ()


# --- errors


def test_a_call_that_raises_the_same_in_both():
    failed = _call(raised="ValueError")
    found = compare(_site(failed, _call(_ONE)), _site(failed, _call(_ONE)))

    assert (found.raised, found.compared, found.equal, found.problems) == (1, 1, 1, ())


@pytest.mark.parametrize(
    ("before", "after"), [("ValueError", None), (None, "ValueError"), ("KeyError", "ValueError")]
)
def test_a_call_that_raises_something_else_in_one_run(before: str | None, after: str | None):
    """Also where it does so from run to run: what was not seen in both shows nothing."""
    ones = [_call(_ONE, text=_program(), raised=raised) for raised in (before, None)]
    others = [_call(_ONE, text=_program(), raised=raised) for raised in (after, None)]
    found = compare(_site(*ones), _site(*others))

    said = f"call 1, error: raised {before or 'nothing'} before, {after or 'nothing'} after"
    assert found.problems == (said,)
    assert (found.raised, found.compared, found.equal) == (0, 1, 1)
    ignored = compare(_site(*ones), _site(*others), ignored={("error", "error")})
    assert (ignored.problems, ignored.unsteady, ignored.raised) == ((), True, 0)
    assert ignored.unproved == "it raised an error in one of the runs"
    others[1] = ones[1] = _call(_ONE)
    assert compare(_site(*ones[::-1]), _site(*others[::-1])).unproved == _UNWRITTEN


# --- arguments


def test_an_argument_that_differs_leaves_the_results_alone():
    """From other arguments come other results."""
    before = _call(_array("", 1), given=[_array("[0]", 1)])
    after = _call(_array("", 2), given=[_array("[0]", 2)])
    found = _compared(before, after)

    assert found.differing == {("argument[0]", "value")}
    assert found.drifted
    assert (found.equal, found.how) == (0, ("as is",))
    assert found.problems[0].startswith("call 1, argument[0]: a large array differs")
    again = compare(_site(before, _call(_ONE)), _site(after, _call(_array("", 3))))
    assert again.differing == {("argument[0]", "value"), ("result", "value")}


def test_how_far_arguments_differ_is_not_told(kept):
    before = _call(kept([1.0], path="['a']"), given=[kept([1.0])])
    after = _call(kept([1.25], path="['a']"), given=[kept([1.5])])
    found = _compared(before, after, tolerance=1.0)

    assert (found.problems, found.absolute, found.relative) == ((), 0.25, 0.25)


def test_what_is_in_the_same_form():
    same = _call(_ONE, _ONE, given=[_ONE, _ONE])
    merged = _call(_ONE, _ONE, given=[_array("[0]"), _array("[1]", shape=(4, 1))])
    after = _call(_ONE, _ONE, given=[_array("[0]"), _array("[1]", shape=(4,))])

    assert _compared(same, same).same_form
    assert not _compared(merged, after).same_form
    assert not _compared(_call(_BATCH), _call(_MERGED)).same_form
    results = [_array("[0]"), _array("[1]", shape=(8, 2))]
    assert not _compared(_call(*results), _call(_array("[0]"), _array("[1]"))).same_form
    assert not _compared(_call(_ONE, given=[_ONE]), _call(_ONE)).same_form


def test_arguments_are_paired_by_path_or_by_order():
    one, other = _array("[0]", 1), _array("[1]", 2)
    named, also = _array("['x']", 1), _array("['y']", 2)

    assert _compared(_call(given=[one, other]), _call(given=[other, one])).problems == ()
    assert _compared(_call(given=[one, other]), _call(given=[named, also])).problems == ()
    assert _compared(_call(given=[one, other]), _call(given=[also, named])).problems


# --- what a call is beside its arrays


def test_what_is_donated_in_one_form():
    before, after = _call(_ONE, donated=(0, 1)), _call(_ONE, donated=(1, 2))
    found = _compared(before, after)

    assert found.problems == (
        "call 1, argument 0: donated before only",
        "call 1, argument 2: donated after only",
    )
    assert found.differing == {("argument 0", "donation"), ("argument 2", "donation")}
    other = _compared(_call(_COPIES, donated=(0,)), _call(_ONE))
    assert other.problems == ()  # in another form, the proof tells


def test_another_structure():
    before, after = _call(_ONE, structure="list 1a"), _call(_ONE, structure="dict 2b")
    found = _compared(before, after)

    assert found.problems == ("call 1, result: another structure: list before, dict after",)
    assert found.differing == {("result", "structure")}


def test_what_cannot_be_compared_is_not_equal():
    kind = _array(dtype="unknown my.Type")
    found = compare(_site(_call(_ONE), _call(kind)), _site(_call(_ONE), _call(kind)))
    assert (found.compared, found.equal, found.problems) == (1, 1, ())
    assert found.notes == ("call 2: its result is of my.Type",)

    for ones in (("leaf", None), (None, "leaf"), (None, None)):
        found = _compared(*(_call(_ONE, structure=each) for each in ones))
        assert (found.compared, found.equal, found.problems) == (0, 0, ())
        assert found.notes == ("call 1: its result is of structure",)


# --- where results lie


def test_a_weak_type():
    found = _compared(_call(_array(weak=True)), _call(_ONE))

    assert found.problems == ("call 1, result: weak float32 before, float32 after",)
    assert found.how == ("as is",)
    other = _compared(_call(_ONE), _call(_array(dtype="int32", devices=1)))
    assert other.problems == ("call 1, result: float32 before, int32 after",)
    assert other.how == ()


def test_another_shape_is_enough():
    found = _compared(_call(_array(shape=(8, 2))), _call(_array(shape=(3,), parts=1)))

    assert found.problems == ("call 1, result: [8, 2] before, [3] after",)
    assert found.how == ()


def test_devices():
    more, many = _array(devices=4), _array(shape=(8, 2), devices=4)

    assert _compared(_call(_ONE), _call(more)).problems == (
        "call 1, result: on 8 devices before, on 4 after",
    )
    assert _compared(_call(more), _call(_ONE)).problems == (
        "call 1, result: on 4 devices before, on 8 after",
    )
    # In another form there may be more.
    given = [_COPIES], [_ONE]
    assert _compared(_call(more, given=given[0]), _call(_ONE, given=given[1])).problems == ()
    assert _compared(_call(many, given=given[0]), _call(_ONE, given=given[1])).problems == ()
    fewer = _compared(_call(_ONE, given=given[0]), _call(more, given=given[1]))
    assert fewer.problems == ("call 1, result: on 8 devices before, on 4 after",)


def test_places():
    one, other = _array(placed="a"), _array(placed="b")
    said = "call 1, result: other slices on the devices, or another order of them"

    assert _compared(_call(one), _call(other)).problems == (said,)
    given = [_COPIES], [_ONE]
    assert _compared(_call(one, given=given[0]), _call(other, given=given[1])).problems == ()
    assert _compared(_call(_array(shape=(8, 2), placed="a")), _call(other)).problems == ()


def test_what_may_lie_elsewhere():
    fewer = _array(devices=1)
    found = _compared(_call(_ONE), _call(fewer), may_move=True)

    assert found.problems == ()
    assert found.notes == ("call 1, result: on 8 devices before, on 1 after",)
    assert found.unproved == "its results lie elsewhere than before"
    assert not found.same_form
    same = _compared(_call(_ONE, text=_program()), _call(_ONE, text=_program()), may_move=True)
    assert (same.notes, same.unproved, same.same_form) == ((), "", True)
    # In another form, the proof tells.
    text, given = _program(""), ([_COPIES], [_ONE])
    calls = [
        _call(result, given=each, text=text)
        for result, each in zip((_ONE, fewer), given, strict=True)
    ]
    assert _compared(*calls, may_move=True).unproved == ""
    first = compare(
        _site(_call(_ONE), _call(_ONE)), _site(_call(_ONE), _call(fewer)), may_move=True
    )
    assert first.unproved == _UNWRITTEN


def test_what_differs_without_the_migration_too():
    ignored = {("result", "value")}
    found = _compared(_call(_ONE), _call(_array("", 2)), ignored=ignored)

    assert (found.problems, found.differing, found.unsteady, found.equal) == ((), set(), True, 0)
    steady = _compared(_call(_ONE), _call(_ONE), ignored=ignored)
    assert (steady.unsteady, steady.equal) == (False, 1)
    other = _compared(_call(_ONE), _call(_array("", 1, devices=4)), ignored=ignored)
    assert (len(other.problems), other.unsteady) == (1, False)


# --- their programs


def _signed(before: CallRecord, after: CallRecord) -> Any:
    """The signature of a call, or why it has none."""
    found = _compared(before, after)
    assert bool(found.signatures) != bool(found.unproved)
    return found.signatures[0] if found.signatures else found.unproved


def test_what_came_from_what():
    before = _call(
        _BATCH, given=[_array("[0]", 1, (8, 2)), _array("[1]", 2)], text=_program("[0]", "[1]")
    )
    after = _call(_MERGED, given=[_array("[0]", 1), _array("[1]", 2)], text=_program("[1]", "[0]"))
    found = _signed(before, after)

    assert found["arguments"] == [[1, "as is"], [0, "one of equal copies"]]
    assert found["results"] == ["device axis merged"]
    assert found["sizes"] == {}


def test_programs_of_the_same_form_have_those_of_fewer_devices():
    sizes: Any = {"16": {"n": 16}, "2": {"n": 2}}, {"2": {"n": 3}}
    texts = [_program("", sizes=each, environment=each) for each in sizes]
    before, after = (_call(_ONE, given=[_ONE], text=text) for text in texts)
    found = _signed(before, after)

    both = {"2": {"before": {"n": 2}, "after": {"n": 3}}, "16": {"before": {"n": 16}}}
    assert list(found["sizes"].items()) == list(both.items())
    assert found["environment"] == sizes[1]
    one, other = _array("[0]", shape=(8, 2)), _array("[1]")
    texts = [_program(sizes=each) for each in sizes]
    before, after = _call(one, other, text=texts[0]), _call(_array("[0]"), other, text=texts[1])
    assert _signed(before, after)["sizes"] == {}


def test_each_program_is_told_once():
    ones = [_call(_ONE, text=_program(text={"n": n})) for n in (1, 2, 1)]
    found = compare(_site(*ones), _site(*ones))

    assert [each["before"]["n"] for each in found.signatures] == [1, 2]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, None, _UNWRITTEN),
        (_program(), None, _UNWRITTEN),
        (None, _program(), _UNWRITTEN),
        ({"why": "one"}, {"why": "other"}, "one"),
        (_program(), {"why": "other"}, "other"),
        ({"why": "one"}, _program(), "one"),
    ],
)
def test_a_program_without_a_text(before: Any, after: Any, said: str):
    assert _signed(_call(_ONE, text=before), _call(_ONE, text=after)) == said


def test_the_first_reason_is_told():
    ones = [_call(_ONE, text={"why": why}) for why in ("first", "second")]

    assert compare(_site(*ones), _site(*ones)).unproved == "first"
    assert compare(_site(_call(), *ones), _site(_call(), *ones)).unproved == _UNWRITTEN


def test_results_of_another_shape_or_order():
    text = _program()
    one, other = _array("[0]"), _array("[1]")
    shape = _array("[1]", shape=(3,))

    said = "its arrays have other shapes"
    assert _signed(_call(one, other, text=text), _call(one, shape, text=text)) == said
    turned = _call(other, one, text=text)
    assert _signed(_call(one, other, text=text), turned) == "its results come in another order"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("[0]", "[1]"), ("[0]",)),
        (("[0]",), ("[0]", "[1]")),
        (("[0]", "[1]"), ("[0]", "['x']")),
        (("[0]", "['x']"), ("[0]", "[1]")),
    ],
)
def test_other_arguments(before: tuple[str, ...], after: tuple[str, ...]):
    """Of its program, not of the call: what is static is none."""
    given = [_array("[0]"), _array("[1]")]
    calls = (_call(_ONE, given=given, text=_program(*each)) for each in (before, after))

    assert _signed(*calls) == "its programs take other arguments"


# --- numbers that were static before


@pytest.mark.parametrize(("number", "kind"), [(3, "int32[]"), (0.5, "float32[]"), (3, "float32[]")])
def test_a_number_that_is_an_argument_now(kept, number: float, kind: str):
    given = _array("[0]")
    new = kept(number, type(number).__name__, path="[1]")
    program = _program("[0]", "[1]", text={"in": [["x", "float32[2]"], ["n", kind]]})
    before = _call(_ONE, given=[given], text=_program("[0]"))
    found = _signed(before, _call(_ONE, given=[given, new], text=program))

    value = np.array(number, kind.removesuffix("[]")).tobytes().hex()
    assert found["arguments"] == [[0, "as is"], [f"{kind} {value}", "a number"]]


def test_numbers_that_are_no_new_arguments(kept):
    given = _array("[0]")
    before = _call(_ONE, given=[given], text=_program("[0]"))
    number = kept(3, "int", path="[1]")
    rows = _call(_ONE, given=[given, number], text=_program("[0]", "[1]"))
    elsewhere = _call(_ONE, given=[given, number], text=_program("[0]", "[2]"))
    for after in (rows, elsewhere):
        assert _signed(before, after) == "its programs take other arguments"
    said = "the arguments were not compared: 1 arrays before, 2 after"
    for other in (_array("[1]", dtype="int"), kept([3], "float32", path="[1]")):
        found = _compared(before, _call(_ONE, given=[given, other]))
        assert found.notes == (said,)
    both = [kept(value, "int", path="[0]") for value in (3, 4)]
    changed = _compared(_call(given=both[:1]), _call(given=both[1:]))
    assert changed.differing == {("argument[0]", "value")}


def test_a_number_of_both_programs_is_no_new_one(kept):
    given = [kept(2, path="[0]")]
    call = _call(_ONE, given=given, text=_program("[0]", kind="float32[]"))

    assert _signed(call, call)["arguments"] == [[0, "as is"]]
