"""Several files together: names that cross them, and files with something wrong."""

import gc
import pathlib
import re
import time
import weakref

import pytest

from jax_dist.codemod import helper_module, migration, report
from jax_dist.codemod.migration import MigrationOptions
from jax_dist.codemod.pmap_facts import Promises
from jax_dist.codemod.results import FileMigration

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


def _migrate(
    *paths: str, to: str = "jax_dist", full_helpers: bool = False, **options
) -> list[FileMigration]:
    asked = MigrationOptions(to=to, full_helpers=full_helpers)  # type: ignore[arg-type]
    found, _ = migration.migrate(paths, asked, **options)
    return found


_PROMISED = MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True))


def _direct(*paths: str) -> list[bytes]:
    """The new texts as plain JAX, of a program in one process on all devices."""
    return [each.after for each in migration.migrate(paths, _PROMISED)[0]]


def _said(found: FileMigration) -> list[tuple[str, str, str]]:
    return [(place.status, place.reason, place.detail) for place in found.outcomes]


# --- names that cross files


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
    (package / "constants.py").write_text(_CONSTANTS.replace("axis_name=AXIS", given))
    (package / "train.py").write_text(_MAPS)

    _, train, *helpers = _direct("pkg/constants.py", "pkg/train.py")

    assert f"jax.sharding.Mesh(jax.devices(), ({axis},))".encode() in train
    assert b"constants.pmap" not in train
    assert len(helpers) == 1


@pytest.mark.parametrize(
    ("constants", "train"),
    [
        (_CONSTANTS, _MAPS.replace("from pkg import", "from pkg.constants import pmap, AXIS #")),
        (_CONSTANTS.replace("AXIS =", "AXIS = ''\nAXIS ="), _MAPS),
        (_CONSTANTS.replace("name=AXIS", "name=str('qmc')"), _MAPS),
        (_CONSTANTS, f"{_MAPS}\nconstants.pmap = jax.vmap\n"),
    ],
    ids=["a name of its own", "bound twice", "computed", "set from outside"],
)
def test_it_is_not_where_that_may_mean_something_else(
    package: pathlib.Path, constants: str, train: str
):
    (package / "constants.py").write_text(constants)
    (package / "train.py").write_text(train.replace("constants.", "") if "#" in train else train)

    assert b"shard_map" not in b"".join(_direct("pkg/constants.py", "pkg/train.py")[:2])


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
    texts = {"constants.py": _CONSTANTS, "train.py": _MAPS}
    for name, text in (texts | {file: texts.get(file, "") + setting}).items():
        (package / name).write_text(text)

    paths = ["pkg/constants.py", "pkg/train.py", *([] if file in texts else [f"pkg/{file}"])]
    found = {each.path: each.after for each in migration.migrate(paths, _PROMISED)[0]}

    train = found.get("pkg/train.py", (package / "train.py").read_bytes())
    assert b"constants.pmap(" in train


def test_a_name_from_jax_that_a_function_declares_global_is_not_jax_pmap(package: pathlib.Path):
    """It may be another function by then, which the new text would not call."""
    text = "from jax import pmap\n\ndef use(f):\n    global pmap\n    pmap = f\n\ng = pmap(len)\n"
    (package / "train.py").write_text(text)

    assert _direct("pkg/train.py") in ([], [text.encode()])


def test_pmap_may_come_with_all_else_of_jax(package: pathlib.Path):
    (package / "a.py").write_text("from jax import *\n\nf = pmap(step, axis_name='i')\n")

    (found,) = _migrate("pkg/a.py")

    assert found.after.endswith(b"f = jax_dist.pmap(step, axis_name='i')\n")


def test_a_file_of_the_project_is_still_imported_where_no_name_of_it_is_read(
    package: pathlib.Path,
):
    """It may act while it is imported, as by setting jax_enable_x64."""
    (package / "constants.py").write_text(_CONSTANTS.replace("axis_name=AXIS", "axis_name='qmc'"))
    (package / "train.py").write_text("from pkg.constants import pmap\n\ng = pmap(len)\n")

    _, train, *_ = _direct("pkg/constants.py", "pkg/train.py")

    assert b"shard_map" in train
    assert b"from pkg.constants import pmap\n" in train


def test_an_alias_is_migrated_where_it_is_defined(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS)
    (package / "train.py").write_text(_USER)

    constants, train = _migrate("pkg/constants.py", "pkg/train.py")

    assert b"functools.partial(jax_dist.pmap, axis_name=AXIS)" in constants.after
    assert train.after == _USER.encode()
    assert _said(train) == [("done", "the definition of this alias is migrated", "")]


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
    assert place.remedy == "Migrate that file too: jax-dist migrate pkg/train.py pkg/constants.py"


