"""What runs of a program say of each migrated place, from what they have written down."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jax_dist._usage import MisuseError
from jax_dist.migrate.results import FileMigration, PlaceResult
from jax_dist.migrate.verify import sandbox, trial
from jax_dist.migrate.verify.evidence import Array, CallRecord, Run, RunRecord, SiteRecord
from jax_dist.migrate.verify.ledger import Ledger, LedgerEntry, Rung

_CALL, _FAILED = CallRecord((), (), None), CallRecord((), (), "ValueError")
_STEADY = "without the migration, the command computes the same twice"
_BEFORE = "import jax\nstep = jax.pmap(f)\nother = jax.pmap(g)\n"
_AFTER = "import jax\nimport jax_dist\nstep = jax_dist.pmap(f)\nother = jax_dist.pmap(g)\n"
_MARKED = (
    "import _jax_dist_recording.start as __jd__\nimport jax\n"
    "step = (__jd__.place(0, (jax.pmap)))(f)\nother = (__jd__.place(1, (jax.pmap)))(g)\n"
)


class Stage:
    """Stands in for what runs the command: each run gives what was written before."""

    way = "overlay"
    command = ("python", "a.py")

    def __init__(self, runs: list[Run]):
        self.runs, self.changes, self.asked = runs, [], []

    def recorded(self, changes: Any, files: Any, *, watched: bool = False) -> Run:
        self.changes.append({path.name: data.decode() for path, data in changes.items()})
        self.asked.append(([path.name for path in files], watched))
        return self.runs.pop(0)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Staged:
    """A migration of one file, or of several, and the runs that are to come."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.told, self.options = folder, [], {}
        self.stage = Stage([])

        @contextlib.contextmanager
        def staged(command: Any, files: Any, **options: Any) -> Iterator[Stage]:
            self.options = {"command": command, "files": [each.name for each in files], **options}
            yield self.stage

        monkeypatch.setattr(sandbox, "stage", staged)

    def place(self, line: int, what: str = "jax.pmap", **more: Any) -> PlaceResult:
        given = {"path": str(self.folder / "a.py"), "cell": None, "code": "JXD001"}
        return PlaceResult(**{**given, "line": line, "what": what, "status": "done", **more})

    def file(
        self,
        *places: PlaceResult,
        before: str = _BEFORE,
        after: str = _AFTER,
        name: str = "a.py",
        **more: Any,
    ) -> FileMigration:
        path = self.folder / name
        if not more.get("is_new"):
            path.write_text(before)
        return FileMigration(str(path), before.encode(), after.encode(), places, **more)

    def verified(self, files: list[FileMigration], *runs: Run, **options: Any) -> Ledger:
        self.stage.runs[:] = runs
        return trial.verified(["python", "a.py"], files, progress=self.told.append, **options)

    def site(self, function: str = "f", *calls: CallRecord, **more: Any) -> SiteRecord:
        given = {"process": 0, "file": str((self.folder / "a.py").resolve()), "line": 3}
        given |= {"within": ("<module>",), "is_mapped": True, "count": len(calls)}
        site = SiteRecord(**{**given, "function": function, **more})  # pyright: ignore
        site.calls += calls
        return site


