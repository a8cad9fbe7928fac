"""The verdict on two runs, from what they have written down."""

import os
import pathlib

import numpy as np
import pytest

from jax_dist.migrate.verify.comparison import judged, pairs, pairs_inside
from jax_dist.migrate.verify.evidence import Array, CallRecord, Run, RunRecord, SiteRecord
from jax_dist.migrate.verify.ledger import MigrationVerdict, MigrationVerification

_FILE = "/project/a.py"
_CALL, _FAILED = CallRecord((), (), None), CallRecord((), (), "ValueError")


def _site(function: str = "f", *calls: CallRecord, **more: object) -> SiteRecord:
    given = {"process": 0, "file": _FILE, "line": 7, "within": ("<module>",), "is_mapped": True}
    site = SiteRecord(**{**given, "function": function, "count": len(calls), **more})  # pyright: ignore
    site.calls += calls
    return site


def _run(*sites: SiteRecord, code: int | None = 0, output: str = "", **more: object) -> Run:
    return Run(code, output, RunRecord(sites, **more))  # pyright: ignore[reportArgumentType]


def _verdict(
    first: Run, second: Run, again: Run | None = None, **options: object
) -> MigrationVerification:
    return judged(["train"], first, second, again, files=[pathlib.Path(_FILE)], **options)  # pyright: ignore


def _one(code: int | None = 0, output: str = "") -> Run:
    return _run(_site("f", _CALL), code=code, output=output)


def test_equal_runs_are_the_same():
    found = _verdict(_one(), _one())

    assert found.verdict is MigrationVerdict.SAME
    assert found.command == ("train",)
    assert (found.problems, found.unproven, found.notes) == ((), (), ())
    assert [(site.file, site.function) for site in found.sites] == [(_FILE, "f")]


def test_a_place_below_the_current_folder_is_told_from_there():
    site = _site("f", _CALL, file=os.path.realpath("a.py"))
    (found,) = _verdict(_run(site), _run(site)).sites

    assert (found.file, found.site) == ("a.py", site)


@pytest.mark.parametrize(
    ("codes", "verdict", "problems", "unproven"),
    [
        (
            (0, 3),
            MigrationVerdict.DIFFERENT,
            ("the command ended well before the migration; after it: exit 3",),
            (),
        ),
        (
            (0, None),
            MigrationVerdict.DIFFERENT,
            ("the command ended well before the migration; after it: no end in time",),
            (),
        ),
        (
            (3, None),
            MigrationVerdict.DIFFERENT,
            ("the command ended before the migration (exit 3), and not in time after it",),
            ("the command failed before the migration (exit 3); after it: no end in time",),
        ),
        (
            (3, 4),
            MigrationVerdict.UNPROVEN,
            (),
            ("the command failed before the migration (exit 3); after it: exit 4",),
        ),
        (
            (None, None),
            MigrationVerdict.UNPROVEN,
            (),
            ("the command failed before the migration (no end in time); after it: no end in time",),
        ),
        (
            (-9, 0),
            MigrationVerdict.UNPROVEN,
            (),
            ("the command failed before the migration (signal 9); it runs now",),
        ),
    ],
)
def test_how_the_two_end(codes, verdict, problems, unproven):
    found = _verdict(_one(codes[0]), _one(codes[1]))

    assert (found.verdict, found.problems, found.unproven) == (verdict, problems, unproven)


def test_the_last_error_of_a_command_that_failed_is_told():
    output = "KeyError: 1\njax.errors.JaxRuntimeError: 2\nFor simplicity, JAX has removed\n"
    (said,) = _verdict(_one(1, output), _one(1)).unproven

    assert "(exit 1: jax.errors.JaxRuntimeError: 2); after it: exit 1" in said


def test_a_call_that_is_different():
    found = _verdict(_one(), _run(_site("f", _FAILED)))

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert found.sites[0].problems == ("call 1, error: raised nothing before, ValueError after",)


def test_fewer_calls_are_different():
    found = _verdict(_run(_site("f", _CALL, _CALL)), _one())

    assert found.sites[0].problems == ("calls: 2 before, 1 after",)


