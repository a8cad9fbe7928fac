"""Names of other files: how far up a project reaches."""

import pathlib

import pytest

from jax_dist.lint.engine.linter import RULES, Examiner
from jax_dist.lint.model.project import Project


@pytest.mark.parametrize(
    ("mark", "given", "sees"),
    [
        (None, "inner", False),  # without a mark, the folder that is given
        (None, ".", True),
        (".git", "inner", True),
        ("inner/.git", "inner", False),
        ("inner/__init__.py", "inner", True),  # the folder that holds the package
    ],
)
def test_the_root_of_a_project(tmp_path: pathlib.Path, mark, given, sees):
    (tmp_path / "inner").mkdir()
    (tmp_path / "compat.py").write_text("import jax\nmapped = jax.pmap\n")
    user = tmp_path / "inner" / "user.py"
    user.write_text("import jax\nfrom compat import mapped\nf = mapped(g)  # a pmap\n")
    if mark is not None:
        (tmp_path / mark).touch()

    examiner = Examiner(frozenset(RULES), Project([str(tmp_path / given)]))

    findings = examiner.examine(str(user), user.read_bytes())
    assert [finding.code for finding in findings] == ["JXD001"] * sees
