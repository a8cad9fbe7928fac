"""Who may use a name of another file of the project: too many files rather than too few."""

import pathlib

import pytest

from jax_dist.checker.model.project import Project

_USERS = {
    "by_name": "from util import mapped\n",
    "by_star": "from util import *\n",
    "by_attribute": "import util as u\n\nu.mapped()\n",
    "by_string": "import util\n\ngetattr(util, 'mapped')\n",
    "in_a_mock": "patch('util.mapped')\n",
    "not_to_be_parsed": "util (mapped\n",
}
_OTHERS = {
    "of_another_name": "from util import other\n",
    "of_another_attribute": "import util\n\nutil.other()\n",
    "words_apart": "'util', 'mapped'\n",
    "not_to_be_parsed_without_the_name": "util (\n",
    "not_to_be_parsed_without_the_file": "mapped (\n",
}


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
