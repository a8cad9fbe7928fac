"""Real programs before and after a migration: the right ones are proven, the wrong ones caught."""

import pathlib

import pytest
from verified_programs import (
    IDIOMATIC,
    TRAINING,
    WITH_SHARD_MAP,
    changed,
    recorded,
    recorded_together,
)

from jax_dist.migrate.verify.comparison import judged
from jax_dist.migrate.verify.evidence import Run, RunRecord, SiteRecord
from jax_dist.migrate.verify.ledger import MigrationVerdict, MigrationVerification

_BOTH = "import jax\nimport jax_dist\n"
# What a default shard_map does to a gradient of replicated parameters.
_CHECKED = [(old, new.replace(", check_vma=False", "")) for old, new in IDIOMATIC]
_ON_ONE = (
    "import numpy as np\n",
    "import numpy as np\n\n\ndef on_one(fun, in_axes=0, **options):\n"
    '    return jax.jit(jax.vmap(fun, in_axes, axis_name="batch"))\n',
)
# Each device takes its part of the features instead of its part of the batch.
_WRONG_AXIS = (
    ("jax.pmap(evaluate, in_axes=(0, 0, None))", "jax.pmap(evaluate, in_axes=(0, 2, 0))"),
    ("x, y[0])", "np.moveaxis(x, 0, 2)[::-1], y)"),
)
_PROGRAMS = {
    "before": TRAINING,
    "jax_dist": TRAINING.replace("jax.pmap", "jax_dist.pmap").replace("import jax\n", _BOTH, 1),
    "shard_map": changed(*WITH_SHARD_MAP),
    "idiomatic": changed(*IDIOMATIC),
    "checked": changed(*_CHECKED),
    "on_one": changed(_ON_ONE).replace("jax.pmap", "on_one"),
    "wrong_axis": changed(*_WRONG_AXIS),
    "idle": changed(("measure(w, x, y[0])", "np.zeros(1)")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("program")


@pytest.fixture(scope="module")
def runs(folder: pathlib.Path) -> dict[str, Run]:
    return recorded_together(_PROGRAMS, folder)


def _verdict(
    before: Run, after: Run, folder: pathlib.Path, **options: float
) -> MigrationVerification:
    return judged(["train"], before, after, files=[folder / "train.py"], **options)


def test_jax_dist_pmap_is_the_same(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["jax_dist"], folder)

    assert found.verdict is MigrationVerdict.SAME
    assert [(site.function, site.compared, site.calls_before) for site in found.sites] == [
        ("train_step", 5, 5),
        ("evaluate", 1, 1),
    ]
    assert [site.how for site in found.sites] == [("as is",), ("as is",)]
    assert [(site.devices_before, site.devices_after) for site in found.sites] == [(8, 8), (8, 8)]


def test_a_jit_around_shard_map_is_the_same(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["shard_map"], folder)

    assert found.verdict is MigrationVerdict.SAME
    assert [(site.line, site.compared) for site in found.sites] == [(22, 5), (23, 1)]


def test_a_dropped_device_axis_is_the_same(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["idiomatic"], folder, tolerance=1e-6)

    assert found.verdict is MigrationVerdict.SAME
    assert [site.how for site in found.sites] == [("one of equal copies",), ("as is",)]


def test_a_gradient_that_is_eight_times_too_large(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["checked"], folder)

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert "8 times what it was" in found.sites[0].problems[0]


def test_equal_numbers_from_one_device(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["on_one"], folder)

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert [site.problems[0] for site in found.sites] == [
        "call 1, result[0]: on 8 devices before, on 1 after",
        "call 1, result: on 8 devices before, on 1 after",
    ]
    assert [site.relative < 1e-5 for site in found.sites] == [True, True]


def test_the_wrong_axis(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["wrong_axis"], folder)

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert found.sites[1].problems[0] == "call 1, argument[1]: [8, 4, 3] before, [4, 3, 8] after"


def test_a_function_that_is_no_longer_called(runs: dict[str, Run], folder: pathlib.Path):
    found = _verdict(runs["before"], runs["idle"], folder)

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert found.sites[1].problems == ("it was called before, and is not called after",)


def test_a_program_that_fails_after(runs: dict[str, Run], folder: pathlib.Path):
    failed = recorded(changed(("    print(", "    raise SystemExit(3)\n    print(")), folder)
    found = _verdict(runs["before"], failed, folder)

    assert found.verdict is MigrationVerdict.DIFFERENT
    assert [site.problems for site in found.sites] == [(), ()]
    assert found.problems == ("the command ended well before the migration; after it: exit 3",)


def test_a_program_that_failed_before_and_runs_now(runs: dict[str, Run], folder: pathlib.Path):
    removed = ("    step = ", "    jax.device_put_replicated\n    step = ")
    failed = recorded(changed(removed), folder)
    found = _verdict(failed, runs["before"], folder)

    assert found.verdict is MigrationVerdict.UNPROVEN
    assert found.unproven[0].startswith("the command failed before the migration (exit 1: ")
    assert found.unproven[0].endswith("; it runs now")
    assert str(found.after) == "exit 0"
    assert (found.after.functions, found.after.calls, found.after.devices) == (2, 6, 8)


def test_a_function_that_is_mapped_and_not_called_is_not_proven(
    runs: dict[str, Run], folder: pathlib.Path
):
    found = _verdict(runs["idle"], runs["idle"], folder)

    assert found.verdict is MigrationVerdict.UNPROVEN
    assert found.unproven == (f"{folder}/train.py:23 evaluate was mapped, and never called",)


def test_a_function_that_was_only_traced_is_not_proven():
    """As in `jax.grad(jax.pmap(f))`: its arguments are no arrays yet."""
    hidden = SiteRecord(
        process=0,
        file="/a.py",
        line=7,
        within=("<module>",),
        function="f",
        is_mapped=True,
        inside=True,
        hidden=True,
    )
    run = Run(0, "", RunRecord((hidden,)))
    found = judged(["train"], run, run, files=[pathlib.Path("/a.py")])

    assert found.verdict is MigrationVerdict.UNPROVEN
    assert found.unproven == (
        "no mapped function was called before the migration: nothing to compare with",
        "/a.py:7 f was called only inside a larger traced function",
    )