def test_what_differs_from_run_to_run_shows_nothing():
    steady, other = _site("g", _CALL), _site("g", _FAILED)
    first, second = _run(_site("f", _CALL), steady), _run(_site("f", _FAILED), other)
    again = _run(_site("f", _FAILED), _site("g", _CALL))
    found = _verdict(first, second, again)

    assert [bool(site.problems) for site in found.sites] == [False, True]
    assert [site.unsteady for site in found.sites] == [True, False]


def test_no_float_may_differ_unless_that_is_said(tmp_path: pathlib.Path):
    runs = []
    for number in (4.0, 5.0):
        archive = tmp_path / f"{number}.npz"
        np.savez(archive, x=np.array([number]))
        array = Array("", "float64", (1,), 8, 8, archive, "x")
        runs.append(_run(_site("f", CallRecord((), (array,), None))))

    assert _verdict(*runs).verdict is MigrationVerdict.DIFFERENT
    assert _verdict(*runs, tolerance=0.25).verdict is MigrationVerdict.SAME


@pytest.mark.parametrize(
    "file", ["/lib/equinox/_vmap_pmap.py", "/lib/flax/nnx/transforms/iteration.py"]
)
def test_what_a_library_mapped_may_map_inside_of_jax_dist_now(file: str):
    first = _run(_site("f", _CALL), _site("g", _CALL, file=file))
    gone, there = _run(_site("f", _CALL)), _run(_site("f", _CALL), _site("g", _FAILED, file=file))

    found = _verdict(first, gone)
    assert found.verdict is MigrationVerdict.UNPROVEN
    assert found.unproven == (f"{file}:7 g was called only before the migration",)
    assert [site.function for site in found.sites] == ["f"]
    assert _verdict(first, there).verdict is MigrationVerdict.DIFFERENT


def test_any_other_that_is_gone_is_different():
    first = _run(_site("f", _CALL), _site("g", _CALL, file="/other.py"))
    found = _verdict(first, _one())

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert found.sites[1].problems == (
        "it was called before, and no mapped function like it after",
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden": True, "inside": True}, "was called only inside a larger traced function"),
        ({}, "was mapped, and never called"),
        ({"hidden": True, "inside": True, "file": "/other.py"}, None),
        ({"file": "/other.py"}, None),
        ({"inside": True}, None),
    ],
)
def test_what_was_not_compared(more: dict, said: str | None):
    first = _run(_site("f", _CALL), _site("g", **more))
    expected = () if said is None else (f"{_FILE}:7 g {said}",)

    assert _verdict(first, _one()).unproven == expected
    assert _verdict(_one(), first).unproven == ()
    # A run that failed has stopped on the way: the other one tells.
    assert _verdict(_one(1), first).unproven[1:] == expected
    assert len(_verdict(_run(*first.record.sites, code=1), _one()).unproven) == 1


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        ({"process": 1}, False),
        ({"process": 1, "line": 8}, True),
        ({"process": 1, "file": "/other.py"}, True),
        ({"process": 1, "function": "h"}, True),
        ({}, True),
    ],
)
def test_what_another_process_has_called_is_compared(more: dict, *, is_said: bool):
    name = more.pop("function", "g")
    first = _run(_site("f", _CALL), _site("g"), _site(name, _CALL, **more))

    said = [each for each in _verdict(first, first).unproven if each.endswith("never called")]
    assert len(said) == is_said


def test_nothing_to_compare_with():
    (said,) = _verdict(_run(), _one()).unproven

    assert said == "no mapped function was called before the migration: nothing to compare with"


def test_a_record_with_gaps_is_not_complete():
    whole, gaps = _one(), _run(_site("f", _CALL), is_complete=False)
    said = "not all that the command did {} the migration was written down"

    found = [_verdict(*each) for each in ((whole, whole), (gaps, whole), (whole, gaps))]
    assert [each.is_complete for each in found] == [True, False, False]
    assert [each.unproven for each in found] == [
        *((), (said.format("before"),), (said.format("after"),))
    ]


