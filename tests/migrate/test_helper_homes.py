"""Where the helpers of migrated files are: in a module, beside scripts, or inside."""

import gc
import pathlib
import weakref

import pytest
from migrated import migrate, said, written

from jax_dist.migrate import helper_module, migration, report
from jax_dist.migrate.migration import MigrationOptions

_FLAT = "import jax\n\nf = jax.pmap(abs)\n"


def test_a_package_gets_one_module(package: pathlib.Path):
    (package / "inner").mkdir()
    (package / "inner" / "__init__.py").touch()
    (package / "a.py").write_text("import jax\nimport pkg.inner.b\n\nf = jax.pmap(abs)\n")
    (package / "inner" / "b.py").write_text("import jax\nfrom .. import c\n\nf = jax.pmap(abs)\n")
    (package / "c.py").write_text("import os\n")

    found = written(migrate("pkg/a.py", "pkg/inner/b.py", to="jax"))

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

    found = written(migrate("pkg/train.py", "pkg/model.py", to="jax"))

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

    found = written(migrate("pkg/sync.py", "pkg/inner/train.py", "main.py", to="jax"))

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

    found = written(migrate(f"pkg/baseline/{called}/train.py", to="jax"))

    assert list(found) == [f"pkg/baseline/{called}/train.py", "pkg/_mapped.py"]
    assert "\nfrom pkg._mapped import mapped\n" in found[f"pkg/baseline/{called}/train.py"]


def test_a_package_may_lack_a_module_that_its_file_imports(package: pathlib.Path):
    (package / "other.py").write_text("size = 1\n")
    text = "import jax\nfrom pkg import other\nfrom pkg.made import table_pb2\n\n"
    (package / "train.py").write_text(f"{text}f = jax.pmap(abs)\n")

    found = written(migrate("pkg/train.py", to="jax"))

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

    found = written(migrate(name, "pkg/train.py", to="jax"))

    assert list(found) == [name, "pkg/_mapped.py"]
    assert found[name].startswith("from pkg._mapped import mapped\n")


def test_a_package_may_have_another_name_than_its_checkout(package: pathlib.Path):
    _checkout(package)

    found = written(migrate("pkg/train.py", to="jax"))
    chosen = written(migrate("pkg/train.py", to="jax", helpers="pkg/parallel.py"))

    assert list(found) == ["pkg/train.py", "pkg/_mapped.py"]
    assert "from mine._mapped import mapped\n" in found["pkg/train.py"]
    assert "from mine.parallel import mapped\n" in chosen["pkg/train.py"]


@pytest.mark.parametrize("other", ["from mine import elsewhere\n", "import mine.data.more\n"])
def test_another_package_is_not_taken_for_the_checkout(package: pathlib.Path, other: str):
    """What is imported as `mine` has a module that is not here."""
    _checkout(package)
    (package / "more.py").write_text(other)

    found = written(migrate("pkg/train.py", to="jax"))

    assert list(found) == ["pkg/train.py"]


_SCRIPT = _FLAT + "\nif __name__ == '__main__':\n    print(f)\n"


def test_a_script_that_is_run_by_its_path_gets_a_module_beside_it(package: pathlib.Path):
    script = package.parent / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(_SCRIPT)

    found = written(migrate("scripts/train.py", to="jax"))

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

    found = written(migrate("scripts/train.py", to="jax"))

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

    found = written(migrate("lone.py", to="jax"))

    assert list(found) == ["lone.py"]
    assert "\ndef mapped(\n" in found["lone.py"]
    added = found["lone.py"].count("\n") - text.count("\n")
    assert added <= 60


def test_two_scripts_share_a_module_with_the_parts_of_both(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))

    found = written(migrate("a.py", "b.py", to="jax"))

    assert list(found) == ["a.py", "b.py", "_mapped.py"]
    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes"}


def test_a_module_gets_the_parts_that_later_files_need(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))
    for file in migrate("a.py", to="jax"):
        pathlib.Path(file.path).write_bytes(file.after)
    first = (package.parent / "_mapped.py").read_text()

    found = written(migrate("b.py", to="jax"))

    assert helper_module.present_in(first) == {"mapped"}
    assert list(found) == ["b.py", "_mapped.py"]
    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes"}


