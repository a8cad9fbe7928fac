"""Whole programs before and after, as text and as numbers.

Each folder in golden/ is one case: `before.py` with a function `result()`, and `after_TARGET.py`
for each target. Programs run on 8 devices, before and after: values, shapes, types and the number
of devices must be the same. A first comment `# result: [...]` holds what a program gives that
itself needs functions that JAX removed.

`python tests/migrate/test_golden.py` writes the afters anew; read the difference.
"""

import json
import pathlib
import re
import sys
import types
import unittest.mock
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jax_dist.migrate import _mapped, migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.places import FileMigration

_FOLDER = pathlib.Path(__file__).parent / "golden"
CASES = sorted(
    (path.parent.name, path.stem.removeprefix("after_")) for path in _FOLDER.glob("*/after_*.py")
)
_NAMES_ONLY = ("jax_dist", "vendored")


class Leaf(NamedTuple):
    value: list[Any]
    shape: tuple[int, ...]
    dtype: str
    devices: int  # 0: not a jax.Array


def read(name: str, stem: str = "before") -> str:
    return (_FOLDER / name / f"{stem}.py").read_text(encoding="utf-8")


def migrate(text: str, to: Any) -> FileMigration:
    result = migration.migrate_text("case.py", text.encode(), MigrationOptions(to=to))
    return result or FileMigration("case.py", text.encode(), text.encode())


def run(text: str, name: str) -> list[Leaf]:
    """Return what the program's `result()` gives."""
    namespace: dict[str, Any] = {"__name__": name}
    modules = {"_mapped": _mapped, name: types.ModuleType(name)}
    with warnings.catch_warnings(), unittest.mock.patch.dict(sys.modules, modules):
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        exec(compile(text, name, "exec"), namespace)
        return list(map(_leaf, jax.tree.leaves(namespace["result"]())))


def _leaf(x: Any) -> Leaf:
    array = np.asarray(x)
    devices = len(x.sharding.device_set) if isinstance(x, jax.Array) else 0
    return Leaf(array.tolist(), array.shape, str(array.dtype), devices)


@pytest.mark.parametrize(("name", "to"), CASES)
def test_the_text_is_as_written(name: str, to: str):
    result = migrate(read(name), to)

    assert result.problem == ""
    assert result.after.decode() == read(name, f"after_{to}")


@pytest.mark.parametrize(("name", "to"), CASES)
def test_a_second_run_changes_nothing(name: str, to: str):
    again = migrate(read(name, f"after_{to}"), to)

    assert not again.changed
    assert [place for place in again.places if place.status == "done"] == []


@pytest.mark.parametrize("name", sorted({name for name, to in CASES if to == "vendored"}))
def test_each_target_takes_what_the_others_wrote(name: str):
    """A program that took the first step takes the next as if it had not taken the first."""
    by_library = migrate(read(name, "after_jax_dist"), "vendored")
    back = migrate(read(name, "after_vendored"), "jax_dist")

    assert not re.search(rb"\bjax_dist\b", by_library.after)
    assert not re.search(rb"\b_mapped\b", back.after)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_the_numbers_are_the_same(name: str):
    before = read(name)
    if re.search(r"(?m)^(import|from) flax\b", before):
        pytest.importorskip("flax")
    literal = re.search(r"(?m)^# result: (.*)$", before)
    expected = None if literal else run(before, name)

    for to in (to for case, to in CASES if case == name):
        result = run(read(name, f"after_{to}"), name)
        if literal:
            assert [leaf.value for leaf in result] == json.loads(literal[1]), to
        elif to in _NAMES_ONLY:
            assert result == expected, to
        else:  # jit sums over the whole batch at once
            assert [leaf[1:3] for leaf in result] == [leaf[1:3] for leaf in expected], to
            bound = 1e-5 if to == "jit" else 0
            for leaf, other in zip(result, expected, strict=True):
                np.testing.assert_allclose(leaf.value, other.value, rtol=bound, atol=bound)


def test_a_wrong_migration_would_be_seen():
    """The comparison is worth something: these give the numbers of pmap, and are not the same."""
    mapped = "import jax\ndef result():\n    return {}(jax.numpy.sin)(jax.numpy.arange(8.0))\n"
    right = run(mapped.format("jax.pmap"), "mapped")

    assert run(mapped.format("jax.vmap"), "on_one_device") != right
    assert right[0].devices == 8


def write() -> None:
    """Write the afters of all cases."""
    for name, to in CASES:
        result = migrate(read(name), to)
        assert not result.problem, (name, to, result.problem)
        (_FOLDER / name / f"after_{to}.py").write_bytes(result.after)


if __name__ == "__main__":
    write()
