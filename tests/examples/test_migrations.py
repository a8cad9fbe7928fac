"""The programs of examples/migrations: each after is what the migration makes of its before.

Their helpers are in one module, `_mapped.py`, by `--helpers`.
`python tests/examples/test_migrations.py` writes the afters anew; read the difference.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import jax
import pytest

from jax_dist import CapturedArrayWarning
from jax_dist._compat import CAN_REWRITE
from jax_dist.cli.main import main
from jax_dist.lint.engine.linter import load
from jax_dist.lint.model.project import Project
from jax_dist.migrate import helper_module, migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.recorded_flow import RecordedFlow, WatchedFiles
from jax_dist.migrate.results import Form, ProjectContext
from jax_dist.migrate.verify import trial

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "examples" / "migrations"
_IDIOMATIC = MigrationOptions(
    to="jax",
    plainest=Form.IDIOMATIC,
    slow_idioms=True,
    promises=Promises(one_process=True),
    is_tried=True,
)
_HELPERS = _FOLDER / "_mapped.py"


@dataclasses.dataclass(frozen=True)
class Program:
    run: Callable[[ModuleType], Any]  # as its `main` does, but shorter
    mapped: int  # how many pmaps it has
    captured: str | None = None  # what `jax_dist.pmap` warns of, for the before has it so
    needs: str = "optax"


_PROGRAMS = {
    "flax_train_step": Program(
        lambda program: program.train_and_evaluate(steps=20), mapped=2, needs="flax"
    ),
    "updater_class": Program(lambda program: program.train(steps=20), mapped=2),
    "gathered_evaluation": Program(
        lambda program: program.train_and_evaluate(steps=20), mapped=2, needs="jax"
    ),
    "parallel_chains": Program(
        lambda program: program.infer(num_samples=30),
        mapped=1,
        captured=r"data\[0\]: float32\[100,3\]",
        needs="jax",
    ),
    "rl_learner": Program(
        lambda program: program.run_experiment(evaluations=1, updates=20), mapped=1
    ),
}
_each = pytest.mark.parametrize("name", sorted(_PROGRAMS))


def text(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text()


def flow() -> RecordedFlow:
    """What a run of all programs shows."""
    paths = [str(_FOLDER / f"{name}_before.py") for name in _PROGRAMS]
    project = Project(paths)
    watched = WatchedFiles([project.module(load(e, pathlib.Path(e).read_bytes())) for e in paths])
    run_all = f"import runpy; [runpy.run_path(path, run_name='__main__') for path in {paths!r}]"
    return watched.flow(trial.watched([sys.executable, "-c", run_all], watched.texts), 8)


@pytest.fixture(scope="module")
def options(made_once: Callable[..., Any]) -> MigrationOptions:
    for program in _PROGRAMS.values():
        pytest.importorskip(program.needs)
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    return dataclasses.replace(_IDIOMATIC, flow=made_once("migrations", lambda folder: flow()))


def migrated(name: str, options: MigrationOptions) -> str:
    path = str(_FOLDER / f"{name}_before.py")
    context = ProjectContext(Project((path,)), str(_HELPERS), frozenset({os.path.abspath(path)}))
    found = migration.of_text(path, text(f"{name}_before").encode(), context, options)
    assert found is not None
    return found.after.decode()


def helpers() -> str:
    return helper_module.module({"dims", "per_device", "replicated"})


def run(path: pathlib.Path, name: str) -> Any:
    """Imports a program under a name of its own, and runs it on the 8 devices."""
    pytest.importorskip(_PROGRAMS[name].needs)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_FOLDER)  # as if it were started there
        spec.loader.exec_module(module)
    return jax.device_get(_PROGRAMS[name].run(module))


@functools.cache
def numbers_before(name: str) -> Any:
    return run(_FOLDER / f"{name}_before.py", name)


def test_no_program_is_forgotten():
    names = {path.name for path in _FOLDER.glob("*.py")} - {_HELPERS.name}

    assert names == {f"{name}_{when}.py" for name in _PROGRAMS for when in ("before", "after")}


@pytest.mark.thorough
@_each
def test_the_after_is_what_the_migration_makes_of_the_before(name, options):
    assert migrated(name, options) == text(f"{name}_after")


def test_the_helpers_are_those_that_the_migration_writes():
    assert _HELPERS.read_text() == helpers()


@_each
def test_the_before_is_pmap_and_the_after_is_plain_jax(name):
    before, after = text(f"{name}_before"), text(f"{name}_after")
    program = _PROGRAMS[name]

    assert before.count("pmap(") + before.count("jax.pmap,") == program.mapped
    assert "jax.pmap" not in after
    assert "from jax import lax, pmap" not in after
    assert "jax_dist" not in after
    assert after.count("jax.shard_map") == program.mapped


@_each
def test_lint_has_something_to_say_before_and_nothing_after(name, monkeypatch):
    monkeypatch.chdir(_FOLDER)
    before, after = io.StringIO(), io.StringIO()

    assert main(["lint", f"{name}_before.py"], out=before) == 1
    options = ["--ignore", "JXD204"]  # the rows of a batch on each device stay
    assert main(["lint", *options, f"{name}_after.py"], out=after) == 0, after.getvalue()
    assert "JXD001" in before.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "updater_class",  # the one that compiles the least
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in sorted({*_PROGRAMS} - {"updater_class"})
        ),
    ],
)
def test_the_numbers_are_the_same(name):
    after = run(_FOLDER / f"{name}_after.py", name)

    chex.assert_trees_all_close(after, numbers_before(name), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@_each
def test_the_smallest_change_gives_the_same_numbers_too(name, tmp_path):
    path = tmp_path / f"{name}_smallest.py"
    path.write_text(migrated(name, MigrationOptions(to="jax_dist")))
    assert "jax_dist" in path.read_text()

    with _warning_of(_PROGRAMS[name].captured):
        smallest = run(path, name)
    chex.assert_trees_all_close(smallest, numbers_before(name), rtol=1e-4, atol=1e-5)


def _warning_of(captured: str | None) -> contextlib.AbstractContextManager:
    if captured is None:
        return contextlib.nullcontext()
    return pytest.warns(CapturedArrayWarning, match=captured)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("updater_class", marks=pytest.mark.thorough),  # host edits, and the quickest
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in sorted({*_PROGRAMS} - {"updater_class"})
        ),
    ],
)
def test_the_command_proves_the_migration_by_running_the_program(name, tmp_path):
    pytest.importorskip(_PROGRAMS[name].needs)
    path = tmp_path / f"{name}.py"
    path.write_text(text(f"{name}_before"))
    migrate = [sys.executable, "-m", "jax_dist", "migrate", "--to", "jax"]

    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [*migrate, *_WRITE, path.name, "--", sys.executable, path.name],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(_ROOT)},  # as users compile: equal to the bit
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.partition("\n  command: ")[0].rpartition("\n")[2]  # behind the diff
    more = r"(, \d+ the same in two runs of \d+ calls)?"
    found = re.fullmatch(rf"(\d+) of \d+ places? proved{more}\.", said)
    assert found is not None, said
    assert int(found[1]) >= _PROGRAMS[name].mapped
    assert "put back" not in ran.stdout
    assert path.read_text() == text(f"{name}_after")


_WRITE = (
    *("--idiomatic", "--one-process", "--helpers", "_mapped.py"),
    *("--write", "--verify"),
)


if __name__ == "__main__":
    found = dataclasses.replace(_IDIOMATIC, flow=flow())
    for each in _PROGRAMS:
        (_FOLDER / f"{each}_after.py").write_text(migrated(each, found))
    _HELPERS.write_text(helpers())
