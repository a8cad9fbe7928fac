"""Names that cross files, and comparisons of which each side is in another file."""

import pathlib
import re
from typing import Any

import pytest
from migrated import CONSTANTS, PROMISED, USER, direct, migrate, said, written

from jax_dist.migrate import migration, report
from jax_dist.migrate.migration import MigrationOptions

_MAPS = """\
import jax

from pkg import constants

double = constants.pmap(lambda x: jax.lax.pmean(2 * x, constants.AXIS))
"""


@pytest.mark.parametrize(
    ("given", "axis"), [("axis_name=AXIS", "constants.AXIS"), ("axis_name='qmc'", "'qmc'")]
)
def test_what_an_alias_of_another_file_gives_is_written_out(
    package: pathlib.Path, given: str, axis: str
):
    (package / "constants.py").write_text(CONSTANTS.replace("axis_name=AXIS", given))
    (package / "train.py").write_text(_MAPS)

    _, train, *helpers = direct("pkg/constants.py", "pkg/train.py")

    assert f"jax.sharding.Mesh(jax.devices(), ({axis},))".encode() in train
    assert b"constants.pmap" not in train
    assert len(helpers) == 1


@pytest.mark.parametrize(
    ("constants", "train"),
    [
        (CONSTANTS, _MAPS.replace("from pkg import", "from pkg.constants import pmap, AXIS #")),
        (CONSTANTS.replace("AXIS =", "AXIS = ''\nAXIS ="), _MAPS),
        (CONSTANTS.replace("name=AXIS", "name=str('qmc')"), _MAPS),
        (CONSTANTS, f"{_MAPS}\nconstants.pmap = jax.vmap\n"),
    ],
    ids=["a name of its own", "bound twice", "computed", "set from outside"],
)
def test_it_is_not_where_that_may_mean_something_else(
    package: pathlib.Path, constants: str, train: str
):
    (package / "constants.py").write_text(constants)
    (package / "train.py").write_text(train.replace("constants.", "") if "#" in train else train)

    assert b"shard_map" not in b"".join(direct("pkg/constants.py", "pkg/train.py")[:2])


_SETTINGS = {
    "declared global": ("constants.py", "def use(f):\n    global pmap\n    pmap = f\n"),
    "by the text of its name": (
        "constants.py",
        "import os\nglobals()[os.environ['F']] = jax.vmap\n",
    ),
    "where it is used": ("train.py", "exec('')\n"),
    "in a test": (
        "test_train.py",
        "from unittest import mock\nmock.patch('pkg.constants.pmap', 1)\n",
    ),
    "by a name of the run": (
        "run.py",
        "from pkg import constants\nsetattr(constants, input(), 1)\n",
    ),
    "another module": ("run.py", "import sys\nsys.modules['pkg.constants'] = None\n"),
}


@pytest.mark.parametrize("case", _SETTINGS)
def test_a_name_that_may_be_set_while_the_program_runs_is_not_written_out(
    package: pathlib.Path, case: str
):
    file, setting = _SETTINGS[case]
    texts = {"constants.py": CONSTANTS, "train.py": _MAPS}
    for name, text in (texts | {file: texts.get(file, "") + setting}).items():
        (package / name).write_text(text)

    paths = ["pkg/constants.py", "pkg/train.py", *([] if file in texts else [f"pkg/{file}"])]
    found = {each.path: each.after for each in migration.migrate(paths, PROMISED)[0]}

    train = found.get("pkg/train.py", (package / "train.py").read_bytes())
    assert b"constants.pmap(" in train


def test_a_name_from_jax_that_a_function_declares_global_is_not_jax_pmap(package: pathlib.Path):
    """It may be another function by then, which the new text would not call."""
    text = "from jax import pmap\n\ndef use(f):\n    global pmap\n    pmap = f\n\ng = pmap(len)\n"
    (package / "train.py").write_text(text)

    assert direct("pkg/train.py") in ([], [text.encode()])


def test_pmap_may_come_with_all_else_of_jax(package: pathlib.Path):
    (package / "a.py").write_text("from jax import *\n\nf = pmap(step, axis_name='i')\n")

    (found,) = migrate("pkg/a.py")

    assert found.after.endswith(b"f = jax_dist.pmap(step, axis_name='i')\n")


