"""Names of other files: how far up a project reaches."""

import pathlib

import pytest

from jax_dist.lint.engine.linter import RULES, Examiner
from jax_dist.lint.model.project import Project


@pytest.mark.parametrize(
    ("mark", "given", "sees"),
    [
        (None, ".", True),
        (".git", "inner", False),  # nothing above the folder that is given
        ("inner/__init__.py", "inner", False),
        (".git", "inner/user.py", True),  # of a file, the project around it
        (None, "inner/user.py", False),
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
