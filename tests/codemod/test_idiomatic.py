"""Whole programs without the axis over devices: as text, and as numbers on 8 devices.

Each file in idiomatic_programs/ is one program in the shape of a well-known training loop, with a
function `result()`; then what it becomes, and what is said of each of its mapped functions: which
arguments and results are free of the axis, and why the others are not.

`python tests/codemod/test_idiomatic.py` writes what each becomes; read the difference.
"""

import difflib
import pathlib
import re
from typing import NamedTuple

import pytest
import test_golden as golden
import test_idiomatic_refused as small

from jax_dist.codemod.results import FileMigration

_FOLDER = pathlib.Path(__file__).parent / "idiomatic_programs"
_MARK = "# --- becomes\n"


class Program(NamedTuple):
    before: str
    after: str


def read(name: str) -> Program:
    before, _, after = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition(_MARK)
    return Program(before, after)


_NAMES = sorted(path.stem for path in _FOLDER.glob("*.txt"))


def shown(migration: FileMigration) -> str:
    """The changed lines, each added function as one comment, and what is said."""
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
def test_the_changed_lines_are_as_written(name: str):
    program = read(name)

    assert shown(golden.migrated(program.before, "idiomatic")) == program.after


@pytest.mark.parametrize("name", _NAMES)
def test_a_second_run_changes_nothing(name: str):
    once = golden.migrated(read(name).before, "idiomatic")

    again = golden.migrated(once.after.decode(), "idiomatic")

    assert again.after == once.after


@pytest.mark.parametrize("name", _NAMES)
def test_the_numbers_are_the_same(name: str):
    pytest.importorskip("flax")
    before = read(name).before
    after = golden.migrated(before, "idiomatic").after.decode()

    assert small.numbers(after) == small.numbers(before)


@pytest.mark.parametrize("name", _NAMES)
def test_no_copy_for_each_device_is_left_without_a_reason(name: str):
    migration = golden.migrated(read(name).before, "idiomatic")

    left = re.findall(r"\breplicate\(|\bunreplicate\(", migration.after.decode())
    assert left == [] or any("the device axis stays" in each.why for each in migration.outcomes)


def write() -> None:
    """Writes what each program becomes."""
    for name in _NAMES:
        before = read(name).before
        text = before + _MARK + shown(golden.migrated(before, "idiomatic"))
        (_FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
