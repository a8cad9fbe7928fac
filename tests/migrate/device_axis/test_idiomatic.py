"""Whole programs without the axis over devices: as text, and as numbers on 8 devices.

Each file in idiomatic_programs/ is one program in the shape of a well-known training loop, with a
function `result()`; then what it becomes after a run of it, and what is said of each of its mapped
functions: which arguments and results are free of the axis, and why the others are not.

`PYTHONPATH=tests/migrate python tests/migrate/device_axis/test_idiomatic.py` writes what each
becomes; read the difference.
"""

import difflib
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import recorded
import test_golden as golden
import test_idiomatic_refused as small

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.results import FileMigration

pytestmark = pytest.mark.rewriting

_FOLDER = pathlib.Path(__file__).parent / "idiomatic_programs"
_MARK = "# --- becomes\n"


class Program(NamedTuple):
    before: str
    after: str


def read(name: str) -> Program:
    before, _, after = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition(_MARK)
    return Program(before, after)


_NAMES = sorted(path.stem for path in _FOLDER.glob("*.txt"))


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Any]) -> recorded.Recorded:
    pytest.importorskip("flax")
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    return recorded.once(made_once, {name: read(name).before for name in _NAMES})


def shown(migration: FileMigration) -> str:
    """The changed lines, and what is said."""
    before, after = migration.before.decode(), golden.shown(migration)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = [line for line in list(lines)[2:] if line.strip("+- ") and line[:2] != "@@"]
    said = [
        f"# line {outcome.line}: {outcome.why}"
        for outcome in migration.outcomes
        if outcome.what.endswith("pmap")
    ]
    return "".join(f"{line}\n" for line in (*changed, *said))


@pytest.mark.parametrize("name", _NAMES)
def test_the_changed_lines_are_as_written(ran: recorded.Recorded, name: str):
    assert shown(ran.migrated(name)) == read(name).after


@pytest.mark.parametrize("name", _NAMES)
def test_a_second_run_changes_nothing(ran: recorded.Recorded, name: str):
    once = ran.migrated(name)

    again = golden.migrated(once.after.decode(), "jax")

    assert again.after == once.after


@pytest.mark.thorough
@pytest.mark.parametrize("name", _NAMES)
def test_the_numbers_are_the_same(ran: recorded.Recorded, name: str):
    after = ran.migrated(name).after.decode()

    assert small.numbers(after) == small.numbers(read(name).before)


@pytest.mark.parametrize("name", _NAMES)
def test_no_copy_for_each_device_is_left_without_a_reason(ran: recorded.Recorded, name: str):
    migration = ran.migrated(name)

    left = re.findall(r"\breplicate\(|\bunreplicate\(", migration.after.decode())
    assert left == [] or any("the device axis stays" in each.why for each in migration.outcomes)


def write() -> None:
    """Writes what each program becomes."""
    with tempfile.TemporaryDirectory() as place:
        programs = {name: read(name).before for name in _NAMES}
        ran = recorded.run(pathlib.Path(place), programs)
        texts = {name: shown(ran.migrated(name)) for name in _NAMES}
    for name, before in programs.items():
        text = before + _MARK + texts[name]
        (_FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
