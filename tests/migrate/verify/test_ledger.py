"""What a verification found, as data and as the table that people read."""

import pytest

from jax_dist.migrate.verify.ledger import (
    REQUIREMENTS,
    Ending,
    Ledger,
    LedgerEntry,
    MigrationVerdict,
    MigrationVerification,
    Rung,
    SiteComparison,
)


def test_two_equal_runs_are_not_called_replayed():
    entries = (LedgerEntry("train.py", 3, "jax.pmap", Rung.SAME_IN_TWO_RUNS),)
    end = Ending(exit_code=0, functions=1, calls=44, devices=8, output="")
    runs = MigrationVerification(("python", "train.py"), MigrationVerdict.SAME, end, end, ())
    found = Ledger(runs.command, entries, "copy", runs=runs)

    assert found.headline == "0 of 1 place proved, 1 the same in two runs of 44 calls."
    assert "same in two runs" in str(found)
    assert found.below(REQUIREMENTS["replayed"]) == ()
    assert found.below(REQUIREMENTS["proved"]) == entries


def test_the_headline_says_the_worst():
    entries = (
        LedgerEntry("train.py", 3, "jax.pmap", Rung.SAME_PROGRAM, 4, 4),
        LedgerEntry("train.py", 9, "jax.pmap", Rung.REPLAYED, 40, 40),
        LedgerEntry("train.py", 88, "jax.pmap", Rung.NEVER_RAN),
    )
    found = Ledger(("python", "train.py"), entries, "overlay")

    said = "1 of 3 places proved, 1 replayed 40 of 40 calls, 1 never ran: train.py:88."
    assert found.headline == said
    assert found.worst is Rung.NEVER_RAN
    assert found.below(Rung.REPLAYED) == entries[2:]
    assert (
        str(found.only(entries[:2]).with_put_back(entries[2:]))
        == f"""\
{said}
  command: python train.py
  how:     two runs, before and after, in an overlay of all files

  place        what      proof
  train.py:3   jax.pmap  same program
  train.py:9   jax.pmap  replayed 40 of 40
  train.py:88  jax.pmap  never ran          put back
      next: Run a command that reaches it and calls it."""
    )


@pytest.mark.parametrize(
    ("rung", "reason", "remedy"),
    [
        (Rung.DIFFERENT, "something else", "at the call that is named"),
        (Rung.NEVER_RAN, "never saw it run", "Run a command that reaches it"),
        (Rung.RAISED, "raise an error in both forms", "with what it accepts"),
        (Rung.RAN, "could not compare it", "--require ran"),
        (Rung.REPLAYED, "could not show that the programs are the same", "--require replayed"),
    ],
)
def test_each_level_has_its_own_advice(rung: Rung, reason: str, remedy: str):
    entry = LedgerEntry("train.py", 3, "jax.pmap", rung)
    (shown,) = Ledger((), (), "copy").with_put_back([entry]).entries

    assert reason in entry.reason
    assert remedy in entry.remedy
    assert (entry.to_dict()["next"], shown.to_dict()["next"]) == ("", entry.remedy)


def test_each_attempt_is_told_where_they_came_to_different_levels():
    first, steady = (LedgerEntry("a.py", line, "jax.pmap", Rung.REPLAYED, 4, 4) for line in (3, 9))
    worse = LedgerEntry("a.py", 3, "jax.pmap", Rung.DIFFERENT, problems=("call 2: 1 before",))
    attempts = [
        (how, Ledger((), entries, "copy"))
        for how, entries in (("one", (worse, first, steady)), ("other", (first, steady)))
    ]
    (found, other) = attempts[1][1].with_attempts(attempts).entries

    assert found.attempts == ("one: different: call 2: 1 before", "other: replayed 4 of 4")
    assert other.attempts == ()
    assert "      one: different: call 2: 1 before" in str(attempts[1][1].only([found])).split("\n")


_END = Ending(exit_code=0, functions=2, calls=6, devices=8, output="")


@pytest.mark.parametrize(
    ("code", "said"), [(None, "no end in time"), (-9, "signal 9"), (0, "exit 0"), (3, "exit 3")]
)
def test_how_a_run_ended(code: int | None, said: str):
    assert str(Ending(code, 0, 0, 0, "")) == said