def test_a_module_that_was_changed_by_hand_does_not_get_parts(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "max, in_axes=(None, 0)"))
    _, module = migrate("a.py", to="jax")
    (package.parent / "_mapped.py").write_bytes(module.after.replace(b"Each array", b"All arrays"))

    (lacks,) = migrate("b.py", to="jax")

    assert not lacks.changed
    assert lacks.outcomes[0].why == (
        "the module for its helpers was changed by hand, and lacks some of them (_mapped.py: axes)"
    )


def test_files_with_devices_and_without_may_get_arrays_of_each_other(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)
    (package.parent / "b.py").write_text(_SCRIPT.replace("abs", "abs, devices=jax.devices()[:2]"))

    found = written(migrate("a.py", "b.py", to="jax"))

    assert helper_module.present_in(found["_mapped.py"]) == {"mapped", "axes", "devices"}


def test_modules_of_one_name_in_one_run_are_alike(package: pathlib.Path):
    """In one process, the second script would get the module of the first."""
    for name, options in (("one", ""), ("two", ", in_axes=(None, 0)")):
        folder = package.parent / name
        folder.mkdir()
        (folder / "train.py").write_text(_SCRIPT.replace("abs", f"max{options}"))

    found = written(migrate("one/train.py", "two/train.py", to="jax"))

    assert found["one/_mapped.py"] == found["two/_mapped.py"]
    mine = found["one/_mapped.py"].replace("An axis", "The axis")
    (package.parent / "one" / "_mapped.py").write_text(mine)  # one that is changed by hand stays
    again = written(migrate("one/train.py", "two/train.py", to="jax"))
    assert list(again) == ["one/train.py", "two/train.py", "two/_mapped.py"]


