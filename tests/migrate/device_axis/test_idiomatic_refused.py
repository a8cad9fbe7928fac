"""What `--idiomatic` must not free of its device axis, and why; and small programs that it may.

Each file in idiomatic_programs/refused/ holds small programs of one kind:
  # === the name of a program
  # a line of it: what is said of the mapped function that it makes
  the program, below the lines of `_ABOVE`

All run once, watched, by one command. What is said is asserted word for word: what is free of the
axis, and why the rest stays. A program in which something is freed is run before and after, on 8
devices: it must give the same numbers.

`PYTHONPATH=tests/migrate python tests/migrate/device_axis/test_idiomatic_refused.py` writes what is
said; read the difference.
"""

import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import recorded

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.results import FileMigration, Form

_FOLDER = pathlib.Path(__file__).parent / "idiomatic_programs" / "refused"
_ABOVE = """\
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils

B = np.arange(24.0, dtype=np.float32).reshape(8, 3)
N = jax.local_device_count()
S = np.arange(3.0, dtype=np.float32)


def step(state, batch):
    return state + jax.lax.pmean(batch, "i")


p_step = jax.pmap(step, axis_name="i")


"""
_UNUSED = "no call of it alone was recorded"


class Program(NamedTuple):
    name: str
    said: list[str]
    body: str

    @property
    def text(self) -> str:
        return _ABOVE + self.body


def read(path: pathlib.Path) -> list[Program]:
    parts = re.split(r"(?m)^# === (.*)\n", path.read_text(encoding="utf-8"))[1:]
    programs: list[Program] = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        said = re.match(r"(# .*\n)*", text)
        assert said is not None
        lines = [each[2:] for each in said[0].splitlines()]
        programs.append(Program(name, lines, text[said.end() :].rstrip("\n") + "\n"))
    return programs


_ALL = [program for path in sorted(_FOLDER.glob("*.txt")) for program in read(path)]


def texts() -> dict[str, str]:
    """By the name of a module."""
    return {f"program_{number}": program.text for number, program in enumerate(_ALL)}


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Any]) -> recorded.Recorded:
    pytest.importorskip("flax")
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    return recorded.once(made_once, texts())


def said(program: Program, migration: FileMigration) -> list[str]:
    """What is said of each mapped function that is called, with the line that makes it."""
    lines = program.text.splitlines()
    return [
        f"{lines[outcome.line - 1].strip()}: {outcome.why}"
        for outcome in migration.outcomes
        if outcome.what.endswith("pmap") and _UNUSED not in outcome.why
    ]


def numbers(text: str) -> list[tuple[Any, str]]:
    """What the program's `result()` gives."""
    namespace: dict[str, Any] = {"__name__": "case"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        exec(compile(text, "case.py", "exec"), namespace)
        leaves = map(np.asarray, jax.tree.leaves(namespace["result"]()))
        return [(leaf.tolist(), str(leaf.dtype)) for leaf in leaves]


_NUMBERED = [pytest.param(n, each, id=each.name) for n, each in enumerate(_ALL)]


@pytest.mark.parametrize(("number", "program"), _NUMBERED)
def test_what_is_said(ran: recorded.Recorded, number: int, program: Program):
    assert said(program, ran.migrated(f"program_{number}")) == program.said


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "program"), _NUMBERED)
def test_the_numbers_are_the_same(ran: recorded.Recorded, number: int, program: Program):
    after = ran.migrated(f"program_{number}")
    if not any(outcome.form is Form.IDIOMATIC for outcome in after.outcomes):
        return

    assert numbers(after.after.decode()) == numbers(program.text)


def write() -> None:
    """Writes what is said of each program."""
    with tempfile.TemporaryDirectory() as place:
        ran = recorded.run(pathlib.Path(place), texts())
        found = {each.text: said(each, ran.migrated(f"program_{n}")) for n, each in enumerate(_ALL)}
    for path in sorted(_FOLDER.glob("*.txt")):
        parts = []
        for each in read(path):
            lines = [f"# {line}\n" for line in found[each.text]]
            parts.append(f"# === {each.name}\n{''.join(lines)}{each.body}")
        path.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    write()
