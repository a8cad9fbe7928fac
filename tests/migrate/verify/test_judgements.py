"""How sure a place is, from comparisons and texts of programs as runs leave them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jax_dist.migrate.results import PlaceResult
from jax_dist.migrate.verify import judging
from jax_dist.migrate.verify.evidence import SiteRecord
from jax_dist.migrate.verify.judging import Judgement, Own
from jax_dist.migrate.verify.ledger import (
    Ending,
    LedgerEntry,
    MigrationVerdict,
    MigrationVerification,
    Rung,
    SiteComparison,
)
from jax_dist.migrate.verify.recording import programs

_INSIDE = "it ran only inside a larger traced function"
_UNSTEADY = "what it is given or gives differs from run to run, without the migration too"
_DRIFTED = "it is given other values than before the migration: what comes before it differs"
_NOTHING = "it has no calls or values of its own to compare"
_GIVEN = frozenset({("argument[0]", "value")})  # all that differs is what it is given


@functools.cache
def _text(factor: int, *shape: int, row: bool = False) -> dict[str, Any]:
    function = (lambda x: x[0] * factor) if row else (lambda x: x * factor)
    return programs.text(function, [jax.ShapeDtypeStruct(shape, np.float32)])


def _programs(
    before: int = 2, after: int = 2, sizes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Two programs, and by the number of devices which of their forms run."""
    text = _text(2, 3)
    forms = {n: dict.fromkeys(which.split(), text) for n, which in (sizes or {}).items()}
    return {"before": _text(before, 3), "after": _text(after, 3), "sizes": forms}


def _rows() -> dict[str, Any]:
    """Two programs that are equal by rules: after, there is one of equal rows."""
    return {
        **{"before": _text(3, 8, 4, row=True), "after": _text(3, 4), "sizes": {}},
        **{"arguments": [[0, "one of equal copies"]], "results": ["as is"]},
    }


def _site(*, line: int = 1, **more: Any) -> SiteRecord:
    return SiteRecord(0, "/a.py", line, ("<module>",), "f", is_mapped=True, **more)


def _compared(site: Any = None, **more: Any) -> SiteComparison:
    """Two calls that are equal, unless something else is said."""
    numbers = {"calls_before": 2, "calls_after": 2, "compared": 2, "raised": 0, "equal": 2}
    given: dict[str, Any] = {"file": "a.py", "line": 1, "function": "f"}
    given |= {"devices_before": 8, "devices_after": 8}
    given |= {"absolute": 0.0, "relative": 0.0, "how": (), "problems": (), "notes": ()}
    return SiteComparison(**{**given, **numbers, "site": site, **more})


def _runs(*sites: SiteComparison, code: int | None = 0, **more: Any) -> MigrationVerification:
    first, second = (Ending(each, 1, 2, 8, "") for each in (code, 0))
    return MigrationVerification((), MigrationVerdict.SAME, first, second, sites, **more)


def _judged(*compared: SiteComparison, **more: Any) -> Judgement:
    """Of a place at which these were mapped."""
    own = Own(ran=True, sites=[each.site for each in compared])
    return judging.judged(own, _runs(*compared, **more), {})


def _of_calls(**more: Any) -> Judgement:
    return _judged(_compared(_site(), **more))


def test_where_not_all_was_written_down_no_place_is_more_than_ran():
    said = ("not all that the command did was written down",)
    equal = [_compared(_site(), signatures=(_programs(),)), _compared(_site())]
    for each in equal:
        assert _judged(each).rung > Rung.RAN
        assert _judged(each, is_complete=False) == Judgement(Rung.RAN, 2, 2, notes=said)
    differs = _compared(_site(), problems=("call 1 differs",), equal=1)
    assert _judged(differs, is_complete=False).rung is Rung.DIFFERENT


# --- by the texts of its programs


def test_no_texts_prove_nothing():
    some = Judgement(Rung.REPLAYED, 2, 2, notes=("a note",))

    assert some.proved([]) is some