def test_what_still_ran_at_the_end_is_named():
    first = _run(_site("f", _CALL), is_complete=False, left=("python train.py",))

    assert _verdict(first, _one()).unproven == (
        "`python train.py` still ran when the command ended before the migration: wait for it",
        "not all that the command did before the migration was written down",
    )


def test_what_could_not_be_recorded_is_not_proved():
    first = _run(_site("f", _CALL), problems=("f: OSError",))

    assert _verdict(first, _one()).unproven == (
        "a call could not be recorded before the migration: f: OSError",
    )
    assert _verdict(_one(), first).unproven == (
        "a call could not be recorded after the migration: f: OSError",
    )


def test_what_is_new_is_a_note():
    second = _run(_site("f", _CALL), _site("g", _CALL))
    found = _verdict(_one(), second)

    assert found.verdict is MigrationVerdict.SAME
    assert found.notes == (f"{_FILE}:7 g was called only after the migration",)
    assert _verdict(_one(1), second).notes == ()


def test_the_first_line_of_output_that_differs_is_a_note():
    found = _verdict(_one(output="a\nb\nc"), _one(output="a\nB\nC"))

    assert found.verdict is MigrationVerdict.SAME
    assert found.notes == ("the output differs from line 2 on: 'b' before, 'B' after",)
    assert _verdict(_one(output="a"), _one(1, output="b")).notes == ()
    assert _verdict(_one(1, output="a"), _one(output="b")).notes == ()
    assert _verdict(_one(output="a"), _one(output="a\nb")).notes == ()


def test_what_is_said_of_one_run():
    arrays = [Array("", "float32", (1,), devices, 1, None) for devices in (0, 8, 4)]
    one = _site("f", CallRecord((), tuple(arrays[:2]), None), CallRecord((), (arrays[2],), None))
    run = _run(one, _site("g", _CALL, count=40), _site("idle"), output="\n".join("x" * 20))
    found = _verdict(run, _one())

    assert (found.before.functions, found.before.calls, found.before.devices) == (2, 42, 4)
    assert found.before.output == "\n".join("x" * 12)
    assert (found.after.functions, found.after.calls, found.after.devices) == (1, 1, 0)


# --- the same function in both runs


def _paired(before: list[SiteRecord], after: list[SiteRecord]) -> list[int | None]:
    """Of each of `before` that was called, the number of its partner."""
    found, _ = pairs(RunRecord(tuple(before)), RunRecord(tuple(after)))
    places = {id(site): number for number, site in enumerate(after)}
    return [None if other is None else places[id(other)] for _, other in found]


def test_processes_are_told_apart():
    sites = [_site("f", _CALL, process=number) for number in (0, 1)]

    elsewhere = [_site("f", _CALL, process=number, within=("main",)) for number in (1, 0)]

    assert _paired(sites, sites[::-1]) == [1, 0]
    assert _paired(sites, elsewhere) == [1, 0]
    assert _paired(sites, [_site("g", _CALL, process=number) for number in (1, 0)]) == [1, 0]


def test_what_is_inside_of_another_is_a_partner_only_where_it_was_called():
    part = _site("f", _CALL, inside=True)

    assert _paired([_site("f", _CALL)], [part, _site("f")]) == [0]
    part.count = 0
    assert _paired([_site("f", _CALL)], [part, _site("f")]) == [1]


def test_the_order_of_making_decides_also_between_the_called_and_the_idle():
    before = [_site("f"), _site("f", _CALL)]

    assert _paired(before, [_site("f", _CALL), _site("f", _CALL)]) == [1]


def test_what_was_traced_as_a_part_has_partners_too():
    text = {"text": {}}
    inner, other = (_site("f", inside=True, traced=[text]) for _ in range(2))
    before = RunRecord((_site("f", _CALL), inner))
    after = RunRecord((_site("f", _CALL), other))

    assert pairs_inside(before, after) == {id(inner): other}
    assert pairs_inside(before, RunRecord((_site("f", _CALL),))) == {}
    assert pairs_inside(before, RunRecord((_site("g", inside=True, traced=[text]),))) == {}
