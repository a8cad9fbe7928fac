"""The programs of examples/migrations: each after is what the migration makes of its before.

`python tests/examples/test_migrations.py` writes the afters anew; read the difference.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import jax
import pytest

from jax_dist import CapturedArrayWarning
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions

_FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "migrations"


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
    "parallel_chains": Program(
        lambda program: program.infer(num_samples=30),
        mapped=1,
        captured=r"data\[0\]: float32\[100,3\]",
        needs="jax",
    ),
}
_each = pytest.mark.parametrize("name", sorted(_PROGRAMS))
_rest = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(_PROGRAMS)[:-1]]
_each_slow_but_one = pytest.mark.parametrize("name", [*_rest, "updater_class"])


def text(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text()


def migrated(name: str, to: Any) -> str:
    path = str(_FOLDER / f"{name}_before.py")
    result = migration.migrate_text(path, text(f"{name}_before").encode(), MigrationOptions(to=to))
    assert result is not None
    assert result.problem == ""
    return result.after.decode()


def run(path: pathlib.Path, name: str) -> Any:
    """Import a program under a name of its own, and run it on the 8 devices."""
    pytest.importorskip(_PROGRAMS[name].needs)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_FOLDER)  # as if it were started there
        spec.loader.exec_module(module)
    return jax.device_get(_PROGRAMS[name].run(module))


@functools.cache
def numbers_before(name: str) -> Any:
    return run(_FOLDER / f"{name}_before.py", name)


@_each
def test_the_after_is_what_the_migration_makes_of_the_before(name: str):
    program, before = _PROGRAMS[name], text(f"{name}_before")
    after = text(f"{name}_after")

    assert migrated(name, "shard_map") == after
    assert before.count("pmap(") + before.count("jax.pmap,") == program.mapped
    assert "jax.pmap" not in after
    assert "jax_dist" not in after


@_each_slow_but_one
def test_the_numbers_are_the_same(name: str):
    after = run(_FOLDER / f"{name}_after.py", name)

    chex.assert_trees_all_close(after, numbers_before(name), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@_each
def test_the_smallest_change_gives_the_same_numbers_too(name: str, tmp_path: pathlib.Path):
    path = tmp_path / f"{name}_smallest.py"
    path.write_text(migrated(name, "jax_dist"))
    assert "jax_dist" in path.read_text()

    with _warning_of(_PROGRAMS[name].captured):
        smallest = run(path, name)
    chex.assert_trees_all_close(smallest, numbers_before(name), rtol=1e-4, atol=1e-5)


def _warning_of(captured: str | None) -> contextlib.AbstractContextManager:
    if captured is None:
        return contextlib.nullcontext()
    return pytest.warns(CapturedArrayWarning, match=captured)


if __name__ == "__main__":
    for name in _PROGRAMS:
        (_FOLDER / f"{name}_after.py").write_text(migrated(name, "shard_map"))
