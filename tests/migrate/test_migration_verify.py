"""The two runs of a migration, and the verdicts on its places."""

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from jax_dist.migrate import migration, report
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.places import FileMigration
from jax_dist.migrate.verify import comparison, runs, trial
from jax_dist.migrate.verify.comparison import Verdict
from jax_dist.migrate.verify.recording.records import RecordedCall, RecordedLeaf
from jax_dist.migrate.verify.runs import Run


def _leaf(values: Any, **more: Any) -> RecordedLeaf:
    array = np.asarray(values, np.float32)
    rows = [row.tobytes().hex() for row in array] if array.ndim else []
    about: Any = {"shape": list(array.shape), "digest": array.tobytes().hex(), "rows": rows}
    return RecordedLeaf("", "float32", **about, **more, load=lambda: array)


def _run(
    *results: Any, raised: str = "", output: str = "", exit_code: int | None = 0, **more: Any
) -> Run:
    calls = []
    for result in results:
        leaves = () if raised else (_leaf(result, **more),)
        calls.append(RecordedCall("a.py", 3, "step", (), leaves, raised))
    return Run(exit_code, output, "Traceback: oh", 1.0, [calls])


_SAME = [[1.0, 2.0], [1.0, 2.0]]
_ROW = np.array([1.0, 2.0], np.float32).tobytes().hex()
_VERDICTS = {
    "as they were": (_run(_SAME), _run(_SAME), "same in 1 of 1 calls"),
    "copies that became one": (_run(_SAME), _run([1.0, 2.0]), "same in 1 of 1 calls"),
    "copies of which the second is another": (
        _run(_SAME),
        _run([1.0, 2.0], copies=[_ROW, "another"]),
        "different: call 1, result: the copies differ",
    ),
    "rows of which the first became all copies": (
        _run([[1.0, 2.0], [3.0, 4.0]]),
        _run([1.0, 2.0], copies=[_ROW, _ROW]),
        "same in 1 of 1 calls; result differs between devices: is a psum missing?",
    ),
    "rows that were merged": (
        _run([[[1.0], [2.0]], [[3.0], [4.0]]]),
        _run([[1.0], [2.0], [3.0], [4.0]]),
        "same in 1 of 1 calls",
    ),
    "another factor": (
        _run(_SAME, _SAME),
        _run(_SAME, [[8.0, 16.0], [8.0, 16.0]]),
        "different: call 2, result: values differ by up to 14, 8 times what it was",
    ),
    "another shape": (
        _run(_SAME),
        _run([1.0]),
        "different: call 1, result: [2, 2] before, [1] after",
    ),
    "one call fewer": (
        _run(_SAME, _SAME),
        _run(_SAME),
        "different: call 2, it was not called after",
    ),
    "an error in both": (
        _run(_SAME, raised="ValueError: a"),
        _run(_SAME, raised="ValueError: b"),
        "raised in all of 1 calls, before and after",
    ),
    "an error after": (
        _run(_SAME),
        _run(_SAME, raised="ValueError: b"),
        "different: call 1, no error before, ValueError: b after",
    ),
    "no call": (_run(), _run(), "never ran"),
}


@pytest.mark.parametrize("name", _VERDICTS)
def test_a_place_gets_its_verdict(name: str):
    before, after, text = _VERDICTS[name]
    result = comparison.compare(["python", "a.py"], before, after, [("a.py", 3)])

    assert [str(verdict) for verdict in result.verdicts] == [text]
    assert result.has_differences == text.startswith("different")


def _replayed(run: Run, tolerance: float) -> Run:
    """Return a run whose first call was replayed: perturbed by 1e-7, it changes by `tolerance`."""
    (first, *others), replay = (
        run.calls[0],
        {"text": "", "epsilon": 1e-7, "tolerances": [tolerance]},
    )
    return dataclasses.replace(run, calls=[[first._replace(replay=replay), *others]])


_ROUNDED = {  # results of two calls, what perturbed inputs change, and whether it is rounding
    "as much as perturbed inputs change": ([1.0000005, 1.0000004], 1e-6, True),
    "more than perturbed inputs change": ([1.0, 1.00005], 1e-6, False),
    "as much as the step makes of perturbed inputs": ([1.0, 1.00005], 1e-4, True),
    "so much that it is no rounding": ([1.0, 1.2], 1e-2, False),
    "noise, as Adam makes of a gradient that is zero": ([1.0, 1.2], 10.0, True),
    "a step that decides at its limit": ([1.0, 1.2], float("inf"), True),
}


@pytest.mark.parametrize("name", _ROUNDED)
def test_the_tolerance_is_that_of_perturbed_inputs(name: str):
    results, tolerance, is_rounding = _ROUNDED[name]
    after = _replayed(_run(*([x, 2.0] for x in results)), 2 * tolerance)
    before = _run([1.0, 2.0], [1.0, 2.0])

    assert comparison.compare([], before, after, [("a.py", 3)]).has_differences
    result = comparison.compare([], before, after, [("a.py", 3)], may_round=True)
    assert result.has_differences != is_rounding