@pytest.mark.parametrize(
    "handing_on", ["from pkg.constants import pmap\n", "from .constants import *\n"]
)
def test_files_that_hand_a_name_on_are_looked_through(package: pathlib.Path, handing_on: str):
    (package / "constants.py").write_text(_CONSTANTS)
    (package / "shared.py").write_text(handing_on)
    (package / "train.py").write_text("from pkg.shared import pmap as p\n\nf = p(abs)  # pmap\n")

    (train,) = _migrate("pkg/train.py", "pkg/shared.py")

    assert [place.detail for place in train.outcomes] == ["pkg/constants.py"]


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_name_that_another_file_imports_from_jax_and_uses(package: pathlib.Path, to: str):
    (package / "shared.py").write_text("from jax import pmap\n\ng = pmap(len)\n")
    (package / "train.py").write_text("from .shared import pmap\n\nf = pmap(abs)\n")

    shared, train, *_ = _migrate("pkg/shared.py", "pkg/train.py", to=to)

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

    found = _migrate("pkg/util.py", "pkg/reader.py", to=to)[0]

    names: dict = {}
    exec(re.sub(r"from [\w.]*_mapped", "from _mapped", found.after.decode()), names)
    assert {"jax", "pmap"} <= set(names)
    assert b"jax.pmap" not in found.after.replace(b"from jax", b"")
    assert all(place.status == "done" for place in found.outcomes)


def test_a_function_of_the_same_name_elsewhere_does_not_count(package: pathlib.Path):
    (package / "util.py").write_text("def pmap(f):\n    return map(f)\n")
    (package / "a.py").write_text("import jax\n\nf = jax.pmap(abs)\n")
    (package / "b.py").write_text("from .util import pmap\n\nf = pmap(abs)\n")

    (found,) = _migrate("pkg/a.py", "pkg/b.py", "pkg/util.py")

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

    registry, user, *_ = _migrate("pkg/registry.py", "pkg/user.py", to=to)

    new = {"jax_dist": b"jax_dist.pmap", "jax": b"mapped"}[to]
    assert b"TRANSFORMS = (jax.jit, %s)" % new in registry.after
    assert b"assert is_known(%s)" % new in user.after


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize("given", ["pkg/registry.py", "pkg/user.py"])
def test_comparisons_stay_together(package: pathlib.Path, to: str, given: str):
    (package / "registry.py").write_text(_REGISTRY)
    (package / "user.py").write_text(_REGISTRAR)

    (found,) = _migrate(given, to=to)

    assert not found.changed
    assert _said(found)[0][1] == (
        "pmap goes on as a value here and in a file that is not among the paths, so that the two "
        "may meet"
    )


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_comparison_in_a_file_that_others_import_keeps_all_as_it_is(
    package: pathlib.Path, to: str
):
    (package / "registry.py").write_text(_REGISTRY.replace("in TRANSFORMS", "is jax.pmap"))
    (package / "user.py").write_text(_REGISTRAR)

    registry, user, *_ = _migrate("pkg/registry.py", "pkg/user.py", to=to)

    assert not registry.changed
    assert not user.changed
    assert _said(user)[0][1] == (
        "pmap goes on as a value, and a comparison with jax.pmap may meet it"
    )


# --- where the helpers are


_FLAT = "import jax\n\nf = jax.pmap(abs)\n"


def _written(found: list[FileMigration]) -> dict[str, str]:
    return {each.path: each.after.decode() for each in found if each.changed}


def test_a_package_gets_one_module(package: pathlib.Path):
    (package / "inner").mkdir()
    (package / "inner" / "__init__.py").touch()
    (package / "a.py").write_text("import jax\nimport pkg.inner.b\n\nf = jax.pmap(abs)\n")
    (package / "inner" / "b.py").write_text("import jax\nfrom .. import c\n\nf = jax.pmap(abs)\n")
    (package / "c.py").write_text("import os\n")

    found = _written(_migrate("pkg/a.py", "pkg/inner/b.py", to="jax"))

    assert list(found) == ["pkg/a.py", "pkg/inner/b.py", "pkg/_mapped.py"]
    assert found["pkg/a.py"] == (
        "import pkg.inner.b\nfrom pkg._mapped import mapped\n\nf = mapped(abs)\n"
    )
    assert found["pkg/inner/b.py"] == (
        "from .. import c\nfrom .._mapped import mapped\n\nf = mapped(abs)\n"
    )