@pytest.fixture
def staged(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Staged:
    return Staged(folder, monkeypatch)


def _run(*sites: SiteRecord, ran: Any = (0, 1), code: int | None = 0, **more: Any) -> Run:
    record = {name: more.pop(name) for name in ("hosts", "problems") if name in more}
    output = more.pop("output", "")
    return Run(code, output, RunRecord(sites, **record), ran=frozenset(ran), **more)


def _told(ledger: Ledger) -> list[tuple[int, Rung]]:
    return [(each.line, each.rung) for each in ledger.entries]


def _both(staged: Staged, *second: CallRecord) -> tuple[Run, Run]:
    """Two functions at the two places; calls of the second one after, if they differ."""
    first = _run(staged.site("f", _CALL, places={0}), staged.site("g", _CALL, line=4, places={1}))
    after = _run(staged.site("f", _CALL), staged.site("g", *(second or (_CALL,)), line=5), ran=())
    return first, after


def test_two_equal_runs(staged: Staged):
    """The lines of what was mapped are those of the program without marks."""
    files = [staged.file(staged.place(3), staged.place(2))]
    first, second = _both(staged)
    second = _run(*second.record.sites, ran=(), output="the end")
    found = staged.verified(files, first, second)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.REPLAYED)]
    assert [(each.calls, each.equal) for each in found.entries] == [(1, 1), (1, 1)]
    assert (found.command, found.kept_apart) == (("python", "a.py"), "overlay")
    assert (found.exit_code, found.output, found.problems, found.notes) == (0, "", (), found.notes)
    assert found.notes == ()
    assert found.runs is not None
    assert [site.line for site in found.runs.sites] == [2, 3]
    assert staged.told == [
        "running the command before the migration",
        "running the command after it",
    ]
    assert staged.stage.changes == [
        {"a.py": _MARKED.replace("place(0", "place(9").replace("1", "0").replace("9", "1")},
        {"a.py": f"import _jax_dist_recording.start as __jd__\n{_AFTER}"},
    ]
    assert staged.stage.asked == [(["a.py"], False)] * 2


def test_how_it_is_kept_apart(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    staged.verified(files, *_both(staged), devices=4, timeout=5.0, scratch=["s"])

    assert staged.options == {
        **{"command": ["python", "a.py"], "files": ["a.py"]},
        **{"devices": 4, "timeout": 5.0, "scratch": ["s"]},
    }
    staged.verified(files, *_both(staged))
    assert (staged.options["devices"], staged.options["timeout"]) == (8, None)


def test_a_file_that_is_no_longer_what_it_was(staged: Staged):
    file = staged.file(staged.place(2))
    (staged.folder / "a.py").write_text("other")

    with pytest.raises(MisuseError, match="has changed since it was read"):
        staged.verified([file])
    assert staged.options == {}


def test_files_that_change_nothing_are_left_out(staged: Staged):
    """But a place of one may change by what another file defines; others are no program."""
    unchanged = staged.file(before="x = 1\n", after="x = 1\n", name="b.py")
    place = staged.place(1, "jax.pmap", path=str(staged.folder / "c.py"))
    text = "y = jax.pmap\n"
    by_others = staged.file(place, before=text, after=text, name="c.py")
    new = staged.file(before="", after="z = 1\n", name="_mapped.py", is_new=True)
    notes = staged.file(before="{}", after="{ }", name="d.ipynb")
    left = staged.place(9, status="left")
    changed = staged.file(staged.place(2), staged.place(3), left)
    found = staged.verified([unchanged, by_others, new, notes, changed], *_both(staged))

    assert staged.options["files"] == ["c.py", "_mapped.py", "d.ipynb", "a.py"]
    first, second = staged.stage.changes
    assert [*first] == ["c.py", "a.py"]
    assert second["_mapped.py"] == "z = 1\n"
    assert (second["d.ipynb"], "b.py" in second) == ("{ }", False)
    assert "y = (__jd__.place(0, (jax.pmap)))" in first["c.py"]
    assert "place(1, (jax.pmap))" in first["a.py"]
    assert len(found.entries) == 3


# --- what differs


def test_what_differs_is_run_once_more(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged, _FAILED)
    found = staged.verified(files, first, second, _both(staged)[0])

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.DIFFERENT)]
    assert found.notes == (_STEADY,)
    assert staged.told[2:] == [
        "running the command before the migration again, for something differs"
    ]
    assert [*staged.stage.changes[2].values()] == [_MARKED]


def test_what_differs_from_run_to_run_shows_nothing(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged, _FAILED)
    again = _both(staged)[0]
    again.record.sites[1].calls[:] = [_FAILED]
    found = staged.verified(files, first, second, again)

    assert found.notes[0].startswith("the command does not compute the same twice, even without")
    assert found.runs is not None
    assert not found.runs.differs
    assert dict(_told(found))[2] is Rung.REPLAYED
    assert dict(_told(found))[3] is Rung.RAN


