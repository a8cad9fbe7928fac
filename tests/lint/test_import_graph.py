"""Who may use a name of another file of the project: too many files rather than too few."""

import json
import os
import pathlib

import pytest

from jax_dist.lint.model.project import Project

_USERS = {
    "by_name": "from util import mapped\n",
    "by_star": "from util import *\n",
    "by_attribute": "import util as u\n\nu.mapped()\n",
    "by_string": "import util\n\ngetattr(util, 'mapped')\n",
    "by_a_name_of_the_run": "import sys\nimport util as u\n\ngetattr(u, sys.argv[1])\n",
    "by_a_module_of_the_run": "import importlib\n\nimportlib.import_module('util').mapped()\n",
    "as_a_value": "import util as u\nfrom fire import Fire\n\nFire(u)\n",
    "in_a_mock": "patch('util.mapped')\n",
    "as_an_entry_point": "setup(entry_points={'scripts': ['go=util:mapped']})\n",
    "by_its_path": "exec(open('util.py').read())\nmapped()\n",
    "not_to_be_parsed": "util (mapped\n",
}
_OTHERS = {
    "of_another_name": "from util import other\n",
    "of_another_attribute": "import util\n\nutil.other()\n",
    "by_a_name_of_another": "import os, sys, util\n\ngetattr(os, sys.argv[1])\n",
    "another_module_of_the_run": "import importlib\n\nimportlib.import_module('u').mapped()\n",
    "words_apart": "'util', 'mapped'\n",
    "of_a_constant_name": "import util\n\ngetattr(util, 'other')\n",
    "a_function_of_its_name": "from util import util\n\nutil(1)\n",
    "by_the_path_of_another": "exec(open('u.py').read())\nmapped()  # util\n",
    "not_to_be_parsed_without_the_name": "util (\n",
    "not_to_be_parsed_without_the_file": "mapped (\n",
}

_FROM_RUN = "import importlib as i, sys\n\nmodule = i.import_module(sys.argv[1])\n"
_OF_PACKAGE = "from importlib import import_module\n\n"
_LOADERS = [  # a file that imports what only the run knows; another one; whether this means it
    (_FROM_RUN, "def test(module):\n    module.mapped()\n", True),
    (_FROM_RUN, "def test(module):\n    module.other()\n", False),
    (f"{_FROM_RUN}getattr(module, sys.argv[2])()\n", "", True),
    (f"{_FROM_RUN}getattr(sys, sys.argv[2])()\n", "", False),
    (
        f"{_OF_PACKAGE}def __getattr__(n):\n    return getattr(import_module('.' + n), n)\n",
        "",
        True,
    ),
    (f"{_OF_PACKAGE}import_module('models.' + name)\n", "module.mapped()\n", False),
    (f"{_OF_PACKAGE}import_module(f'util{{name}}')\n", "module.mapped()\n", True),
]


@pytest.fixture
def users(tmp_path: pathlib.Path) -> set[str]:
    (tmp_path / "pyproject.toml").touch()
    own = {"util": "mapped = 1\nname = 'util.mapped'\n"}
    for name, text in (own | _USERS | _OTHERS).items():
        (tmp_path / f"{name}.py").write_text(text)
    path = str(tmp_path / "util.py")
    return {pathlib.Path(user).stem for user in Project([path]).graph.users(path, "mapped")}


def test_all_that_may_mean_a_name_are_users(users: set[str]):
    assert users == set(_USERS)


@pytest.mark.parametrize(("loader", "other", "is_user"), _LOADERS)
def test_what_only_the_run_knows_may_be_any_module(
    tmp_path: pathlib.Path, loader: str, other: str, *, is_user: bool
):
    texts = {"pyproject.toml": "", "util.py": "mapped = 1\n", "load.py": loader, "test.py": other}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    path = str(tmp_path / "util.py")

    assert any(True for _ in Project([path]).graph.loaders(path, "mapped")) == is_user

    (tmp_path / "tools").mkdir()
    (tmp_path / "load.py").rename(tmp_path / "tools" / "load.py")
    assert not any(True for _ in Project([path]).graph.loaders(path, "mapped"))


@pytest.mark.parametrize(
    ("below", "user"),
    [
        ("", "beside.py"),
        ("", "notebook.ipynb"),
        ("src", "../tests/test_util.py"),
        ("src", "../script.py"),
        ("src", "beside.py"),
    ],
)
def test_what_lies_beside_a_lone_script_may_use_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, below: str, user: str
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / below / "util.py"
    by = path.parent / user
    for each in (path, by):
        each.parent.mkdir(exist_ok=True)
    path.write_text("mapped = 1\n")
    text = "import util as u\nu.mapped\n"
    cell = {"cell_type": "code", "metadata": {}, "source": text}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    by.write_text(json.dumps(notebook) if user.endswith(".ipynb") else text)

    found = Project([str(path)]).graph.users(str(path), "mapped")
    assert [*map(os.path.realpath, found)] == [os.path.realpath(by)]


def test_of_the_folder_of_all_temporary_files_only_its_own_are_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "src").mkdir()
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "src" / "pipe.py")
    for name in ("src/util.py", "src/beside.py", "other/more.py", "more.py"):
        (tmp_path / name).touch()

    found = Project(["src/util.py"]).graph.files
    assert [*map(os.path.basename, found)] == ["beside.py", "util.py"]