def test_the_whole_table():
    long = "functools.partial(jax.pmap, axis_name='batch')"
    entries = (
        LedgerEntry("a.py", 1, long, Rung.EQUAL_BY_RULES, 2, 2, rules=("R1", "R6")),
        LedgerEntry("a.py", 2, long[:32], Rung.SAME_IN_TWO_RUNS, 2, 2),
        *(LedgerEntry("a.py", line, "f(\n  x)", Rung.NEVER_RAN) for line in range(3, 7)),
        LedgerEntry("a.py", 7, "g", Rung.RAN, notes=("checked as part of line 9",)),
        LedgerEntry("a.py", 8, "h", Rung.RAISED, 1),
        LedgerEntry("a.py", 9, "i", Rung.DIFFERENT, 4, 2, problems=("call 3: 1 before, 2 after",)),
        LedgerEntry("a.py", 10, "j", Rung.REPLAYED, 5, 5, attempts=("one: ran", "two: replayed")),
    )
    runs = MigrationVerification(("python",), MigrationVerdict.DIFFERENT, _END, _END, ())
    found = Ledger(
        ("python", "a b.py"),
        entries,
        "locked copy",
        exit_code=1,
        output="one\ntwo",
        runs=runs,
        problems=("the command ended well before the migration; after it: exit 1",),
        notes=("the output differs",),
    )

    assert (
        str(found)
        == f"""\
1 of 10 places proved, 1 replayed 5 of 5 calls, 1 the same in two runs of 6 calls, \
1 ran: a.py:7, 1 raised: a.py:8, 4 never ran: a.py:3, a.py:4, a.py:5, and 1 more, \
1 differs: a.py:9.
  command: python 'a b.py'
  how:     two runs, before and after, in a copy of the project; nothing may write elsewhere

  place    what                              proof
  a.py:1   {long[:29]}...  equal by rules R1, R6
  a.py:2   {long[:32]}  same in two runs
  a.py:3   f(                                never ran
  a.py:4   f(                                never ran
  a.py:5   f(                                never ran
  a.py:6   f(                                never ran
  a.py:7   g                                 ran
      checked as part of line 9
  a.py:8   h                                 raised
  a.py:9   i                                 different
      different: call 3: 1 before, 2 after
  a.py:10  j                                 replayed 5 of 5
      one: ran
      two: replayed

Different:
  * the command ended well before the migration; after it: exit 1

Also:
  * the output differs

The output ended with:
    one
    two"""
    )


def test_an_empty_ledger_says_that_nothing_ran():
    found = Ledger(("python",), (), "copy")

    assert str(found).split("\n") == [
        "0 of 0 places proved.",
        "  command: python",
        "  how:     two runs, before and after, in a copy of the project; Python code may not "
        "write elsewhere, native code may",
    ]
    assert found.worst is Rung.NEVER_RAN
    assert found.to_dict() == {
        **{"command": ["python"], "headline": "0 of 0 places proved.", "worst": "never ran"},
        **{"places": [], "kept_apart": "copy", "exit_code": 0, "runs": None},
        **{"problems": [], "notes": []},
    }


def test_what_differs_as_a_whole_is_the_worst():
    entry = LedgerEntry("a.py", 1, "f", Rung.SAME_PROGRAM, 1, 1)

    assert Ledger((), (entry,), "copy").worst is Rung.SAME_PROGRAM
    assert Ledger((), (entry,), "copy", problems=("it ended",)).worst is Rung.DIFFERENT
    two = [LedgerEntry("a.py", line, "f", Rung.DIFFERENT) for line in (1, 2)]
    assert Ledger((), tuple(two), "copy").headline.endswith(", 2 differ: a.py:1, a.py:2.")
    three = [LedgerEntry("a.py", line, "f", Rung.RAN) for line in (1, 2, 3)]
    assert Ledger((), tuple(three), "copy").headline.endswith("3 ran: a.py:1, a.py:2, a.py:3.")


def _compared(*differing: tuple[str, str], **more: object) -> SiteComparison:
    numbers = dict.fromkeys(("calls_before", "calls_after", "compared", "raised"), 2)
    return SiteComparison(
        **{"file": "a.py", "line": 1, "function": "f", "devices_before": 8, "devices_after": 8},
        **{"absolute": float("inf"), "relative": 0.5, "how": ("as is",), "problems": (), **numbers},
        **{"notes": ("a note",), "differing": frozenset(differing), **more},
    )


def test_a_function_drifts_that_only_gets_other_values():
    value, result = ("argument[0]", "value"), ("result", "value")

    assert _compared(value).drifted
    assert _compared(value, ("argument[1]", "value")).drifted
    assert not _compared().drifted
    assert not _compared(result).drifted
    assert not _compared(value, result).drifted
    assert not _compared(("argument[0]", "type")).drifted