def test_what_no_place_explains_lowers_all(staged: Staged):
    """What is called elsewhere differs; the places show the same."""
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    elsewhere = {"file": "/other.py", "line": 9}
    first, second, again = (
        _run(*run.record.sites, staged.site("h", call, **elsewhere), ran=run.ran)
        for run, call in ((first, _CALL), (second, _FAILED), (_both(staged)[0], _CALL))
    )
    found = staged.verified(files, first, second, again)

    said = "/other.py:9 h, call 1, error: raised nothing before, ValueError after"
    assert _told(found) == [(2, Rung.DIFFERENT), (3, Rung.DIFFERENT)]
    assert found.problems == (said,)
    assert [each.problems for each in found.entries] == [(said,)] * 2
    assert found.worst is Rung.DIFFERENT


def test_entries_are_lowered_with_their_proofs():
    entry = LedgerEntry("a.py", 1, "f", Rung.SAME_PROGRAM, 1, 1, rules=("R1",), signatures=({},))
    runs = Ledger((), (), "copy")
    site = type("Site", (), {"file": "b.py", "line": 2, "function": "g", "problems": ("x",)})()
    found = type("Runs", (), {"problems": ("late",), "sites": (site,)})()
    (lowered,), said = trial._with_unexplained([entry], found)  # pyright: ignore

    assert said == ("late", "b.py:2 g, x")
    assert (lowered.rung, lowered.rules, lowered.signatures) == (Rung.DIFFERENT, (), ())
    assert lowered.problems == said
    different = LedgerEntry("a.py", 2, "f", Rung.DIFFERENT)
    entries = [entry, different]
    assert trial._with_unexplained(entries, found) == (entries, ())  # pyright: ignore
    nothing = type("Runs", (), {"problems": (), "sites": ()})()
    assert trial._with_unexplained([entry], nothing) == ([entry], ())  # pyright: ignore
    assert runs.worst is Rung.NEVER_RAN