def test_a_file_of_the_project_is_still_imported_where_no_name_of_it_is_read(
    package: pathlib.Path,
):
    """It may act while it is imported, as by setting jax_enable_x64."""
    (package / "constants.py").write_text(CONSTANTS.replace("axis_name=AXIS", "axis_name='qmc'"))
    (package / "train.py").write_text("from pkg.constants import pmap\n\ng = pmap(len)\n")

    _, train, *_ = direct("pkg/constants.py", "pkg/train.py")

    assert b"shard_map" in train
    assert b"from pkg.constants import pmap\n" in train


def test_an_alias_is_migrated_where_it_is_defined(package: pathlib.Path):
    (package / "constants.py").write_text(CONSTANTS)
    (package / "train.py").write_text(USER)

    constants, train = migrate("pkg/constants.py", "pkg/train.py")

    assert b"functools.partial(jax_dist.pmap, axis_name=AXIS)" in constants.after
    assert train.after == USER.encode()
    assert said(train) == [("done", "the definition of this alias is migrated", "")]


def test_an_alias_of_a_file_that_is_not_given_is_left(package: pathlib.Path):
    (package / "constants.py").write_text(CONSTANTS)
    (package / "train.py").write_text(USER)

    (train,) = migrate("pkg/train.py")

    assert not train.changed
    (place,) = train.outcomes
    assert (place.status, place.line, place.what) == ("left", 6, "constants.pmap")
    assert place.why == (
        "pmap gets its meaning in a file that is not among the paths (pkg/constants.py)"
    )
    assert place.remedy == "Migrate that file too: jax-dist migrate pkg/train.py pkg/constants.py"


@pytest.mark.parametrize(
    "handing_on", ["from pkg.constants import pmap\n", "from .constants import *\n"]
)
def test_files_that_hand_a_name_on_are_looked_through(package: pathlib.Path, handing_on: str):
    (package / "constants.py").write_text(CONSTANTS)
    (package / "shared.py").write_text(handing_on)
    (package / "train.py").write_text("from pkg.shared import pmap as p\n\nf = p(abs)  # pmap\n")

    (train,) = migrate("pkg/train.py", "pkg/shared.py")

    assert [place.detail for place in train.outcomes] == ["pkg/constants.py"]


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_name_that_another_file_imports_from_jax_and_uses(package: pathlib.Path, to: str):
    (package / "shared.py").write_text("from jax import pmap\n\ng = pmap(len)\n")
    (package / "train.py").write_text("from .shared import pmap\n\nf = pmap(abs)\n")

    shared, train, *_ = migrate("pkg/shared.py", "pkg/train.py", to=to)

    home = {"jax_dist": b"jax_dist import pmap", "jax": b"._mapped import mapped as pmap"}[to]
    assert shared.after == b"from %b\n\ng = pmap(len)\n" % home
    assert not train.changed
    assert [place.status for place in train.outcomes] == ["done"]


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize(
    "reading",
    [
        "from pkg.util import jax, pmap\n",
        "from pkg.util import *\n\nprint(jax, pmap)\n",
        "import pkg.util as u\n\nprint(u.jax, u.pmap)\n",
        "import pkg.util\n\nprint(pkg.util.jax, pkg.util.pmap)\n",
        "from pkg import util\n\nprint(util.jax, util.pmap)\n",
    ],
)
def test_names_that_other_files_read_stay(package: pathlib.Path, reading: str, to: str):
    util = "import jax\nfrom jax import pmap\n\nf = jax.pmap(abs)\ng = pmap(abs)\n"
    (package / "util.py").write_text(util)
    (package / "reader.py").write_text(reading)

    found = migrate("pkg/util.py", "pkg/reader.py", to=to)[0]

    names: dict = {}
    exec(re.sub(r"from [\w.]*_mapped", "from _mapped", found.after.decode()), names)
    assert {"jax", "pmap"} <= set(names)
    assert b"jax.pmap" not in found.after.replace(b"from jax", b"")
    assert all(place.status == "done" for place in found.outcomes)