def test_rounded_arguments_make_more_rounded_results():
    """The second call gets what the first returned, so its result may deviate by as much more."""

    def chained(run: Run) -> Run:
        first, second = run.calls[0]
        return dataclasses.replace(run, calls=[[first, second._replace(arguments=first.results)]])

    before = chained(_run([1.0, 2.0], [1.0, 2.0]))
    after = chained(_replayed(_run([1.00001, 2.0], [1.0005, 2.0]), 1e-5))
    unchained = _replayed(_run([1.00001, 2.0], [1.0005, 2.0]), 1e-5)

    place = ("a.py", 3)
    assert not comparison.compare([], before, after, [place], may_round=True).has_differences
    too_far = chained(_replayed(_run([1.01, 2.0], [1.5, 2.0]), 1e-2))
    assert comparison.compare([], before, too_far, [place], may_round=True).has_differences
    plain = _run([1.0, 2.0], [1.0, 2.0])
    assert comparison.compare([], plain, unchained, [place], may_round=True).has_differences


def test_a_class_that_changes_once_does_not_allow_what_comes_later():
    def run(classes: list[float], argument: list[float]) -> Run:
        result = _leaf(classes)._replace(dtype="int32")
        first = RecordedCall("a.py", 3, "step", (), (result,), "")
        second = RecordedCall("a.py", 3, "step", (_leaf(argument),), (), "")
        return Run(0, "", "", 1.0, [[first, second]])

    before = run([1, 2], [1.0, 2.0])
    after = _replayed(run([1, 3], [5.0, 2.0]), float("inf"))
    result = comparison.compare([], before, after, [("a.py", 3)], may_round=True)

    assert "call 2, argument" in str(result)


_OUTPUTS = {
    "times and addresses": ("step 1 took 0.31 s\n<f at 0x7f>\n", "step 1 took 0.5 s\n<f at 0x8>\n"),
    "positions in the file": ("/a/b.py:9:4 (main)\n", "/a/b.py:21:10 (main)\n"),
    "dates": ("2026-01-01 10:11:12 loss 0.5\n", "2026-01-02 10:15:12 loss 0.5\n"),
}


@pytest.mark.parametrize("name", _OUTPUTS)
def test_output_that_changes_from_run_to_run_is_no_difference(name: str):
    old, new = _OUTPUTS[name]

    assert not comparison.compare([], _run(output=old), _run(output=new), []).problems


def test_the_lines_of_several_processes_come_in_any_order():
    run = lambda output: dataclasses.replace(_run(output=output), calls=[[], []])
    before = run("[0] loss 0.5\n[1] loss 0.5\n[0] [Gloo] Rank 0 is connected to 3 peer ranks.\n")
    after, other = run("[1] loss 0.5\n[0] loss 0.5\n"), run("[1] loss 0.5\n[0] loss 0.6\n")

    assert not comparison.compare([], before, after, []).problems
    assert comparison.compare([], before, other, []).problems


def test_output_that_differs_and_commands_that_fail_are_problems():
    differs = comparison.compare([], _run(output="loss 0.5\n"), _run(output="loss 0.6\n"), [])
    fails = comparison.compare([], _run(), _run(exit_code=1), [])
    stopped = comparison.compare([], _run(), _run(exit_code=None), [])

    assert differs.problems == ["the output differs in line 1: 'loss 0.5' / 'loss 0.6'"]
    assert fails.problems == ["exit code 0 before, 1 after:", "  Traceback: oh"]
    assert stopped.problems == ["the run after was stopped by --timeout, after 1 s"]
    assert differs.has_differences


_PROGRAM = """\
import jax
import jax.numpy as jnp
from jax import tree_map
from jax.experimental.maps import Mesh

step = jax.pmap(lambda x, y: (jax.lax.psum(x, "i") * y), "i", in_axes=(0, None))
unused = jax.pmap(lambda x: x)
x = jax.device_put_replicated(jnp.arange(3.0), jax.local_devices())
for _ in range(2):
    x = tree_map(lambda x: x / 8, step(x, 2.0))
print(x[0], Mesh.__name__, jax.lib.xla_bridge.get_backend().platform)
open("written", "w").close()
"""


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a program for an old jax, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(_PROGRAM)
    return tmp_path


@pytest.mark.thorough
def test_a_program_that_jax_broke_is_compared_with_the_old_names_put_back(program: pathlib.Path):
    (program / "b.py").write_text("import jax\n\nleaves = jax.tree_leaves\n")
    (program / "a.py").write_text(f"import b\n{_PROGRAM}")
    files = migration.migrate(["a.py"], MigrationOptions(to="vendored"))
    result, verification = trial.verify([sys.executable, "a.py"], files)

    assert list(verification.removed) == ["b.py:3"]
    assert "migrate b.py:3, too: the runs put back" in str(verification)
    assert [str(verdict) for verdict in verification.verdicts] == [
        "same in 2 of 2 calls",
        "never ran",
    ]
    assert not verification.has_differences
    assert result == files
    assert sorted(path.name for path in program.iterdir()) == ["a.py", "b.py"]