def test_texts_that_are_the_same():
    pair = _programs()
    found = Judgement(Rung.REPLAYED, 2, 2, notes=("a note",)).proved(iter([pair]))

    assert found == Judgement(Rung.SAME_PROGRAM, 2, 2, notes=("a note",), signatures=(pair,))


def test_texts_that_are_equal_by_rules():
    """The rules of all: and one pair by rules makes it a place by rules."""
    pairs = [_rows(), _programs()]
    found = Judgement(Rung.REPLAYED, 2, 2).proved(pairs)

    assert (found.rung, found.rules) == (Rung.EQUAL_BY_RULES, ("R5", "R8"))
    assert found.signatures == tuple(pairs)


def test_one_text_that_differs_is_enough():
    found = Judgement(Rung.REPLAYED, 2, 2, notes=("a note",)).proved([_rows(), _programs(2, 3)])

    assert (found.rung, found.rules, found.signatures) == (Rung.REPLAYED, (), ())
    note, said = found.notes
    assert note == "a note"
    assert said.startswith("its programs differ: ")


_ALL = "it takes a slice for each of all devices, and no fewer"
_OLD, _NEW = (f"on {{}} of the devices only the {form} form runs" for form in ("old", "new"))


@pytest.mark.parametrize(
    ("pairs", "notes"),
    [
        ([{}], ()),
        ([{"4": "before after"}], ()),
        ([{"2": "before", "4": "before"}], (_ALL,)),
        ([{"2": "before"}, {"4": "before"}], (_ALL,)),
        ([{"4": "before", "2": "before", "1": "before after"}], (_OLD.format("2, 4"),)),
        ([{"2": "before"}, {"4": "before after"}], (_OLD.format("2"),)),
        ([{"4": "after", "2": "after"}], (_NEW.format("2, 4"),)),
        ([{"4": "after", "2": "before"}], (_OLD.format("2"), _NEW.format("4"))),
    ],
)  # fmt: skip
def test_devices_on_which_one_form_runs(pairs: list[dict[str, str]], notes: tuple[str, ...]):
    found = Judgement(Rung.REPLAYED).proved([_programs(sizes=each) for each in pairs])

    assert (found.rung, found.notes) == (Rung.SAME_PROGRAM, notes)


# --- by the calls of one function


def test_calls_that_are_equal():
    assert _of_calls() == Judgement(Rung.REPLAYED, 2, 2)
    other = _of_calls(same_form=False, notes=("moved",))
    assert other == Judgement(Rung.SAME_IN_TWO_RUNS, 2, 2, notes=("moved",))


def test_calls_with_their_programs():
    pair = _programs()
    found = _of_calls(signatures=(pair,), notes=("moved",))

    assert found == Judgement(Rung.SAME_PROGRAM, 2, 2, notes=("moved",), signatures=(pair,))


def test_calls_of_which_one_has_no_program():
    found = _of_calls(signatures=(_programs(),), unproved="it has no text", notes=("moved",))

    assert found == Judgement(Rung.REPLAYED, 2, 2, notes=("moved", "it has no text"))


@pytest.mark.parametrize(("number", "equal"), [(2, 1), (0, 0), (2, 0)])
def test_calls_that_are_not_all_equal(number: int, equal: int):
    found = _of_calls(calls_before=number, equal=equal, signatures=(_programs(),), notes=("n",))

    assert found == Judgement(Rung.RAN, number, equal, notes=("n",))


def test_calls_that_raise_show_nothing():
    said = "{} raised the same error in both forms, and so showed nothing"

    all_of_them = _of_calls(raised=2, equal=0, notes=("n",))
    assert all_of_them == Judgement(Rung.RAISED, notes=(said.format("2 calls"), "n"))
    one = _of_calls(raised=1, equal=1)
    assert one == Judgement(Rung.REPLAYED, 1, 1, notes=(said.format("1 call"),))