def test_a_function_of_the_same_name_elsewhere_does_not_count(package: pathlib.Path):
    (package / "util.py").write_text("def pmap(f):\n    return map(f)\n")
    (package / "a.py").write_text("import jax\n\nf = jax.pmap(abs)\n")
    (package / "b.py").write_text("from .util import pmap\n\nf = pmap(abs)\n")

    (found,) = migrate("pkg/a.py", "pkg/b.py", "pkg/util.py")

    assert found.path == "pkg/a.py"


# --- comparisons


_REGISTRY = """\
import jax

TRANSFORMS = (jax.jit, jax.pmap)


def is_known(transform):
    return transform in TRANSFORMS
"""
_REGISTRAR = """\
import jax

from pkg.registry import is_known

assert is_known(jax.pmap)
"""


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_comparisons_move_together(package: pathlib.Path, to: str):
    (package / "registry.py").write_text(_REGISTRY)
    (package / "user.py").write_text(_REGISTRAR)

    registry, user, *_ = migrate("pkg/registry.py", "pkg/user.py", to=to)

    new = {"jax_dist": b"jax_dist.pmap", "jax": b"mapped"}[to]
    assert b"TRANSFORMS = (jax.jit, %s)" % new in registry.after
    assert b"assert is_known(%s)" % new in user.after


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize("given", ["pkg/registry.py", "pkg/user.py"])
def test_comparisons_stay_together(package: pathlib.Path, to: str, given: str):
    (package / "registry.py").write_text(_REGISTRY)
    (package / "user.py").write_text(_REGISTRAR)

    (found,) = migrate(given, to=to)

    assert not found.changed
    assert said(found)[0][1] == (
        "pmap goes on as a value here and in a file that is not among the paths, so that the two "
        "may meet"
    )


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_comparison_in_a_file_that_others_import_keeps_all_as_it_is(
    package: pathlib.Path, to: str
):
    (package / "registry.py").write_text(_REGISTRY.replace("in TRANSFORMS", "is jax.pmap"))
    (package / "user.py").write_text(_REGISTRAR)

    registry, user, *_ = migrate("pkg/registry.py", "pkg/user.py", to=to)

    assert not registry.changed
    assert not user.changed
    assert said(user)[0][1] == (
        "pmap goes on as a value, and a comparison with jax.pmap may meet it"
    )


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_name_that_tests_take_from_a_package_in_src_stays(src: pathlib.Path, to: str):
    (src / "src/mine/step.py").write_text("from jax import pmap\n\nf = pmap(abs)\n")
    (src / "tests/test_step.py").write_text("from mine.step import pmap\n\npmap(len)\n")

    found = written(migrate("src/mine/step.py", to=to))

    module = {"jax_dist": "jax_dist import pmap", "jax": "mine._mapped import mapped as pmap"}[to]
    assert found["src/mine/step.py"] == f"from {module}\n\nf = pmap(abs)\n"


@pytest.mark.parametrize(
    ("other", "to", "status"),
    [
        ("from pkg.sync import f\n", "jax", "left"),
        ("from pkg.sync import f\n", "jax_dist", "done"),
        ("import pkg\n", "jax", "done"),  # nobody takes the function from its file
    ],
)
def test_what_a_package_may_ask_for_its_type_stays(
    package: pathlib.Path, other: str, to: Any, status: str
):
    (package / "asks.py").write_text("def is_mapped(f):\n    return 'PmapFunction' in str(f)\n")
    (package / "sync.py").write_text("import jax\nfrom pkg import asks\n\nf = jax.pmap(abs)\n")
    (package / "user.py").write_text(other)
    options = MigrationOptions(to=to)

    made, context = migration.migrate(["pkg/sync.py"], options)

    ((found, reason, detail),) = said(made[0])
    assert found == status
    assert status == "done" or reason.startswith("the package knows functions of jax.pmap by")
    assert status == "done" or detail == "pkg/asks.py:2"
    cautions = [each for each in report.cautions_of(made, context, options) if "asks.py" in each]
    assert len(cautions) == (to == "jax" and status == "done")