def test_modules_that_cannot_be_read_have_no_removed_names(program: pathlib.Path):
    (program / "b.py").write_text("f(\n")  # written by the program for another Python, perhaps
    paths = ("a.py", "b.py", "made_by_the_run.py")

    assert trial._find_removed_names(str(program), paths) == ["a.py:3", "a.py:4", "a.py:11"]


@pytest.mark.thorough
def test_a_wrong_migration_goes_back_or_is_not_written(program: pathlib.Path):
    files = migration.migrate(["a.py"], MigrationOptions(to="vendored"))
    wrong = [_replaced(file, b"* y", b"* y * 8") for file in files]

    def again(places: Any) -> list[FileMigration]:
        assert ("a.py", 6) in places
        return files

    _, verification = trial.verify([sys.executable, "a.py"], wrong, again)
    verdict = verification.verdicts[0]

    assert "8 times what it was" in str(verdict)
    assert str(verdict).startswith("same in 2 of 2 calls (as vendored: call 1")
    assert not verification.has_differences
    _, verification = trial.verify([sys.executable, "a.py"], wrong)
    assert verification.has_differences


_UNREACHED = """\
import jax
import jax.numpy as jnp
from flax import jax_utils

step = jax.pmap(lambda w, x: w + jax.lax.psum(x, "i"), "i")
w = jax_utils.replicate(jnp.zeros(()))
for _ in range(2):
    w = step(w, jnp.ones(8))
    if w is None:
        print(jax_utils.unreplicate(w), f"{w}")
print(jax_utils.unreplicate(w) if w is not None
      else w)
"""


@pytest.mark.thorough
def test_lines_that_read_a_changed_value_and_did_not_run_are_listed(program: pathlib.Path):
    pytest.importorskip("flax")
    (program / "a.py").write_text(_UNREACHED)
    files = migration.migrate(["a.py"], MigrationOptions(to="shard_map"))
    _, verification = trial.verify([sys.executable, "a.py"], files)
    result = report.MigrationReport("shard_map", files, verification)

    assert verification.problems == []
    for text in (report.FORMATS[".txt"](result), report.FORMATS[".md"](result)):
        assert [line.split("`")[0].strip(" *") for line in text.splitlines() if "a.py:1" in line]
    assert [line["line"] for line in result.to_dict()["verification"]["review"]] == [10, 12]


_MOMENTUM = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


def step(state, batch):
    w, m = state
    gradient = jax.lax.pmean(jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w), "i")
    m = gradient + 0.9 * m
    return w - 0.1 * (gradient + 0.9 * m), m


f = jax.pmap(step, "i")
state = jax_utils.replicate((jnp.ones(64), jnp.zeros(64)))
for seed in range(3):
    state = f(state, np.random.default_rng(seed).normal(size=(8, 4, 64)).astype(np.float32))
"""


@pytest.mark.thorough
def test_a_job_of_two_processes_is_compared(program: pathlib.Path):
    pytest.importorskip("flax")
    join = "import jax\njax.distributed.initialize()\n"
    (program / "a.py").write_text(
        f"{join}{_MOMENTUM.replace('(8, 4', '(2, 4')}print(jax_utils.unreplicate(state))\n"
    )
    launch = [sys.executable, "-m", "jax_dist", "launch", "-n", "2", "--cpu-devices", "2", "--"]
    files = migration.migrate(["a.py"], MigrationOptions(to="shard_map"))
    _, verification = trial.verify([*launch, sys.executable, "a.py"], files)

    assert verification.problems == []
    assert [str(verdict) for verdict in verification.verdicts] == ["same in 6 of 6 calls"]


@pytest.mark.thorough
def test_a_step_that_xla_fuses_in_another_way_keeps_its_bits(program: pathlib.Path):
    pytest.importorskip("flax")
    (program / "a.py").write_text(_MOMENTUM)
    files = migration.migrate(["a.py"], MigrationOptions(to="shard_map"))
    _, verification = trial.verify([sys.executable, "a.py"], files)

    assert verification.problems == []
    assert [str(verdict) for verdict in verification.verdicts] == ["same in 3 of 3 calls"]


def _replaced(file: FileMigration, old: bytes, new: bytes) -> FileMigration:
    return dataclasses.replace(file, after=file.after.replace(old, new))


@pytest.mark.thorough
def test_an_unedited_program_runs_and_is_explained(program: pathlib.Path, capfd: Any):
    assert runs.run_with_library([sys.executable, "a.py"]) == 0
    assert capfd.readouterr().out.endswith("] Mesh cpu\n")
    code, reports = runs.explain([sys.executable, "a.py"])

    assert code == 0
    assert [report.split()[0] for report in reports] == ["a.py:6"]


def test_verdicts_are_told_for_machines():
    verdict = Verdict("a.py", 3, "step", calls=2, same=2)
    result = comparison.Verification(["python"], [verdict], [], [1.0, 2.0])

    assert result.to_dict()["places"][0]["verdict"] == "same in 2 of 2 calls"
    assert "1 of 1 places same in all calls of `python` (2 runs: 1 s, 2 s)" in str(result)