def test_a_command_that_ends_otherwise(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    failed = _run(*second.record.sites, ran=(), code=3, output="one\ntwo")
    found = staged.verified(files, first, failed, _both(staged)[0])

    said = "the command ended well before the migration; after it: exit 3"
    assert (found.exit_code, found.output) == (3, "one\ntwo")
    assert found.problems == (said,)
    assert {each.rung for each in found.entries} == {Rung.DIFFERENT}
    assert found.notes == (_STEADY,)


def test_a_command_that_fails_in_both_forms_is_no_proof(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = (
        _run(*run.record.sites, ran=run.ran, code=1, output="end") for run in _both(staged)
    )
    found = staged.verified(files, first, second)

    assert {each.rung for each in found.entries} == {Rung.RAN}
    assert found.notes == (
        "the command failed before the migration (exit 1); after it: exit 1",
        "the command fails without the migration too, and a command that fails is no proof",
    )
    assert found.output == "end"
    well = _both(staged)[1]
    again = staged.verified(files, first, well)
    assert again.notes == ("the command failed before the migration (exit 1); it runs now",)


def test_a_command_that_fails_in_a_copy_may_work_where_it_is(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Stage, "way", "copy")
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = (_run(*run.record.sites, ran=run.ran, code=1) for run in _both(staged))
    found = staged.verified(files, first, second)

    assert found.notes == (
        "the command failed before the migration (exit 1); after it: exit 1",
        "in a copy of the project, the command fails without the migration too, and a command that "
        "fails is no proof: if it works where it is, it may need what a copy has not, as its own "
        "path, a pipe or .hg; allow user namespaces, and no copy is made",
    )


def test_what_was_not_compared_is_a_note(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    new = staged.site("new", _CALL, file="/other.py")
    second = _run(*second.record.sites, new, ran=(), problems=("f: full",))
    found = staged.verified(files, first, second)

    assert found.notes == (
        "a call could not be recorded after the migration: f: full",
        "/other.py:3 new was called only after the migration",
    )


# --- which calls and values are whose


def test_a_place_is_judged_by_what_was_handed_on_through_it(staged: Staged):
    """Wherever it was mapped; and a place without calls of its own has nothing to show."""
    files = [staged.file(staged.place(2), staged.place(3))]
    sites = [staged.site("f", _CALL, file="/other.py", places={0, 7})]
    found = staged.verified(files, _run(*sites), _run(staged.site("f", _CALL, file="/other.py")))

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.RAN)]


def test_a_place_that_did_not_run(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    for ran in ((0,), ()):
        first, second = _both(staged)
        found = staged.verified(files, _run(*first.record.sites, ran=ran), second)
        expected = Rung.REPLAYED if ran else Rung.NEVER_RAN
        assert _told(found) == [(2, expected), (3, Rung.NEVER_RAN)]


def test_a_place_of_which_one_expression_did_not_run(staged: Staged):
    text = "import jax\nx = jax.pmap(f) if a else jax.pmap(g)\n"
    after = text.replace("jax.pmap", "own.pmap")
    file = staged.file(staged.place(2), before=text, after=after)
    calls = staged.site("f", _CALL, places={0}), staged.site("f", _CALL)

    found = staged.verified([file], _run(calls[0], ran=(0, 1)), _run(calls[1]))
    assert _told(found) == [(2, Rung.REPLAYED)]
    found = staged.verified([file], _run(calls[0], ran=(0,)), _run(calls[1]))
    assert _told(found) == [(2, Rung.NEVER_RAN)]
    two = f"{text}y = jax.pmap(h)\n"
    other = staged.place(2), staged.place(3)
    file = staged.file(*other, before=two, after=two.replace("jax.pmap", "own.pmap"))
    found = staged.verified([file], _run(calls[0], ran=(0, 2)), _run(calls[1]))
    assert _told(found)[0] == (2, Rung.NEVER_RAN)
    # Of two places that look alike, each has its own.
    both = [staged.place(2), staged.place(2)]
    file = staged.file(*both, before=text, after=after)
    found = staged.verified([file], _run(calls[0], ran=(0,)), _run(calls[1]))
    assert sorted(each.rung for each in found.entries) == [Rung.NEVER_RAN, Rung.REPLAYED]


def test_a_value_that_nobody_records(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    first = _run(*first.record.sites, alone=frozenset({0}))
    found = staged.verified(files, first, second)

    assert _told(found) == [(2, Rung.RAN), (3, Rung.REPLAYED)]


def test_what_ran_a_place_as_a_part_of_its_calls(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    whole = [staged.site("whole", _CALL, file="/other.py", around=set(), line=8) for _ in range(2)]
    whole[0].around |= {0}
    found = staged.verified(files, _run(whole[0]), _run(whole[1], ran=()))

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.RAN)]
    assert found.entries[0].notes == ("checked as part of line 8",)


def test_a_jit_without_anything_mapped_is_no_calls_of_a_place(staged: Staged):
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    first.record.sites[1].is_mapped = second.record.sites[1].is_mapped = False
    first.record.sites[1].made = {"g"}
    found = staged.verified(files, first, second)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.RAN)]


def test_a_statement_has_the_calls_of_its_lines(staged: Staged):
    text = "import jax\nif a:\n    x = step(\n        1)\ny = 2\n"
    after = "import jax\nif a:\n    pass\ny = 2\n"
    place = staged.place(3, "x = step(\n    1)", is_mapped=True)
    file = staged.file(place, before=text, after=after)
    sites = [staged.site("f", _CALL, line=5, places=set()), staged.site("f", _CALL, line=4)]
    elsewhere = [staged.site("g", _CALL, _CALL, line=line) for line in (6, 5)]
    others = [staged.site("h", _FAILED, line=4, file="/other.py")] * 2
    first = _run(sites[0], elsewhere[0], others[0], ran=(0, 1), alone=frozenset({0, 1}))
    second = _run(sites[1], elsewhere[1], others[1], ran=())
    found = staged.verified([file], first, second)

    (entry,) = [each for each in found.entries if each.line == 3]
    assert (entry.rung, entry.calls) == (Rung.REPLAYED, 1)
    assert [site.line for site in first.record.sites] == [4, 5, 4]