def test_files_that_import_each_other_as_scripts_get_one_module_beside_them(
    package: pathlib.Path,
):
    (package / "__init__.py").unlink()
    (package / "train.py").write_text("import jax\nimport model\n\nf = jax.pmap(model.f)\n")
    (package / "model.py").write_text(_FLAT)

    found = _written(_migrate("pkg/train.py", "pkg/model.py", to="jax"))

    assert list(found) == ["pkg/train.py", "pkg/model.py", "pkg/_mapped.py"]
    assert found["pkg/model.py"] == "from _mapped import mapped\n\nf = mapped(abs)\n"


def test_a_file_is_in_the_package_by_whose_name_others_import_it(
    tmp_path: pathlib.Path, package: pathlib.Path
):
    (package / "__init__.py").unlink()
    (package / "inner").mkdir()
    (package / "sync.py").write_text(_FLAT)
    (package / "inner" / "train.py").write_text("from pkg import sync\n\nsync.f(1)\n")
    (tmp_path / "main.py").write_text("from pkg.inner import train\n")

    found = _written(_migrate("pkg/sync.py", "pkg/inner/train.py", "main.py", to="jax"))

    assert list(found) == ["pkg/sync.py", "pkg/_mapped.py"]
    assert found["pkg/sync.py"] == "from pkg._mapped import mapped\n\nf = mapped(abs)\n"


def _checkout(package: pathlib.Path) -> None:
    """`pkg` is a checkout of a package whose files import it as `mine`."""
    (package / "setup.py").touch()
    for name in ("models", "data", "losses"):
        (package / f"{name}.py").touch()
    (package / "train.py").write_text(
        "import jax\nfrom mine import models\nfrom mine import data\n\nf = jax.pmap(abs)\n"
    )
    (package / "evaluate.py").write_text("from mine.losses import loss\nfrom mine import train\n")


@pytest.mark.parametrize("called", ["jax", "flax"])
def test_a_folder_that_is_called_like_a_library_is_not_taken_for_it(
    package: pathlib.Path, called: str
):
    folder = package / "baseline" / called
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    (folder / "other.py").write_text("size = 1\n")
    text = f"import jax\nfrom flax import linen\nfrom pkg.baseline.{called} import other\n\n"
    (folder / "train.py").write_text(f"{text}f = jax.pmap(abs)\n")

    found = _written(_migrate(f"pkg/baseline/{called}/train.py", to="jax"))

    assert list(found) == [f"pkg/baseline/{called}/train.py", "pkg/_mapped.py"]
    assert "\nfrom pkg._mapped import mapped\n" in found[f"pkg/baseline/{called}/train.py"]


def test_a_package_may_lack_a_module_that_its_file_imports(package: pathlib.Path):
    (package / "other.py").write_text("size = 1\n")
    text = "import jax\nfrom pkg import other\nfrom pkg.made import table_pb2\n\n"
    (package / "train.py").write_text(f"{text}f = jax.pmap(abs)\n")

    found = _written(_migrate("pkg/train.py", to="jax"))

    assert list(found) == ["pkg/train.py", "pkg/_mapped.py"]


@pytest.mark.parametrize("name", ["pkg/utils.py", "pkg/parts/utils.py"])
def test_others_say_by_which_name_a_file_that_imports_nothing_is_known(
    tmp_path: pathlib.Path, package: pathlib.Path, name: str
):
    if name == "pkg/utils.py":
        (tmp_path / "__init__.py").touch()  # the folder of a repository that is no package
    else:
        (package / "__init__.py").unlink()
        (package / "parts").mkdir()
        (package / "parts" / "__init__.py").touch()
    (tmp_path / name).write_text(_FLAT)
    parent = name.removesuffix("/utils.py").replace("/", ".")
    (package / "train.py").write_text(f"from {parent} import utils\n\nutils.f\n")

    found = _written(_migrate(name, "pkg/train.py", to="jax"))

    assert list(found) == [name, "pkg/_mapped.py"]
    assert found[name].startswith("from pkg._mapped import mapped\n")


def test_a_package_may_have_another_name_than_its_checkout(package: pathlib.Path):
    _checkout(package)

    found = _written(_migrate("pkg/train.py", to="jax"))
    chosen = _written(_migrate("pkg/train.py", to="jax", helpers="pkg/parallel.py"))

    assert list(found) == ["pkg/train.py", "pkg/_mapped.py"]
    assert "from mine._mapped import mapped\n" in found["pkg/train.py"]
    assert "from mine.parallel import mapped\n" in chosen["pkg/train.py"]


