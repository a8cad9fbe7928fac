"""Whole programs before and after, as text and as numbers.

Each file in golden/ is one case: a program with a function `result()`, then what it becomes for
each target. Helpers come from a module `_mapped`, which has the parts that the program needs. The
program and what it became are run on 8 devices: values, shapes, types and the number of devices
must be the same.

A first comment may say more:
  # result: [...]             what it gives, where the program itself needs functions that are gone
  # also: promised  one more target: --to jax with --one-process --all-devices

`python tests/migrate/test_golden.py` writes what each case becomes; read the difference.
"""

import functools
import importlib.util
import json
import pathlib
import re
import sys
import types
import unittest.mock
import warnings
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.migrate import helper_module, migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import FileMigration, ProjectContext

_FOLDER = pathlib.Path(__file__).parent / "golden"
_IDIOMATIC = pathlib.Path(__file__).parent / "device_axis" / "idiomatic_programs"
_OPTIONS = {
    "jax_dist": MigrationOptions(to="jax_dist"),
    "jax": MigrationOptions(to="jax"),
    "promised": MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True)),
}


class Case(NamedTuple):
    before: str
    after: dict[str, str]  # by target

    def says(self, key: str) -> str | None:
        found = re.search(rf"(?m)^# {key}: (.*)$", self.before)
        return found and found[1]


class Leaf(NamedTuple):
    value: list[Any]
    shape: tuple[int, ...]
    dtype: str
    devices: int  # 0: not a jax.Array


def read(name: str) -> Case:
    text = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    before, *sections = re.split(r"(?m)^# --- to (\w+)\n", text)
    return Case(before, dict(zip(sections[::2], sections[1::2], strict=True)))


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.txt"))


def targets(case: Case) -> list[str]:
    return ["jax_dist", "jax", *(case.says("also") or "").split()]


_EACH = [(name, to) for name in names() for to in targets(read(name))]


@functools.cache
def migrated(text: str, to: str) -> FileMigration:
    context = ProjectContext(Project(), str(_FOLDER / "_mapped.py"))
    return migration.of_source(sources.read("case.py", text.encode()), context, _OPTIONS[to])


def shown(migration: FileMigration) -> str:
    """The new text, and what was left."""
    left = [
        f"# left, line {outcome.line}: {outcome.why}\n"
        for outcome in migration.outcomes
        if outcome.status == "left"
    ]
    problem = f"# problem: {migration.problem}\n" if migration.problem else ""
    return "".join((migration.after.decode(), *left, problem))


def result(text: str, name: str, needs: Collection[str] = ()) -> list[Leaf]:
    """What the program's `result()` gives, with helpers that have no more than it `needs`."""
    namespace: dict[str, Any] = {"__name__": name}
    helpers = types.ModuleType("_mapped")
    exec(compile(helper_module.module(needs), "_mapped.py", "exec"), helpers.__dict__)
    with warnings.catch_warnings(), unittest.mock.patch.dict(sys.modules, _mapped=helpers):
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        exec(compile(text, name, "exec"), namespace)
        return list(map(_leaf, jax.tree.leaves(namespace["result"]())))


def _leaf(x: Any) -> Leaf:
    array = np.asarray(x)
    devices = len(x.sharding.device_set) if isinstance(x, jax.Array) else 0
    return Leaf(array.tolist(), array.shape, str(array.dtype), devices)


def _needs(case: Case) -> Iterator[str]:
    """What the program imports and may be missing."""
    for name in ("flax",):
        asked = re.search(rf"(?m)^(import|from) {name}\b", case.before)
        if asked and importlib.util.find_spec(name) is None:
            yield name


@pytest.mark.parametrize(("name", "to"), _EACH)
def test_the_text_is_as_written(name: str, to: str):
    case = read(name)

    assert shown(migrated(case.before, to)) == case.after[to]


@pytest.mark.parametrize(("name", "to"), _EACH)
def test_a_second_run_changes_nothing(name: str, to: str):
    once = migrated(read(name).before, to)

    again = migrated(once.after.decode(), to)

    assert again.after == once.after
    assert [outcome for outcome in again.outcomes if outcome.status == "done"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", names())
def test_the_numbers_are_the_same(name: str):
    case = read(name)
    if missing := list(_needs(case)):
        pytest.skip(f"needs {missing}")
    literal = case.says("result")
    expected = None if literal else result(case.before, name)

    texts = {migrated(case.before, to).after.decode(): to for to in targets(case)}
    for after, to in texts.items():
        helpers = migrated(case.before, to).helpers
        found = result(after, name, () if helpers is None else helpers.needs)
        if literal:
            assert [leaf.value for leaf in found] == json.loads(literal), to
        else:
            assert found == expected, to


def test_a_wrong_migration_would_be_seen():
    """The comparison is worth something: these give the numbers of pmap, and are not the same."""
    mapped = "import jax\ndef result():\n    return {}(jax.numpy.sin)(jax.numpy.arange(8.0))\n"
    right = result(mapped.format("jax.pmap"), "mapped")

    assert result(mapped.format("jax.vmap"), "on one device") != right
    assert right[0].devices == 8


@pytest.mark.parametrize("name", sorted(helper_module.functions()))
def test_each_helper_is_in_some_case(name: str):
    texts = [text for case in names() for text in read(case).after.values()]
    texts += [path.read_text() for path in _IDIOMATIC.glob("*.txt")]
    assert any(re.search(rf"(?m)^\+?from _mapped import .*\b{name}\b", text) for text in texts)


@pytest.mark.parametrize("part", helper_module.PARTS[:-2])
def test_each_part_of_mapped_is_in_some_case(part: str):
    """`processes` and `full` are for what no program of one file shows."""
    made = [migrated(read(name).before, "jax").helpers for name in names()]
    assert any(part in each.needs for each in made if each is not None)


def write() -> None:
    """Writes what each case becomes."""
    for name in names():
        case = read(name)
        parts = [case.before]
        for to in targets(case):
            parts += (f"# --- to {to}\n", shown(migrated(case.before, to)))
        (_FOLDER / f"{name}.txt").write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    write()