def test_a_statement_whose_value_nobody_records(staged: Staged):
    text = "import jax\nx = step(1)\ny = 2\n"
    file = staged.file(staged.place(2, "x = step(1)"), before=text, after="import jax\ny = 2\n")
    runs = _run(ran=(0,), alone=frozenset({0})), _run()
    found = staged.verified([file], *runs)

    assert _told(found) == [(2, Rung.RAN)]
    around = [staged.site("h", _CALL, file="/other.py", around={0}) for _ in range(2)]
    runs = _run(around[0], ran=(0,), alone=frozenset({0})), _run(around[1])
    assert _told(staged.verified([file], *runs)) == [(2, Rung.RAN)]
    runs = _run(around[0], ran=(0,)), _run(around[1])
    assert _told(staged.verified([file], *runs)) == [(2, Rung.REPLAYED)]


_TEXT = {"in": [], "consts": [], "eqns": [], "out": [], "weak": []}


def test_what_is_traced_as_a_part_is_judged_by_its_text(staged: Staged):
    traced = {"text": _TEXT, "sizes": {}, "paths": [], "environment": {}}
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = _both(staged)
    parts = [
        staged.site("part", inside=True, traced=[traced], places=places) for places in ({1}, set())
    ]
    first = _run(first.record.sites[0], parts[0])
    second = _run(second.record.sites[0], parts[1], ran=())
    found = staged.verified(files, first, second)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.SAME_PROGRAM)]


def test_an_edit_that_no_outcome_speaks_of_is_a_place(staged: Staged):
    text = f"{_BEFORE}scale = 1\nprint(scale)\n"
    after = f"{_AFTER}scale = 2\nprint(scale)\n"
    file = staged.file(staged.place(2), staged.place(3), before=text, after=after)
    first, second = _both(staged)
    found = staged.verified([file], _run(*first.record.sites, ran=(0, 1, 2)), second)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.REPLAYED), (4, Rung.RAN)]
    assert found.entries[2].what == "1"
    assert "scale = (__jd__.place(2, (1)))" in staged.stage.changes[0]["a.py"]


def test_an_edit_within_a_place_is_that_place(staged: Staged):
    """What is called with its call; of a statement, its lines."""
    text = "import jax\nstep = jax.pmap(f, 'i')\nx = f(\n    1)\nx = jax.pmap(g)(1)\n"
    after = "import jax\nstep = own(f, 'i', mesh)\nx = f(\n    2)\nx = jax.pmap(h)(1)\n"
    places = [staged.place(2), staged.place(3, "x = f(\n    1)", is_mapped=False)]
    staged.verified([staged.file(*places, before=text, after=after)], _run(), _run())
    ledger = staged.verified([staged.file(*places, before=text, after=after)], _run(), _run())

    assert [(each.line, each.what) for each in ledger.entries] == [
        *((2, "jax.pmap"), (3, "x = f(\n    1)"), (5, "g"))
    ]


def test_an_edit_beside_a_place_is_none_of_it(staged: Staged):
    text = "import jax\nx = (jax.pmap(f), 1)\ny = jax.pmap(g)\n"
    after = "import jax\nx = (own(f), 2)\nfor a in b: y = own(g)\n"
    file = staged.file(staged.place(2), staged.place(3), before=text, after=after)
    ledger = staged.verified([file], _run(), _run())

    assert [(each.line, each.what) for each in ledger.entries] == [
        *((2, "jax.pmap"), (2, "1"), (3, "jax.pmap"))
    ]


