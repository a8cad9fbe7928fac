"""What two runs of a program say of its places, and what they do not."""

import pathlib
import sys

import pytest

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.results import FileMigration
from jax_dist.migrate.verify.ledger import Ledger, Rung
from jax_dist.migrate.verify.trial import verified

_PROVED = Rung.SAME_PROGRAM if CAN_REWRITE else Rung.DIFFERENT  # without texts, unlike is unlike
_HEAD = """\
import functools
import jax
import jax.numpy as jnp
import numpy as np
def mapped(fun, **options):
    return jax.pmap(fun, **options)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _verified(folder: pathlib.Path, text: str, *edits: tuple[str, str]) -> tuple[Ledger, dict]:
    """The ledger, and how sure each place is, by the edit that it is."""
    before = after = _HEAD + text
    for old, new in edits:
        assert after.count(old) == 1
        after = after.replace(old, new)
    path = folder / "program.py"
    path.write_text(before)
    file = FileMigration(str(path), before.encode(), after.encode())
    found = verified([sys.executable, "program.py"], [file])
    lines = before.splitlines()
    told: dict[str, list[Rung]] = {}
    for each in found.entries:
        told.setdefault(lines[each.line - 1].partition(" ")[0], []).append(each.rung)
    return found, {name: min(rungs) for name, rungs in told.items()}


def test_what_differs_is_not_what_gets_other_arguments(folder: pathlib.Path):
    """The second function is the same program, whatever the first one gives it."""
    text = """\
first = jax.pmap(lambda x: x * 2)
second = jax.pmap(lambda x: x + 1)
second(first(jnp.ones(8)))
"""
    _, told = _verified(
        folder,
        text,
        ("pmap(lambda x: x * 2)", "pmap(lambda x: x * 3)"),
        ("second = jax.pmap", "second = mapped"),
    )

    assert told == {"first": Rung.DIFFERENT, "second": _PROVED}


def test_what_no_place_explains_makes_all_different(folder: pathlib.Path):
    """A new value of an old name is an edit of nobody's; both functions are the same programs."""
    text = """\
scale = [1.0]
one = jax.pmap(lambda x: x * 2)
one(np.full(8, scale[0]))
"""
    found, told = _verified(folder, text, ("one = jax.pmap", "scale[0] = 2.0\none = mapped"))

    assert {*told.values()} == {Rung.DIFFERENT}
    assert found.worst is Rung.DIFFERENT


def test_a_value_that_is_used_on_the_host_too_is_not_vouched_for_by_a_trace(folder: pathlib.Path):
    text = """\
def scale(kind): return 2.0 + (kind == "host")
alone = scale("host")
step = jax.pmap(lambda x: x * scale("trace"))
step(np.ones(8)), print(alone)
"""
    _, told = _verified(folder, text, ('2.0 + (kind == "host")', '2.0 + 5 * (kind == "host")'))

    assert told == {"def": Rung.RAN}


@pytest.mark.thorough
def test_the_program_of_the_first_run_goes_its_own_way(folder: pathlib.Path):
    """Names of `jax.pmap` are equal, in a set too; devices have their order."""
    text = """\
kinds = [jax.jit, jax.pmap]
assert [kind == jax.pmap for kind in kinds] == [False, True]
assert len({jax.pmap, kinds[1]}) == 1
def noisy(x): return x + np.random.normal()
noise = jax.pmap(noisy)
noise(jnp.ones(8))
later = jax.pmap(jnp.sin)
later(np.random.normal(size=8))
turned = jax.pmap(jnp.cos)
turned(np.ones(8))
"""
    _, told = _verified(
        folder,
        text,
        ("kinds = [jax.jit, jax.pmap]", "kinds = [jax.jit, (lambda: jax.pmap)()]"),
        ("noise = jax.pmap", "noise = mapped"),
        ("later = jax.pmap", "later = mapped"),
        ("jax.pmap(jnp.cos)", "jax.pmap(jnp.cos, devices=jax.devices()[::-1])"),
    )

    assert told["kinds"] <= Rung.RAN
    assert told["later"] in (Rung.SAME_PROGRAM, Rung.REPLAYED)
    assert told["turned"] is Rung.DIFFERENT


def test_each_function_that_a_place_makes_has_to_be_called(folder: pathlib.Path):
    """They have one name, and differ in what they close over."""
    text = """\
def made(n):
    def default(x, n=n): return x * n
    return default
def array(n, x): return x * n
def each(n, x): return x * n
defaults = [jax.pmap(made(n)) for n in (1, 2, 3)]
arrays = [jax.pmap(functools.partial(array, n)) for n in (np.ones(()), np.zeros(()))]
both = [jax.pmap(functools.partial(each, n)) for n in (1, 2)]
defaults[0](np.ones(8)), arrays[0](np.ones(8))
both[0](np.ones(8)), both[1](np.ones(8))
"""
    _, told = _verified(
        folder,
        text,
        ("defaults = [jax.pmap", "defaults = [mapped"),
        ("arrays = [jax.pmap", "arrays = [mapped"),
        ("both = [jax.pmap", "both = [mapped"),
    )

    assert told["defaults"] is told["arrays"] is Rung.NEVER_RAN
    assert told["both"] > Rung.RAN


def test_what_was_called_before_the_program_fails_is_judged(folder: pathlib.Path):
    text = """\
early = jax.pmap(jnp.sin)
early(np.ones(8))
late = jax.pmap(jnp.cos)
late(np.ones(8))
"""
    found, told = _verified(
        folder, text, ("early = jax.pmap", "early = mapped"), ("late = jax.pmap", "late = missing")
    )

    assert told["early"] in (Rung.SAME_PROGRAM, Rung.REPLAYED)
    assert told["late"] is found.worst is Rung.DIFFERENT