def test_the_first_notes_are_told():
    found = _of_calls(notes=tuple("abcd"))

    assert found.notes == ("a", "b", "c", "and 1 more")


def test_what_differs_is_different_whatever_its_programs():
    differing = {"problems": ("call 2: 1 before, 2 after",), "signatures": (_programs(),)}
    found = _of_calls(equal=1, differing=frozenset({("result", "value")}), **differing)

    assert found == Judgement(Rung.DIFFERENT, 2, 1, ("call 2: 1 before, 2 after",))


def test_problems_of_several_are_told_in_short():
    ones = [_compared(_site(), calls_before=3, equal=1, problems=(str(n),)) for n in range(5)]
    found = _judged(*ones)

    assert found == Judgement(Rung.DIFFERENT, 15, 5, ("0", "1", "2", "and 2 more"))


_DRIFT = {"problems": ("call 1, argument[0]: 1 before, 2 after",), "differing": _GIVEN, "equal": 0}


def test_a_program_that_is_given_other_values_is_the_same_program():
    pair = _programs()
    found = _of_calls(**_DRIFT, signatures=(pair,), notes=("n",))

    expected = Judgement(Rung.SAME_PROGRAM, 2, 2, notes=("n", _DRIFTED), signatures=(pair,))
    assert found == expected


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"signatures": (_programs(2, 3),)},
        {"signatures": (_programs(),), "unproved": "it has no text"},
        {"signatures": (_programs(),), "raised": 2},
    ],
    ids=["no text", "other text", "some texts", "no call"],
)
def test_a_program_that_is_given_other_values_and_is_not_proved(more: dict[str, Any]):
    found = _of_calls(**_DRIFT, **more)

    assert found == Judgement(Rung.DIFFERENT, 2, 0, ("call 1, argument[0]: 1 before, 2 after",))


def test_what_differs_from_run_to_run_has_its_programs_alone():
    pair = _programs()
    shown = _of_calls(unsteady=True, equal=1, signatures=(pair,))
    assert shown == Judgement(Rung.SAME_PROGRAM, 2, 2, notes=(_UNSTEADY,), signatures=(pair,))

    nothing = _of_calls(unsteady=True, equal=1, notes=("n",))
    assert nothing == Judgement(Rung.RAN, 2, 1, notes=("n", _UNSTEADY))
    some = _of_calls(unsteady=True, equal=1, signatures=(pair,), unproved="it has no text")
    assert some == Judgement(Rung.RAN, 2, 1, notes=(_UNSTEADY,))
    none = _of_calls(unsteady=True, equal=0, raised=2, signatures=(pair,))
    assert none.rung is Rung.RAN


# --- which calls count


def test_a_place_is_as_sure_as_its_least_sure_part():
    sites = [_compared(_site(), equal=equal) for equal in (2, 1)]
    value = _compared(signatures=(_programs(),), calls_before=3, equal=3)
    own = Own(ran=True, sites=[each.site for each in sites[:1]], values=[value])

    found = judging.judged(own, _runs(*sites), {})
    assert (found.rung, found.calls, found.equal) == (Rung.REPLAYED, 5, 5)
    assert _judged(*sites).rung is Rung.RAN


def test_a_value_that_differs_is_a_problem():
    value = _compared(problems=("value 1",), calls_before=3, equal=1)
    own = Own(ran=True, values=[value])

    assert judging.judged(own, _runs(), {}) == Judgement(Rung.DIFFERENT, 3, 1, ("value 1",))


def test_one_that_was_not_compared_has_no_calls():
    own = Own(ran=True, sites=[_site()])

    assert judging.judged(own, _runs(), {}) == Judgement(Rung.RAN, notes=(_NOTHING,))


