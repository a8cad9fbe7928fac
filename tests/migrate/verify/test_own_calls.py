"""A place is as sure as its own calls make it, whatever other places do."""

import pathlib
import sys

import pytest
from verified_programs import changed

from jax_dist._compat import CAN_REWRITE
from jax_dist.cli.main import main
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.results import FileMigration, PlaceResult
from jax_dist.migrate.verify.ledger import Ledger, Rung
from jax_dist.migrate.verify.trial import verified

pytestmark = pytest.mark.rewriting

_PROVED = Rung.SAME_PROGRAM if CAN_REWRITE else Rung.REPLAYED


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _ledger(folder: pathlib.Path, **texts: str) -> Ledger:
    """Of programs that are migrated to jax_dist; the one called `program` runs."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    paths = [str(folder / f"{name}.py") for name in texts]
    files, _ = migration.migrate(paths, MigrationOptions(to="jax_dist"))
    return verified([sys.executable, "program.py"], files)


def _rungs(ledger: Ledger) -> dict[str, list[Rung]]:
    """By line, the places of one in order."""
    found: dict[str, list[Rung]] = {}
    for each in ledger.entries:
        found.setdefault(f"{pathlib.Path(each.path).stem}:{each.line}", []).append(each.rung)
    return found


_IMPORTED = """\
import functools
import jax.numpy as jnp
from jax import pmap
x = jnp.ones(8)
def never(x): return pmap(jnp.sin)(x)
later = lambda x: pmap(jnp.cos)(x)
either = pmap(jnp.tan)(x) if x.size > 8 else pmap(jnp.exp)(x)
@pmap
def idle(x): return x
@functools.partial(pmap, axis_name="i")
def used(x): return x
if x.size > 8: pmap(jnp.tanh)(x)
print([pmap(jnp.sinh)(y) for y in ()], x.size > 8 and pmap(jnp.cosh)(x), used(x))
"""


def test_an_import_is_one_edit_and_each_of_its_uses_a_place(folder: pathlib.Path):
    """A line that never ran did not run: neither a short function nor half a conditional."""
    assert _rungs(_ledger(folder, program=_IMPORTED)) == {
        "program:5": [Rung.NEVER_RAN],
        "program:6": [Rung.NEVER_RAN],
        "program:7": [Rung.NEVER_RAN, _PROVED],
        "program:8": [Rung.NEVER_RAN],
        "program:10": [_PROVED],
        "program:12": [Rung.NEVER_RAN],
        "program:13": [Rung.NEVER_RAN] * 2,
    }


_NAMED = """\
import functools
import jax
import jax.numpy as jnp
p = jax.pmap
parallel = functools.partial(jax.pmap, axis_name="i")
def helper(f):
    return jax.pmap(f)
x = jnp.ones(8)
a, b = p(jnp.sin), p(jnp.cos)
c, d = parallel(lambda x: x), parallel(lambda x: x + 1)
e, f = helper(jnp.sin), helper(jnp.cos)
def wrapped(f):
    return jax.pmap(lambda x: f(x))
g, h = wrapped(jnp.sin), wrapped(jnp.cos)
class Trainer:
    def __init__(self):
        self.step = jax.pmap(self.apply)
    def apply(self, x): return x
i, j = Trainer(), Trainer()
a(x), c(x), e(x), g(x), i.step(x)
"""


def test_what_serves_several_uses_is_as_sure_as_the_least_of_them(folder: pathlib.Path):
    found = _ledger(folder, program=_NAMED)

    assert _rungs(found) == {
        "program:4": [Rung.NEVER_RAN],
        "program:5": [Rung.NEVER_RAN],
        "program:7": [Rung.NEVER_RAN],
        "program:9": [_PROVED, Rung.NEVER_RAN],
        "program:10": [_PROVED, Rung.NEVER_RAN],
        "program:13": [Rung.NEVER_RAN],
        "program:17": [Rung.NEVER_RAN],
    }
    (helper,) = [each for each in found.entries if each.line == 7]
    assert helper.notes == ("never called: cos",)


def test_a_use_in_another_file_is_a_place(folder: pathlib.Path):
    """The file that it stands in does not change: its meaning does."""
    program = """\