@pytest.mark.parametrize("other", ["from mine import elsewhere\n", "import mine.data.more\n"])
def test_another_package_is_not_taken_for_the_checkout(package: pathlib.Path, other: str):
    """What is imported as `mine` has a module that is not here."""
    _checkout(package)
    (package / "more.py").write_text(other)

    found = _written(_migrate("pkg/train.py", to="jax"))

    assert list(found) == ["pkg/train.py"]


_SCRIPT = _FLAT + "\nif __name__ == '__main__':\n    print(f)\n"


def test_a_script_that_is_run_by_its_path_gets_a_module_beside_it(package: pathlib.Path):
    script = package.parent / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(_SCRIPT)

    found = _written(_migrate("scripts/train.py", to="jax"))

    assert list(found) == ["scripts/train.py", "scripts/_mapped.py"]
    assert found["scripts/train.py"].startswith("from _mapped import mapped\n\nf = mapped(abs)\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "python -m scripts.train\n"),
        ("other.py", "import runpy\n\nrunpy.run_module('scripts.train')\n"),
        ("other.py", "from scripts import train\n"),
        ("Dockerfile", "COPY scripts/train.py /\n"),
        ("run.sh", "scp train.py host:\n"),
        ("run.sh", "PYTHONSAFEPATH=1 python scripts/train.py\n"),
        ("pyproject.toml", "[tool.setuptools]\npy-modules = ['train']\n"),
        ("scripts/__init__.py", ""),
    ],
)
def test_a_script_that_may_not_find_what_lies_beside_it(
    package: pathlib.Path, name: str, text: str
):
    (package.parent / ".git").mkdir()
    script = package.parent / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(_SCRIPT)
    (package.parent / name).write_text(text)

    found = _written(_migrate("scripts/train.py", to="jax"))

    assert list(found) == ["scripts/train.py"]
    assert "\ndef mapped(\n" in found["scripts/train.py"]


@pytest.mark.parametrize(
    "text",
    [
        _FLAT,  # it runs nothing: somebody imports it
        "import sys\n\nsys.path.pop(0)\n" + _SCRIPT,
    ],
)
def test_a_lone_file_that_is_no_such_script_has_its_helpers_inside(
    tmp_path: pathlib.Path, package: pathlib.Path, text: str
):
    (tmp_path / "lone.py").write_text(text)

    found = _written(_migrate("lone.py", to="jax"))

    assert list(found) == ["lone.py"]
    assert "\ndef mapped(\n" in found["lone.py"]
    added = found["lone.py"].count("\n") - text.count("\n")
    assert added <= 60


def test_two_scripts_share_a_module_with_the_parts_of_both(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))

    found = _written(_migrate("a.py", "b.py", to="jax"))

    assert list(found) == ["a.py", "b.py", "_mapped.py"]
    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes"}


def test_a_module_gets_the_parts_that_later_files_need(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))
    for file in _migrate("a.py", to="jax"):
        pathlib.Path(file.path).write_bytes(file.after)
    first = (package.parent / "_mapped.py").read_text()

    found = _written(_migrate("b.py", to="jax"))

    assert helper_module.present_in(first) == {"mapped"}
    assert list(found) == ["b.py", "_mapped.py"]
    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes"}


def test_a_module_that_was_changed_by_hand_does_not_get_parts(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))
    _, module = _migrate("a.py", to="jax")
    (package.parent / "_mapped.py").write_bytes(module.after.replace(b"Each array", b"All arrays"))

    (lacks,) = _migrate("b.py", to="jax")

    assert not lacks.changed
    assert lacks.outcomes[0].why == (
        "the module for its helpers was changed by hand, and lacks some of them (_mapped.py: axes)"
    )


def test_files_with_devices_and_without_may_get_arrays_of_each_other(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "abs, devices=jax.devices()[:2]"))

    found = _written(_migrate("a.py", "b.py", to="jax"))

    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes", "devices"}


def test_modules_of_one_name_in_one_run_are_alike(package: pathlib.Path):
    """In one process, the second script would get the module of the first."""
    for name, options in (("one", ""), ("two", ", in_axes=(None, 0)")):
        folder = package.parent / name
        folder.mkdir()
        (folder / "train.py").write_text(_SCRIPT.replace("abs", f"max{options}"))

    found = _written(_migrate("one/train.py", "two/train.py", to="jax"))

    assert found["one/_mapped.py"] == found["two/_mapped.py"]
    mine = found["one/_mapped.py"].replace("An axis", "The axis")
    (package.parent / "one" / "_mapped.py").write_text(mine)  # one that is changed by hand stays
    again = _written(_migrate("one/train.py", "two/train.py", to="jax"))
    assert list(again) == ["one/train.py", "two/train.py", "two/_mapped.py"]