def test_one_of_what_was_made_that_nobody_called():
    idle: dict[str, Any] = {"made": {"g (line 7)", "f (line 9)", "g (line 8)", "h"}, "told": {"h"}}
    never = ("never called: f, g",)

    found = _judged(_compared(_site(**idle)))
    assert found == Judgement(Rung.NEVER_RAN, 2, 2, notes=never)
    called = _site(made={"h"}, told={"h"})
    assert _judged(_compared(called)) == Judgement(Rung.REPLAYED, 2, 2)
    both = _judged(_compared(called), _compared(_site(made={"f"})))
    assert both == Judgement(Rung.NEVER_RAN, 4, 4, notes=("never called: f",))


@pytest.mark.parametrize(("process", "other"), [(1, 0), (0, 1)])
def test_what_another_process_has_called(process: int, other: int):
    """Two programs of one command share a file, and each calls a part of what it maps."""
    made = {"f (line 7)", "g (line 8)"}
    one = _compared(_site(made=made, told={"f (line 7)"}))
    two = _compared(_site(made=made, told={"g (line 8)"}))
    one.site.process, two.site.process = process, other  # pyright: ignore[reportOptionalMemberAccess]
    assert _judged(one, two) == Judgement(Rung.REPLAYED, 4, 4)

    two.site.process = process  # pyright: ignore[reportOptionalMemberAccess]
    assert _judged(one, two).rung is Rung.NEVER_RAN


def test_nothing_of_what_was_made_was_called():
    own = Own(ran=True, sites=[_site(made={"f"})])

    expected = Judgement(Rung.NEVER_RAN, notes=("it was made, and never called",))
    assert judging.judged(own, _runs(), {}) == expected


def test_a_place_of_which_not_all_ran():
    one = _compared(_site())
    own = Own(ran=False, sites=[one.site])

    assert judging.judged(own, _runs(one), {}) == Judgement(Rung.NEVER_RAN, 2, 2)


@pytest.mark.parametrize("code", [1, None])
def test_a_command_that_failed_shows_nothing(code: int | None):
    found = _judged(_compared(_site()), code=code)

    assert found == Judgement(Rung.RAN, notes=("the command failed before the migration",))


def test_what_gave_something_that_nobody_records_has_not_shown_all():
    one = _compared(_site())
    own = Own(ran=True, alone=True, sites=[one.site])

    assert judging.judged(own, _runs(one), {}) == Judgement(Rung.RAN, notes=(_NOTHING,))


def test_where_others_differ_nothing_of_its_own_is_no_excuse():
    other = _compared(_site(), problems=("call 1",))
    around = ("what is mapped around it differs",)

    found = judging.judged(Own(ran=True), _runs(_compared(_site()), other), {})
    assert found == Judgement(Rung.DIFFERENT, problems=around)
    found = judging.judged(Own(ran=True), _runs(problems=("it ended",)), {})
    assert found == Judgement(Rung.DIFFERENT, problems=("it ended",))


# --- what is a part of something larger


def _around(*compared: SiteComparison, more: SiteRecord | None = None) -> Judgement:
    """Of a place that ran as a part of the calls of these."""
    sites = [each.site for each in compared] + ([more] if more else [])
    return judging.judged(Own(ran=True, around=sites), _runs(*compared), {})


def test_a_place_is_checked_as_a_part():
    ones = [_compared(_site(line=line), notes=("of it",)) for line in (12, 9)]

    expected = Judgement(Rung.REPLAYED, 2, 2, notes=("checked as part of line 9",))
    assert _around(ones[1], ones[1]) == expected
    both = Judgement(Rung.REPLAYED, 4, 4, notes=("checked as part of line 9, 12",))
    assert _around(*ones) == both


def test_a_part_is_as_sure_as_what_is_around_it():
    pair = _programs()
    whole = _compared(_site(), same_form=False)
    proved = _compared(_site(), signatures=(pair,))

    assert _around(whole).rung is Rung.SAME_IN_TWO_RUNS
    found = _around(proved)
    assert (found.rung, found.signatures) == (Rung.SAME_PROGRAM, (pair,))


