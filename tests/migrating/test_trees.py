"""Several files together: names that cross them, and files with something wrong."""

import pathlib

import pytest

from jax_dist.migrating import trees
from jax_dist.migrating.files import Options

_CONSTANTS = """\
import functools

import jax

AXIS = "qmc"
pmap = functools.partial(jax.pmap, axis_name=AXIS)
"""
_USER = """\
import functools

from pkg import constants


@functools.partial(constants.pmap, donate_argnums=(0,))
def step(x):
    return x
"""


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a package `pkg`, and the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    return folder


def _migrate(*paths: str, to: str = "jax_dist", **options):
    return trees.migrate(paths, Options(to=to), **options)  # type: ignore[arg-type]


def test_an_alias_is_migrated_where_it_is_defined(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS)
    (package / "train.py").write_text(_USER)

    constants, train = _migrate("pkg/constants.py", "pkg/train.py")

    assert b"functools.partial(jax_dist.pmap, axis_name=AXIS)" in constants.after
    assert train.after == _USER.encode()
    assert [(place.status, place.why) for place in train.outcomes] == [
        ("done", "the definition of this alias is migrated")
    ]


def test_an_alias_of_a_file_that_is_not_given_is_left(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS)
    (package / "train.py").write_text(_USER)

    (train,) = _migrate("pkg/train.py")

    assert not train.changed
    (place,) = train.outcomes
    assert (place.status, place.line, place.what) == ("left", 6, "constants.pmap")
    assert place.why == (
        "pmap gets its meaning in a file that is not among the paths (pkg/constants.py)"
    )
    assert place.remedy == ("Migrate that file too: jax-dist migrate pkg/train.py pkg/constants.py")


@pytest.mark.parametrize(
    "handing_on", ["from pkg.constants import pmap\n", "from .constants import *\n"]
)
def test_files_that_hand_a_name_on_are_looked_through(package: pathlib.Path, handing_on: str):
    (package / "constants.py").write_text(_CONSTANTS)
    (package / "shared.py").write_text(handing_on)
    (package / "train.py").write_text("from pkg.shared import pmap as p\n\nf = p(abs)  # pmap\n")

    (train,) = _migrate("pkg/train.py", "pkg/shared.py")

    assert [place.detail for place in train.outcomes] == ["pkg/constants.py"]


def test_a_name_that_another_file_imports_from_jax_and_uses(package: pathlib.Path):
    (package / "shared.py").write_text("from jax import pmap\n\ng = pmap(len)\n")
    (package / "train.py").write_text("from .shared import pmap\n\nf = pmap(abs)\n")

    shared, train = _migrate("pkg/shared.py", "pkg/train.py")

    assert shared.after == b"from jax_dist import pmap\n\ng = pmap(len)\n"
    assert not train.changed
    assert [place.status for place in train.outcomes] == ["done"]


def test_a_name_that_another_file_only_imports_is_left(package: pathlib.Path):
    (package / "shared.py").write_text("from jax import pmap\n")
    (package / "train.py").write_text("from .shared import pmap\n\nf = pmap(abs)\n")

    (train,) = _migrate("pkg/shared.py", "pkg/train.py")

    assert [(place.status, place.why) for place in train.outcomes] == [
        (
            "left",
            "pmap comes from a file that imports it for others and does not use it (pkg/shared.py)",
        )
    ]
    assert train.outcomes[0].remedy == "Write `from jax_dist import pmap` in pkg/shared.py."


def test_an_alias_within_the_file_needs_no_other(package: pathlib.Path):
    (package / "a.py").write_text("import jax\n\np = jax.pmap\nf = p(abs)\n")

    (found,) = _migrate("pkg/a.py")

    assert found.after == b"import jax_dist\n\np = jax_dist.pmap\nf = p(abs)\n"


def test_arguments_that_another_file_binds_are_carried_to_plain_jax(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS.replace("=AXIS", '="qmc"'))
    (package / "train.py").write_text(_USER)

    _, train = _migrate("pkg/constants.py", "pkg/train.py", to="jax")

    assert b'axis_name="qmc"' in train.after
    assert b"constants" not in train.after


def test_files_without_a_place_are_not_named(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nprint(jax.devices())\n")
    (package / "b.py").write_text("pmap = 1\n")
    (package / "c.py").write_text("def f(:\n")

    assert _migrate("pkg/a.py", "pkg/b.py", "pkg/c.py") == []


def test_files_that_cannot_be_read_are_named(package: pathlib.Path):
    (package / "a.py").write_bytes(b"import jax\nf = jax.pmap(abs)  # \xff\n")
    (package / "b.ipynb").write_text("jax.pmap")
    (package / "c.py").write_text("import jax\nf = jax.pmap(\n")

    found = _migrate("pkg/a.py", "pkg/b.ipynb", "pkg/c.py", "pkg/none.py")

    assert [(file.path, file.problem.partition(":")[0], file.changed) for file in found] == [
        ("pkg/a.py", "the file is not utf-8", False),
        ("pkg/b.ipynb", "the file is no notebook", False),
        ("pkg/c.py", "Python cannot parse it", False),
        ("pkg/none.py", "it cannot be read", False),
    ]


def test_progress_is_told(package: pathlib.Path):
    for name in ("a", "b", "c"):
        (package / f"{name}.py").write_text("import jax\nf = jax.pmap(abs)\n")
    (package / "d.py").touch()
    told: list[tuple[int, int]] = []

    _migrate(
        *(f"pkg/{name}.py" for name in "abcd"),
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(2, 4), (3, 4), (4, 4)]


def test_several_processes_find_the_same_in_the_same_order(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS)
    for name in ("zeta", "alpha", "mid"):
        (package / f"{name}.py").write_text(_USER)
    paths = [f"pkg/{name}.py" for name in ("zeta", "constants", "alpha", "mid")]

    found = _migrate(*paths, jobs=2)

    assert [file.path for file in found] == paths
    assert found == _migrate(*paths, jobs=1)