def test_a_package_of_scripts_shares_their_module(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").touch()
    (package.parent / "train.py").write_text("import jax\nfrom pkg import a\n\nf = jax.pmap(a.f)\n")
    (package.parent / "model.py").write_text("import jax\nimport train\n\nf = jax.pmap(abs)\n")
    paths = ("pkg/a.py", "train.py", "model.py")

    together = list(_written(_migrate(*paths, to="jax")))
    (package.parent / "setup.py").touch()
    installed = list(_written(_migrate(*paths, to="jax")))

    assert together == [*paths, "_mapped.py"]
    assert "pkg/_mapped.py" in installed


def test_the_whole_contract_is_what_the_user_may_ask_for(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)

    found = _written(_migrate("a.py", to="jax", full_helpers=True))

    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", *helper_module.PARTS}
    assert "class _Program:" in found["_mapped.py"]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("from flax import jax_utils\n\nx = jax_utils.replicate(1)\n", 1),
        ("from flax.jax_utils import prefetch_to_device, replicate\n\nx = replicate(1)\n", 1),
        ("from flax import jax_utils\n\nx = jax_utils.unreplicate([1])\n", 0),
        ("from flax.jax_utils import unreplicate\n\nx = unreplicate([1])\n", 0),
    ],
)
@pytest.mark.parametrize("options", [MigrationOptions(to="jax"), MigrationOptions(to="jax_dist")])
def test_it_says_which_flax_can_still_replicate(
    package: pathlib.Path, text: str, calls: int, options: MigrationOptions, monkeypatch
):
    monkeypatch.setattr(report.importlib.metadata, "version", lambda name: "0.12.6")
    (package.parent / "a.py").write_text("import jax\n" + text + "f = jax.pmap(abs)\n")

    made, context = migration.migrate(["a.py"], options)

    said = [each for each in report.cautions_of(made, context, options) if "flax" in each]
    place = "a.py:4" if "x = jax_utils" in text else "a.py:2"
    assert (
        said
        == [
            f"{place} uses flax.jax_utils.replicate, which stays: with jax 0.10 and newer it needs "
            "flax 0.12.7 or newer."
        ]
        * calls
    )


def test_a_run_is_not_kept(package: pathlib.Path):
    """A long process would keep all files of each."""
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(b.f)\n")
    (package / "b.py").write_text("f = abs\n")
    made, context = migration.migrate(["pkg/a.py", "pkg/b.py"], MigrationOptions(to="jax"))
    assert context.graph.reached(str(package / "a.py"))
    assert context.graph.other_name(str(package)) == ""
    graph = weakref.ref(context.graph)

    del made, context
    gc.collect()

    assert graph() is None


def test_a_file_outside_uses_the_module_of_a_package_that_is_migrated_with_it(
    tmp_path: pathlib.Path, package: pathlib.Path
):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").touch()
    script = tmp_path / "script.py"
    script.write_text("import jax\nimport pkg.a\n\nf = jax.pmap(abs)\n")

    together = _written(_migrate("script.py", "pkg/a.py", to="jax"))
    alone = _written(_migrate("script.py", to="jax"))

    assert "from pkg._mapped import mapped\n" in together["script.py"]
    assert list(alone) == ["script.py", "_mapped.py"]
    assert "from _mapped import mapped\n" in alone["script.py"]


def test_a_folder_that_is_called_like_an_installed_package_gives_no_helpers(tmp_path: pathlib.Path):
    """`examples/flax/` beside a script that imports the library of that name."""
    folder = tmp_path / "flax"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (folder / "b.py").touch()
    script = tmp_path / "script.py"
    text = "import flax\nimport jax\nfrom flax.training import x\n\nf = jax.pmap(abs)\n"
    script.write_text(text)

    found = _written(_migrate(str(script), str(folder / "a.py"), to="jax"))
    script.write_text(text.replace("flax.training", "flax.b"))
    other = _written(_migrate(str(script), str(folder / "a.py"), to="jax"))

    assert "flax._mapped" not in found[str(script)]
    assert "from flax._mapped import mapped\n" in other[str(script)]