import jax.numpy as jnp
from common import pmap
def never(x): return pmap(jnp.sin)(x)
pmap(jnp.cos)(jnp.ones(8))
"""
    found = _rungs(_ledger(folder, common="from jax import pmap\n", program=program))

    assert (found["program:3"], found["program:4"]) == ([Rung.NEVER_RAN], [_PROVED])


@pytest.mark.thorough
@pytest.mark.parametrize("text", [_IMPORTED, _NAMED], ids=["import", "names"])
def test_what_was_put_back_keeps_its_meaning(
    folder: pathlib.Path, text: str, monkeypatch: pytest.MonkeyPatch
):
    """What stays keeps the old name, though others of the file get a new one."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    program = folder / "program.py"
    program.write_text(text)
    arguments = ["migrate", "--write", "--verify", "program.py", "--", sys.executable, "program.py"]

    assert main(arguments) == 1
    now = program.read_text()
    kept = [line for line in text.splitlines() if line.startswith(("def never", "later", "p = "))]
    assert kept
    assert all(line in now.splitlines() for line in kept)
    assert "from jax_dist import pmap" not in now


@pytest.mark.thorough
def test_a_use_that_never_ran_holds_no_other_of_its_name(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """The name stays as it is where it is defined; what is proved says all by itself."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    common = (
        "import functools, jax\nAXIS = 'i'\npmap = functools.partial(jax.pmap, axis_name=AXIS)\n"
    )
    never = "def never(x): return common.pmap(jnp.sin)(x)"
    program = f"""\
import jax, common
import jax.numpy as jnp
{never}
def two(f):
    mean = common.pmap(lambda x: jax.lax.pmean(f(x), common.AXIS))
    times = common.pmap(lambda x, n: n * f(x), static_broadcasted_argnums=1)
    return mean(jnp.arange(8.0)), times(jnp.arange(8.0), 3)
print(two(lambda x: 2 * x))
"""
    (folder / "common.py").write_text(common)
    (folder / "program.py").write_text(program)
    options = ["--to", "jax", "--one-process", "--idiomatic", "--write", "--verify"]

    main(["migrate", *options, "common.py", "program.py", "--", sys.executable, "program.py"])

    now = (folder / "program.py").read_text()
    assert (folder / "common.py").read_text() == common
    assert never in now
    assert "jax.sharding.Mesh(jax.devices(), (common.AXIS,))" in now
    assert "mapped(lambda x, n: n * f(x), static_broadcasted_argnums=1, axis_name=common" in now
    assert now.count("common.pmap") == 1


_RAISING = """\
import jax
import jax.numpy as jnp
def refuses(x): raise ValueError("not today")
always, sometimes = jax.pmap(refuses), jax.pmap(lambda x, y: x + y)
for each in (always, sometimes):
    try:
        each(jnp.ones(8))
    except (TypeError, ValueError):
        pass
sometimes(jnp.ones(8), jnp.ones(8))
"""


def test_a_call_that_raises_in_both_forms_shows_nothing(folder: pathlib.Path):
    text = _RAISING.replace("always, sometimes = ", "always = ").replace(
        "(refuses), ", "(refuses)\nsometimes = "
    )
    found = _ledger(folder, program=text)
    always, sometimes = found.entries

    assert (always.rung, always.equal) == (Rung.RAISED, 0)
    assert sometimes.rung is _PROVED
    assert (sometimes.calls, sometimes.equal) == (1, 1)
    assert found.worst is Rung.RAISED


def test_a_place_without_calls_of_its_own_is_not_proved_by_others(folder: pathlib.Path):
    before = """\
import jax
import jax.numpy as jnp
scale = 2
f = jax.pmap(lambda x: x * 2)
f(jnp.ones(8))
"""
    path = str(folder / "program.py")
    pathlib.Path(path).write_text(before)
    place = PlaceResult(path, 3, None, "", "done", "scale = 2")
    after = changed(("scale = 2", "scale = 3"), source=before)
    file = FileMigration(path, before.encode(), after.encode(), (place,))
    (found,) = verified([sys.executable, "program.py"], [file]).entries

    assert found.rung is Rung.RAN