def test_two_runs_as_data():
    ended = Ending(None, 1, 2, 8, "the end")
    site = _compared(("result", "value"), signatures=({"sizes": {}},), unproved="no", site=object())
    found = MigrationVerification(
        ("python", "a.py"),
        MigrationVerdict.DIFFERENT,
        _END,
        ended,
        (site,),
        ("late",),
        (),
        ("new",),
    )

    assert found.differs
    assert found.to_dict() == {
        "command": ["python", "a.py"],
        "verdict": "different",
        "before": {"exit_code": 0, "functions": 2, "calls": 6, "devices": 8, "output": ""},
        "after": {"exit_code": None, "functions": 1, "calls": 2, "devices": 8, "output": "the end"},
        "sites": [
            {
                **{"file": "a.py", "line": 1, "function": "f", "calls_before": 2, "calls_after": 2},
                **{"compared": 2, "raised": 2, "devices_before": 8, "devices_after": 8},
                **{"largest_absolute_difference": None, "largest_relative_difference": 0.5},
                **{"how": ["as is"], "problems": [], "notes": ["a note"], "equal": 0},
                **{"same_form": True, "unsteady": False},
            }
        ],
        "problems": ["late"],
        "unproven": [],
        "notes": ["new"],
        "is_complete": True,
    }
    same = MigrationVerification((), MigrationVerdict.SAME, _END, _END, ())
    assert not same.differs
    assert Ledger((), (), "copy", runs=same).to_dict()["runs"] == same.to_dict()


def test_a_place_as_data():
    texts = ({"before": {}, "after": {}},)
    entry = LedgerEntry(
        *("a.py", 3, "f", Rung.EQUAL_BY_RULES, 2, 2), rules=("R1",), signatures=texts, notes=("n",)
    )

    assert entry.to_dict() == {
        **{"path": "a.py", "line": 3, "what": "f", "rung": "equal by rules", "calls": 2},
        **{"equal": 2, "problems": [], "notes": ["n"], "put_back": False, "attempts": []},
        **{"rules": ["R1"], "next": ""},
    }


def test_a_place_that_never_ran_has_no_calls():
    found = LedgerEntry("a.py", 3, "f", Rung.NEVER_RAN).to_dict()

    assert (found["calls"], found["equal"]) == (0, 0)


def test_what_can_be_required():
    assert REQUIREMENTS == {
        **{"proved": Rung.EQUAL_BY_RULES, "replayed": Rung.SAME_IN_TWO_RUNS, "ran": Rung.RAN}
    }
    same = Ledger((), (LedgerEntry("a.py", 3, "f", Rung.SAME_IN_TWO_RUNS),), "copy")
    assert same.headline == "0 of 1 place proved, 1 the same in two runs of 0 calls."


def test_places_that_stay_come_in_their_order():
    done = [LedgerEntry(path, 5, "f", Rung.REPLAYED) for path in ("a.py", "b.py")]
    back = [LedgerEntry("b.py", 2, "f", Rung.RAN), LedgerEntry("a.py", 9, "f", Rung.RAN)]
    found = Ledger((), tuple(done), "copy").with_put_back(back).entries

    assert [(each.where, each.put_back) for each in found] == [
        ("a.py:5", False),
        ("a.py:9", True),
        ("b.py:2", True),
        ("b.py:5", False),
    ]
    assert found[1].key == ("a.py", 9, "f")


def test_of_an_attempt_its_worst_is_told_and_what_is_said_twice_is_told_once():
    entries = [
        LedgerEntry("a.py", 3, "f", Rung.RAN, notes=("first", "second")),
        LedgerEntry("a.py", 3, "f", Rung.REPLAYED, 1, 1),
        LedgerEntry("a.py", 3, "f", Rung.DIFFERENT, problems=("other",), notes=("a note",)),
    ]
    attempts = [(str(number), Ledger((), (each,), "copy")) for number, each in enumerate(entries)]
    again = [*attempts, ("3", attempts[0][1])]
    (found,) = attempts[1][1].with_attempts(again).entries

    assert found.attempts == ("0: ran: first", "1: replayed 1 of 1", "2: different: other")
    both = Ledger((), tuple(entries[1:]), "copy")
    found = both.with_attempts([("x", both), attempts[0]]).entries
    assert {each.attempts for each in found} == {("x: different: other", "0: ran: first")}