def test_an_import_is_no_place_where_its_uses_are(staged: Staged):
    text = "from jax import pmap\nimport jax.numpy as jnp\nstep = pmap(f)\nx = jnp.ones(3)\n"
    after = "from own import pmap\nimport own.numpy as jnp\nstep = pmap(f)\nx = jnp.ones(3)\n"
    file = staged.file(staged.place(3, "pmap"), before=text, after=after)
    sites = [staged.site("f", _CALL, places={0}) for _ in range(2)]
    found = staged.verified([file], _run(sites[0], ran=(0, 1)), _run(sites[1]))

    assert [(each.line, each.what) for each in found.entries] == [
        *((2, "import jax.numpy as jnp"), (3, "pmap"))
    ]
    marked = staged.stage.changes[0]["a.py"]
    assert "import jax.numpy as jnp; jnp = __jd__.place(" in marked
    assert "from jax import pmap\n" in marked


def test_a_cell_of_a_notebook_has_no_number(staged: Staged):
    place = staged.place(2, cell=4, path=str(staged.folder / "d.ipynb"))
    notebook = staged.file(place, before="{}", after="{ }", name="d.ipynb")
    found = staged.verified([notebook], _run(), _run())

    assert _told(found) == [(2, Rung.NEVER_RAN)]


# --- host edits

_HOST = "import u\ny = u.first(x)\nz = u.first(w)\n"
_HOST_AFTER = "import u\ny = x\nz = w\n"


def _value(folder: pathlib.Path, number: float, **more: Any) -> CallRecord:
    archive = folder / f"{number}.npz"
    np.savez(archive, x=np.array([number]))
    return CallRecord((), (Array("", "float64", (1,), 1, 1, archive, "x", **more),), None)


def _host_file(staged: Staged, **more: Any) -> FileMigration:
    places = staged.place(2, "u.first(x)", **more), staged.place(3, "u.first(w)", **more)
    return staged.file(*places, before=_HOST, after=_HOST_AFTER)


def _hosts(staged: Staged, *values: CallRecord | None) -> tuple[SiteRecord, ...]:
    return tuple(
        staged.site(str(n), *([] if value is None else [value]), is_mapped=False, file="")
        for n, value in enumerate(values)
    )


def test_a_host_edit_is_judged_by_its_values(staged: Staged, folder: pathlib.Path):
    one, other = (_value(folder, number) for number in (1.0, 2.0))
    files = [_host_file(staged)]
    first, second = (_run(hosts=_hosts(staged, *v)) for v in ((one, one), (one, other)))
    again = _run(hosts=_hosts(staged, one, one))
    found = staged.verified(files, first, second, again)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.DIFFERENT)]
    assert found.notes[0] == _STEADY
    before, after, *_ = staged.stage.changes
    assert "y = (__jd__.place(0, (__jd__.host(0, lambda __jd_value__: u.first(" in before["a.py"]
    assert "y = __jd__.host(0, lambda __jd_value__: __jd_value__, x)" in after["a.py"]
    assert "z = __jd__.host(1, " in after["a.py"]


def test_a_value_that_differs_from_run_to_run_shows_nothing(staged: Staged, folder: pathlib.Path):
    one, other = (_value(folder, number) for number in (1.0, 2.0))
    first, second = (_run(hosts=_hosts(staged, *v)) for v in ((one, one), (one, other)))
    again = _run(hosts=_hosts(staged, one, other))
    found = staged.verified([_host_file(staged)], first, second, again)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.RAN)]
    assert found.notes[0].startswith("the command does not compute the same twice")


def test_a_host_edit_that_gives_fewer_values(staged: Staged, folder: pathlib.Path):
    one = _value(folder, 1.0)
    runs = [_run(hosts=_hosts(staged, one, one)) for _ in range(3)]
    for run in (runs[0], runs[2]):
        run.record.hosts[1].calls.append(one)
        run.record.hosts[1].count = 2
    found = staged.verified([_host_file(staged)], *runs)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.DIFFERENT)]


def test_the_value_of_a_host_edit_is_known_to_somebody(staged: Staged, folder: pathlib.Path):
    one = _value(folder, 1.0)
    first, second = (_run(hosts=_hosts(staged, one, one), alone=frozenset({0})) for _ in "ab")

    assert _told(staged.verified([_host_file(staged)], first, second)) == [
        *((2, Rung.REPLAYED), (3, Rung.REPLAYED))
    ]