def test_a_package_of_scripts_shares_their_module(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").touch()
    (package.parent / "train.py").write_text("import jax\nfrom pkg import a\n\nf = jax.pmap(a.f)\n")
    (package.parent / "model.py").write_text("import jax\nimport train\n\nf = jax.pmap(abs)\n")
    paths = ("pkg/a.py", "train.py", "model.py")

    together = list(written(migrate(*paths, to="jax")))
    (package.parent / "setup.py").touch()
    installed = list(written(migrate(*paths, to="jax")))

    assert together == [*paths, "_mapped.py"]
    assert "pkg/_mapped.py" in installed


def test_the_whole_contract_is_what_the_user_may_ask_for(package: pathlib.Path):
    (package.parent / "a.py").write_text(_SCRIPT)

    found = written(migrate("a.py", to="jax", full_helpers=True))

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

    together = written(migrate("script.py", "pkg/a.py", to="jax"))
    alone = written(migrate("script.py", to="jax"))

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

    found = written(migrate(str(script), str(folder / "a.py"), to="jax"))
    script.write_text(text.replace("flax.training", "flax.b"))
    other = written(migrate(str(script), str(folder / "a.py"), to="jax"))

    assert "flax._mapped" not in found[str(script)]
    assert "from flax._mapped import mapped\n" in other[str(script)]


def test_tests_use_the_module_of_what_they_test(tmp_path: pathlib.Path, package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").touch()
    tests = package / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_a.py").write_text("import jax\nfrom pkg import a\n\nf = jax.pmap(abs)\n")

    found = written(migrate("pkg/tests/test_a.py", "pkg/a.py", to="jax"))

    assert list(found) == ["pkg/tests/test_a.py", "pkg/a.py", "pkg/_mapped.py"]
    assert "from pkg._mapped import mapped\n" in found["pkg/tests/test_a.py"]


def test_a_module_of_the_users_choice(tmp_path: pathlib.Path, package: pathlib.Path):
    (tmp_path / "lone.py").write_text(_FLAT)
    (package / "a.py").write_text(_FLAT)

    found = written(migrate("lone.py", "pkg/a.py", to="jax", helpers="pkg/parallel.py"))

    assert list(found) == ["lone.py", "pkg/a.py", "pkg/parallel.py"]
    assert found["lone.py"] == found["pkg/a.py"]
    assert found["lone.py"] == "from pkg.parallel import mapped\n\nf = mapped(abs)\n"


def test_a_file_of_the_project_with_the_name_is_not_overwritten(package: pathlib.Path):
    (package / "_mapped.py").write_text("mine = 1\n")
    (package / "a.py").write_text("import jax\nfrom ._mapped import mine\n\nf = jax.pmap(abs)\n")

    found = written(migrate("pkg/a.py", to="jax"))

    assert list(found) == ["pkg/a.py", "pkg/_mapped_devices.py"]
    assert "from ._mapped_devices import mapped\n" in found["pkg/a.py"]


def test_a_module_gets_what_later_files_need(package: pathlib.Path):
    (package / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(abs)\n")
    (package / "b.py").write_text(
        "import jax\nfrom . import c\n\nx = jax.device_put_sharded([1], jax.devices()[:1])\n"
    )
    (package / "c.py").touch()
    for file in migrate("pkg/a.py", to="jax"):
        pathlib.Path(file.path).write_bytes(file.after)
    module = (package / "_mapped.py").read_text()

    found = written(migrate("pkg/b.py", to="jax"))

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
    a, module = migrate("pkg/a.py", to="jax")
    (package / "_mapped.py").write_bytes(module.after.replace(b"Each array", b"Every array"))

    fits = migrate("pkg/a.py", to="jax")
    (lacks,) = migrate("pkg/b.py", to="jax")

    assert written(fits) == {"pkg/a.py": a.after.decode()}
    assert not lacks.changed
    assert said(lacks) == [
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

    _, module = migrate("pkg/a.py", to="jax")

    assert b"\n  def program(" in module.after
    compile(module.after, "_mapped.py", "exec")


def test_tests_of_a_package_in_src_use_its_module(src: pathlib.Path):
    (src / "src/mine/step.py").write_text("import jax\nimport mine.other\n\nf = jax.pmap(abs)\n")
    (src / "src/mine/other.py").write_text("size = 1\n")
    (src / "tests/test_step.py").write_text("import jax\nfrom mine import step\n\njax.pmap(abs)\n")

    found = written(migrate("src/mine/step.py", "tests/test_step.py", to="jax"))

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

    found = written(migrate("pkg/sync.py", to="jax"))

    assert ("from pkg._mapped import mapped\n" not in found["pkg/sync.py"]) == is_script
    assert ("pkg/_mapped.py" not in found) == is_script


@pytest.mark.parametrize("last", ["", "print(f)\n"])
def test_a_folder_without_init_is_a_package_to_those_who_import_from_it(
    package: pathlib.Path, tmp_path: pathlib.Path, last: str
):
    (package / "__init__.py").unlink()
    (package / "sync.py").write_text(f"import jax\n\nf = jax.pmap(abs)\n{last}")
    (tmp_path / "train.py").write_text("from pkg.sync import f\n\nf(1)\n")

    found = written(migrate("pkg/sync.py", "train.py", to="jax"))

    assert ("from pkg._mapped import mapped\n" in found["pkg/sync.py"]) == (not last)


@pytest.mark.parametrize("home", ["jax.experimental.maps", "jax.interpreters.pxla", "jax.sharding"])
def test_a_script_may_have_a_name_of_the_helpers_from_where_it_was_once(
    tmp_path: pathlib.Path, package: pathlib.Path, home: str
):
    (tmp_path / "lone.py").write_text(
        f"import jax\nfrom {home} import Mesh\n\nf = jax.pmap(Mesh)\n"
    )

    (found,) = migrate("lone.py", to="jax")

    assert [place.status for place in found.outcomes if place.code == "JXD001"] == ["done"]
    assert found.after.count(b"import Mesh") == 1
    (tmp_path / "lone.py").write_bytes(found.after)
    assert not any(each.changed for each in migrate("lone.py", to="jax"))