def test_tests_use_the_module_of_what_they_test(tmp_path: pathlib.Path, package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").touch()
    tests = package / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_a.py").write_text("import jax\nfrom pkg import a\n\nf = jax.pmap(abs)\n")

    found = _written(_migrate("pkg/tests/test_a.py", "pkg/a.py", to="jax"))

    assert list(found) == ["pkg/tests/test_a.py", "pkg/a.py", "pkg/_mapped.py"]
    assert "from pkg._mapped import mapped\n" in found["pkg/tests/test_a.py"]


def test_a_module_of_the_users_choice(tmp_path: pathlib.Path, package: pathlib.Path):
    (tmp_path / "lone.py").write_text(_FLAT)
    (package / "a.py").write_text(_FLAT)

    found = _written(_migrate("lone.py", "pkg/a.py", to="jax", helpers="pkg/parallel.py"))

    assert list(found) == ["lone.py", "pkg/a.py", "pkg/parallel.py"]
    assert found["lone.py"] == found["pkg/a.py"]
    assert found["lone.py"] == "from pkg.parallel import mapped\n\nf = mapped(abs)\n"


def test_a_file_of_the_project_with_the_name_is_not_overwritten(package: pathlib.Path):
    (package / "_mapped.py").write_text("mine = 1\n")
    (package / "a.py").write_text("import jax\nfrom ._mapped import mine\n\nf = jax.pmap(abs)\n")

    found = _written(_migrate("pkg/a.py", to="jax"))

    assert list(found) == ["pkg/a.py", "pkg/_mapped_devices.py"]
    assert "from ._mapped_devices import mapped\n" in found["pkg/a.py"]


def test_a_module_gets_what_later_files_need(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").write_text(
        "import jax\nfrom . import c\n\nx = jax.device_put_sharded([1], jax.devices()[:1])\n"
    )
    (package / "c.py").touch()
    for file in _migrate("pkg/a.py", to="jax"):
        pathlib.Path(file.path).write_bytes(file.after)
    module = (package / "_mapped.py").read_text()

    found = _written(_migrate("pkg/b.py", to="jax"))

    assert "def device_put_sharded(" not in module
    assert list(found) == ["pkg/b.py", "pkg/_mapped.py"]
    assert "def mapped(" in found["pkg/_mapped.py"]
    assert "def device_put_sharded(" in found["pkg/_mapped.py"]


def test_a_module_that_was_changed_by_hand_is_left(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").write_text(
        "import jax\nfrom . import c\n\nx = jax.device_put_sharded([1], jax.devices()[:1])\n"
    )
    (package / "c.py").touch()
    a, module = _migrate("pkg/a.py", to="jax")
    (package / "_mapped.py").write_bytes(module.after.replace(b"Each array", b"Every array"))

    fits = _migrate("pkg/a.py", to="jax")
    (lacks,) = _migrate("pkg/b.py", to="jax")

    assert _written(fits) == {"pkg/a.py": a.after.decode()}
    assert not lacks.changed
    assert _said(lacks) == [
        (
            "left",
            "the module for its helpers was changed by hand, and lacks some of them",
            "pkg/_mapped.py: device_put_sharded",
        )
    ]
    assert lacks.outcomes[0].remedy == "Give the path of another module: --helpers PATH."


def test_the_module_has_the_indentation_of_its_project(package: pathlib.Path):
    (package / "a.py").write_text(
        "import jax\nfrom . import b\n\n\ndef build(g):\n  return jax.pmap(g)\n"
    )
    (package / "b.py").touch()

    _, module = _migrate("pkg/a.py", to="jax")

    assert b"\n  def program(" in module.after
    compile(module.after, "_mapped.py", "exec")


# --- files with something wrong


def test_files_without_a_place_are_not_named(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nprint(jax.devices())\n")
    (package / "b.py").write_text("pmap = 1\n")
    (package / "c.py").write_text("def f(:\n")

    assert _migrate("pkg/a.py", "pkg/b.py", "pkg/c.py") == []


def test_files_that_cannot_be_read_are_named(package: pathlib.Path):
    (package / "a.py").write_bytes(b"import jax\nf = jax.pmap(abs)  # \xff\n")
    (package / "b.ipynb").write_text("jax.pmap")
    (package / "c.py").write_text("import jax\nf = jax.pmap(\n")
    (package / "d.py").write_text("import jax\nf = jax.pmap(\n" + "(" * 4000)
    (package / "e.py").write_text("import jax\nf = jax.pmap(" + "-" * 60000 + "1)\n")

    found = _migrate(*(f"pkg/{name}" for name in ("a.py", "b.ipynb", "c.py", "d.py", "e.py", "f")))

    assert [(file.path, file.problem.partition(":")[0], file.changed) for file in found] == [
        ("pkg/a.py", "the file is not utf-8", False),
        ("pkg/b.ipynb", "the file is no notebook", False),
        ("pkg/c.py", "Python cannot parse it", False),
        ("pkg/d.py", "Python cannot parse it", False),
        ("pkg/e.py", "Python cannot parse it", False),
        ("pkg/f", "it cannot be read", False),
    ]


def test_an_error_of_ours_stays_in_its_file(package: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    for name in "ab":
        (package / f"{name}.py").write_text(_FLAT)
    work = migration.of_source

    def broken(source, *arguments):
        if source.path == "pkg/a.py":
            raise IndexError("ours")
        return work(source, *arguments)

    monkeypatch.setattr(migration, "of_source", broken)

    a, b = _migrate("pkg/a.py", "pkg/b.py")

    assert a.problem == "jax-dist failed on it (IndexError: ours); please report this"
    assert not a.changed
    assert b.changed


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_three_times_as_many_take_three_times_as_long(package: pathlib.Path, to: str):
    seconds = []
    for number in (1000, 3000):
        lines = (f"f{i} = jax.pmap(lambda x: x + {i})\n" for i in range(number))
        (package / "a.py").write_text("import jax\n" + "".join(lines))
        begin = time.process_time()
        (found,) = _migrate("pkg/a.py", to=to)[:1]
        seconds.append(time.process_time() - begin)
        assert sum(place.status == "done" for place in found.outcomes) == number

    assert seconds[1] < 6 * seconds[0]  # 9 where each is compared with each


def test_progress_is_told(package: pathlib.Path):
    for name in ("a", "b", "c"):
        (package / f"{name}.py").write_text(_FLAT)
    (package / "d.py").touch()
    told: list[tuple[int, int]] = []

    _migrate(
        *(f"pkg/{name}.py" for name in "abcd"),
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(2, 4), (3, 4), (4, 4)]


def test_the_order_of_the_files_is_that_of_the_paths(package: pathlib.Path):
    (package / "constants.py").write_text(_CONSTANTS)
    for name in ("zeta", "alpha", "mid"):
        (package / f"{name}.py").write_text(_USER)
    paths = [f"pkg/{name}.py" for name in ("zeta", "constants", "alpha", "mid")]

    assert [file.path for file in _migrate(*paths)] == paths


# --- pmaps of other libraries

_EQUINOX = """\
import equinox as eqx
from equinox import filter_pmap


@eqx.filter_pmap(in_axes=(None, 0))
def step(model, x):
    return model(x)


run = filter_pmap(step)
"""


def test_filter_pmap_of_equinox(package: pathlib.Path):
    (package / "train.py").write_text(_EQUINOX)

    (found,) = _migrate("pkg/train.py")

    assert found.after.decode() == _EQUINOX.replace(
        "import equinox as eqx\nfrom equinox import filter_pmap\n", "import jax_dist\n"
    ).replace("eqx.filter_pmap", "filter_pmap").replace("filter_pmap", "jax_dist.filter_pmap")
    (left,) = _migrate("pkg/train.py", to="jax")
    assert [place.status for place in left.outcomes] == ["left", "left"]


_NNX = """\
import functools

from flax import nnx


@nnx.pmap(axis_name="batch", in_axes=(nnx.StateAxes({...: None}), 0))
def step(model, x):
    return model(x)


@functools.partial(nnx.pmap, axis_name="batch")
def other(model, x):
    return model(x)
"""


def test_pmap_of_nnx(package: pathlib.Path):
    (package / "train.py").write_text(_NNX)

    (found,) = _migrate("pkg/train.py")

    assert found.after.decode() == _NNX.replace("nnx.pmap", "jax_dist.nnx_pmap").replace(
        "from flax import nnx\n", "from flax import nnx\nimport jax_dist\n"
    )
    (left,) = _migrate("pkg/train.py", to="jax")
    assert [place.status for place in left.outcomes] == ["left", "left"]
    assert "nnx.shard_map" in left.outcomes[0].by_hand


@pytest.mark.parametrize("option", ["transform_metadata={}", "graph=False", "graph_updates=True"])
def test_pmap_of_nnx_is_left_with_what_only_it_takes(package: pathlib.Path, option: str):
    (package / "train.py").write_text(f"from flax import nnx\n\nstep = nnx.pmap(abs, {option})\n")

    (found,) = _migrate("pkg/train.py")

    assert not found.changed
    (place,) = found.outcomes
    assert (place.status, place.what) == ("left", "nnx.pmap")
    assert f"takes no {option.split('=')[0]}" in place.why


@pytest.fixture
def src(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A package in `src`, with tests beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "mine").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "src/mine/__init__.py"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
def test_a_name_that_tests_take_from_a_package_in_src_stays(src: pathlib.Path, to: str):
    (src / "src/mine/step.py").write_text("from jax import pmap\n\nf = pmap(abs)\n")
    (src / "tests/test_step.py").write_text("from mine.step import pmap\n\npmap(len)\n")

    found = _written(_migrate("src/mine/step.py", to=to))

    module = {"jax_dist": "jax_dist import pmap", "jax": "mine._mapped import mapped as pmap"}[to]
    assert found["src/mine/step.py"] == f"from {module}\n\nf = pmap(abs)\n"


def test_tests_of_a_package_in_src_use_its_module(src: pathlib.Path):
    (src / "src/mine/step.py").write_text("import jax\nimport mine.other\n\nf = jax.pmap(abs)\n")
    (src / "src/mine/other.py").write_text("size = 1\n")
    (src / "tests/test_step.py").write_text("import jax\nfrom mine import step\n\njax.pmap(abs)\n")

    found = _written(_migrate("src/mine/step.py", "tests/test_step.py", to="jax"))

    assert list(found) == ["src/mine/step.py", "tests/test_step.py", "src/mine/_mapped.py"]
    assert "from mine._mapped import mapped\n" in found["tests/test_step.py"]


@pytest.mark.parametrize(
    ("last", "is_script"),
    [("", False), ("print(f)\n", True), ("if __name__ == '__main__':\n    f(1)\n", True)],
)
def test_a_file_of_a_package_is_a_script_only_if_it_runs_something(
    package: pathlib.Path, last: str, *, is_script: bool
):
    (package / "sync.py").write_text(f"import jax\n\nf = jax.pmap(abs)\n{last}")
    (package / "models.py").write_text("from pkg import layers\n")
    (package / "layers.py").touch()

    found = _written(_migrate("pkg/sync.py", to="jax"))

    assert ("from pkg._mapped import mapped\n" not in found["pkg/sync.py"]) == is_script
    assert ("pkg/_mapped.py" not in found) == is_script


@pytest.mark.parametrize("last", ["", "print(f)\n"])
def test_a_folder_without_init_is_a_package_to_those_who_import_from_it(
    package: pathlib.Path, tmp_path: pathlib.Path, last: str
):
    (package / "__init__.py").unlink()
    (package / "sync.py").write_text(f"import jax\n\nf = jax.pmap(abs)\n{last}")
    (tmp_path / "train.py").write_text("from pkg.sync import f\n\nf(1)\n")

    found = _written(_migrate("pkg/sync.py", "train.py", to="jax"))

    assert ("from pkg._mapped import mapped\n" in found["pkg/sync.py"]) == (not last)


@pytest.mark.parametrize(
    ("other", "to", "status"),
    [
        ("from pkg.sync import f\n", "jax", "left"),
        ("from pkg.sync import f\n", "jax_dist", "done"),
        ("import pkg\n", "jax", "done"),  # nobody takes the function from its file
    ],
)
def test_what_a_package_may_ask_for_its_type_stays(
    package: pathlib.Path, other: str, to: str, status: str
):
    (package / "asks.py").write_text("def is_mapped(f):\n    return 'PmapFunction' in str(f)\n")
    (package / "sync.py").write_text("import jax\nfrom pkg import asks\n\nf = jax.pmap(abs)\n")
    (package / "user.py").write_text(other)
    options = MigrationOptions(to=to)  # type: ignore[arg-type]

    made, context = migration.migrate(["pkg/sync.py"], options)

    (said,) = _said(made[0])
    assert said[0] == status
    assert status == "done" or said[1].startswith("the package knows functions of jax.pmap by")
    assert status == "done" or said[2] == "pkg/asks.py:2"
    cautions = [each for each in report.cautions_of(made, context, options) if "asks.py" in each]
    assert len(cautions) == (to == "jax" and status == "done")


@pytest.mark.parametrize("home", ["jax.experimental.maps", "jax.interpreters.pxla", "jax.sharding"])
def test_a_script_may_have_a_name_of_the_helpers_from_where_it_was_once(
    tmp_path: pathlib.Path, package: pathlib.Path, home: str
):
    (tmp_path / "lone.py").write_text(
        f"import jax\nfrom {home} import Mesh\n\nf = jax.pmap(Mesh)\n"
    )

    (found,) = _migrate("lone.py", to="jax")

    assert [place.status for place in found.outcomes if place.code == "JXD001"] == ["done"]
    assert found.after.count(b"import Mesh") == 1
    (tmp_path / "lone.py").write_bytes(found.after)
    assert not any(each.changed for each in _migrate("lone.py", to="jax"))