def test_a_part_of_what_differs_or_shows_nothing():
    differing = _compared(_site(line=9), problems=("call 1",))
    said = "it is a part of what is called in line 9, which differs"
    nothing = _compared(_site(line=9), equal=1)

    assert _around(differing) == Judgement(Rung.DIFFERENT, problems=(said,))
    assert _around(nothing) == Judgement(Rung.RAN, notes=("checked as part of line 9",))


def test_what_is_around_it_has_to_be_compared():
    assert _around(_compared(_site()), more=_site()) == Judgement(Rung.RAN, notes=(_INSIDE,))


def _part(
    before: list[dict[str, Any]], after: list[dict[str, Any]] | None, *covers: SiteComparison
) -> Judgement:
    """Of a place of which only this was traced, as a part of others."""
    one = _site(traced=before, covers=[each.site for each in covers])
    partners = {} if after is None else {id(one): _site(traced=after)}
    return judging.judged(Own(ran=True, sites=[one]), _runs(*covers), partners)


def _traced(factor: int = 2, **more: Any) -> dict[str, Any]:
    return {"text": _text(factor, 3), "environment": {}, **more}


def test_a_part_has_a_text():
    found = _part([_traced(), _traced(), _traced(3)], [_traced(), _traced(), _traced(3)])

    assert (found.rung, found.calls, found.equal) == (Rung.SAME_PROGRAM, 3, 3)
    assert found.notes == (_INSIDE,)
    assert [each["before"] for each in found.signatures] == [_text(2, 3), _text(3, 3)]


def test_the_text_of_a_part_is_one_for_each_number_of_devices():
    sizes = {"4": _text(2, 3)}
    found = _part([_traced(sizes=sizes)], [_traced()])

    assert (found.rung, found.notes) == (Rung.SAME_PROGRAM, (_INSIDE, _ALL))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([_traced()], None),
        ([_traced()], [_traced(3)]),
        ([_traced()], [_traced(), _traced()]),
        ([_traced(), _traced()], [_traced(), _traced(3)]),
        ([_traced()], [{"why": "it takes an iterator"}]),
        ([{"why": "it takes an iterator"}], [_traced()]),
        ([_traced(), {"why": "it takes an iterator"}], [_traced(), _traced()]),
    ],
)
def test_a_part_without_such_texts_is_judged_by_what_is_around_it(before: Any, after: Any):
    assert _part(before, after) == Judgement(Rung.RAN, notes=(_INSIDE,))
    around = _part(before, after, _compared(_site(line=9)))
    assert around == Judgement(Rung.REPLAYED, 2, 2, notes=("checked as part of line 9",))


def test_a_place_that_is_called_and_a_part():
    """Both count: its calls, and what is traced of it elsewhere."""
    one = _compared(_site(traced=[_traced()]))
    found = judging.judged(Own(ran=True, sites=[one.site]), _runs(one), {})

    assert (found.rung, found.notes) == (Rung.RAN, (_INSIDE,))


# --- several together


def test_together():
    ones = (
        Judgement(Rung.SAME_PROGRAM, 1, 1, ("p",), ("a", "b"), ("R2", "R1"), ({"n": 1},)),
        Judgement(Rung.RAN, 4, 2, ("q", "p"), ("b", "c"), ("R1", "R0"), ({"n": 1}, {"n": 2})),
    )

    assert judging.together(ones) == Judgement(
        *(Rung.RAN, 5, 3, ("p", "q"), ("a", "b", "c"), ("R0", "R1", "R2")),
        ({"n": 1}, {"n": 1}, {"n": 2}),
    )


def test_what_stands_in_the_ledger():
    place = PlaceResult("a.py", 3, None, "JXD001", "done", "jax.pmap")
    pair = _programs()
    found = judging.entry(place, Judgement(Rung.RAN, 4, 2, ("p",), ("n",), ("R1",), (pair,)))

    assert found == LedgerEntry(
        *("a.py", 3, "jax.pmap", Rung.RAN, 4, 2),
        **{"problems": ("p",), "notes": ("n",), "rules": ("R1",), "signatures": (pair,)},
    )