def test_a_host_edit_is_of_no_other_statement(staged: Staged, folder: pathlib.Path):
    text, after = "import u\ny = u.first(x)\nz = step(y)\ndel z\n", "import u\ny = x\ndel z\n"
    places = staged.place(3, "z = step(y)"), staged.place(2, "u.first(x)")
    runs = [_run(hosts=_hosts(staged, _value(folder, 1.0))) for _ in range(2)]
    found = staged.verified([staged.file(*places, before=text, after=after)], *runs)

    assert _told(found) == [(2, Rung.REPLAYED), (3, Rung.RAN)]


def test_host_edits_of_several_processes_are_told_apart(staged: Staged, folder: pathlib.Path):
    one, other = (_value(folder, number) for number in (1.0, 2.0))

    def run(*values: CallRecord) -> Run:
        hosts = [
            staged.site("0", value, process=n, is_mapped=False, file="")
            for n, value in enumerate(values)
        ]
        return _run(hosts=tuple(hosts))

    text, after = "import u\ny = u.first(x)\n", "import u\ny = x\n"
    file = staged.file(staged.place(2, "u.first(x)"), before=text, after=after)
    found = staged.verified([file], run(one, other), run(one, other))
    assert _told(found) == [(2, Rung.REPLAYED)]
    assert found.entries[0].calls == 2
    found = staged.verified([file], run(one, other), run(one, one), run(one, other))
    assert _told(found) == [(2, Rung.DIFFERENT)]


def test_a_host_edit_that_gave_no_value_never_ran(staged: Staged, folder: pathlib.Path):
    one = _value(folder, 1.0)
    for value in (None, one):
        runs = [_run(hosts=_hosts(staged, one, value)) for _ in range(2)]
        found = staged.verified([_host_file(staged)], *runs)
        assert dict(_told(found))[3] is (Rung.REPLAYED if value else Rung.NEVER_RAN)
    traced = [_run(hosts=_hosts(staged, one, None)) for _ in range(2)]
    traced[0].record.hosts[1].inside = True
    found = staged.verified([_host_file(staged)], *traced)
    assert dict(_told(found))[3] is Rung.RAN


def test_only_what_puts_values_on_devices_may_put_them_elsewhere(
    staged: Staged, folder: pathlib.Path
):
    one, moved = (_value(folder, 1.0, placed=where) for where in "ab")
    lenient = ("JXD101", "JXD102")
    for code in ("JXD001", *lenient):
        runs = [_run(hosts=_hosts(staged, *v)) for v in ((one, one), (one, moved), (one, one))]
        found = staged.verified([_host_file(staged, code=code)], *runs)
        expected = Rung.SAME_IN_TWO_RUNS if code in lenient else Rung.DIFFERENT
        assert _told(found) == [(2, Rung.REPLAYED), (3, expected)]


@pytest.mark.parametrize(("which", "expected"), [(0, Rung.DIFFERENT), (1, Rung.SAME_IN_TWO_RUNS)])
def test_the_copy_of_the_first_device_may_lie_there_alone(
    staged: Staged, folder: pathlib.Path, which: int, expected: Rung
):
    one, moved = (_value(folder, 1.0, placed=where) for where in "ab")
    places = staged.place(2, "u.first(x)"), staged.place(3, "u.first(w)")
    after = "import u\ny = x\nz = w.addressable_data(0)\n"
    values = [one, one]
    values[which] = moved
    runs = [_run(hosts=_hosts(staged, *v)) for v in ((one, one), values, (one, one))]

    found = staged.verified([staged.file(*places, before=_HOST, after=after)], *runs)

    assert dict(_told(found))[2 + which] is expected


def test_host_edits_of_several_files_have_their_numbers(staged: Staged, folder: pathlib.Path):
    one, other = (_value(folder, number) for number in (1.0, 2.0))
    first_file = _host_file(staged)
    path = str(folder / "b.py")
    place = staged.place(2, "u.first(v)", path=path)
    second_file = staged.file(
        *[place], before="import u\ny = u.first(v)\n", after="import u\ny = v\n", name="b.py"
    )
    runs = [_run(hosts=_hosts(staged, one, one, each), ran=(0, 1, 2)) for each in (one, other, one)]
    found = staged.verified([first_file, second_file], *runs)

    assert [(pathlib.Path(e.path).name, e.line, e.rung) for e in found.entries] == [
        *(("a.py", 2, Rung.REPLAYED), ("a.py", 3, Rung.REPLAYED), ("b.py", 2, Rung.DIFFERENT))
    ]
    same = [_run(hosts=_hosts(staged, one, one, one), ran=(0, 1, 2)) for _ in range(2)]
    again = staged.verified([first_file, second_file], *same)
    assert [each.rung for each in again.entries] == [Rung.REPLAYED] * 3
    assert "__jd__.host(2, " in staged.stage.changes[0]["b.py"]
    assert "__jd__.place(2, " in staged.stage.changes[0]["b.py"]


def test_a_host_edit_in_a_statement_of_its_own_is_that_place(staged: Staged, folder: pathlib.Path):
    text = "import u\nx = u.first(\n    x)\nprint(x)\n"
    after = "import u\nprint(x)\n"
    place = staged.place(2, "x = u.first(\n    x)")
    runs = [_run(hosts=_hosts(staged, _value(folder, 1.0)), ran=(0,)) for _ in range(2)]
    found = staged.verified([staged.file(place, before=text, after=after)], *runs)

    assert _told(found) == [(2, Rung.REPLAYED)]


# --- files that runs may not write to


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ((("/a",), ()), "from writing to /a, outside of the project: --scratch FOLDER names"),
        ((("/a", "/b"), ("/a", "/c")), "from writing to /a and 2 more, outside of the project"),
        (((), ("/b",)), "from writing to /b, outside of the project"),
        (((), ()), None),
    ],
)
def test_what_runs_may_not_write_to_is_a_note(staged: Staged, refused: Any, said: str | None):
    files = [staged.file(staged.place(2), staged.place(3))]
    runs = [
        _run(*run.record.sites, refused=each)
        for run, each in zip(_both(staged), refused, strict=True)
    ]
    notes = staged.verified(files, *runs).notes

    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize("way", ["locked copy", "copy", "overlay"])
def test_a_command_that_fails_in_a_locked_copy_may_want_to_write(
    staged: Staged, monkeypatch: pytest.MonkeyPatch, way: str
):
    monkeypatch.setattr(Stage, "way", way)
    files = [staged.file(staged.place(2), staged.place(3))]
    first, second = (_run(*run.record.sites, code=1) for run in _both(staged))
    found = staged.verified(files, first, second)

    said = "outside of the project, the command may write to what --scratch names alone"
    assert (said in found.notes) is (way == "locked copy")
    assert found.kept_apart == way
    well = staged.verified(files, *_both(staged))
    assert said not in well.notes


# --- a command that is only watched


def test_a_watched_command_runs_once_and_keeps_no_values(
    staged: Staged, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    call = _value(folder, 1.0)
    array = call.returned[0]
    site = staged.site("f", CallRecord((array,), (array,), None))
    staged.stage.runs[:] = [_run(site)]
    texts = {folder / "a.py": b"text"}
    told: list[str] = []
    more = {"devices": 2, "timeout": 3.0, "scratch": ["s"], "progress": told.append}
    record = trial.watched(["python"], texts, **more)

    assert told == ["running the command to see what carries the device axis"]
    assert staged.stage.changes == [{"a.py": "text"}]
    assert staged.stage.asked == [(["a.py"], True)]
    (found,) = record.sites[0].calls
    assert found.given[0].archive is None
    assert len(found.given[0].rows) == 1
    assert staged.options["files"] == ["a.py"]
    assert [staged.options[name] for name in ("devices", "timeout")] == [2, 3.0]
    staged.stage.runs[:] = [_run()]
    trial.watched(["python"], texts)
    assert (staged.options["devices"], staged.options["scratch"]) == (8, ())
    assert os.getcwd() == str(folder)
