"""Other files that read the names of a file, as its caller."""

import pathlib

import pytest

from jax_dist.lint.engine.linter import load
from jax_dist.lint.model.project import Project
from jax_dist.migrate.device_axis import unrun


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("import inspect\nfind = lambda: inspect.stack()[1].frame.f_globals\n", True),
        ("import sys\nfind = lambda: vars(sys.modules['__main__'])\n", True),
        ("import sys\nfind = lambda: sys.modules[__name__]\n", False),
    ],
)
def test_a_file_that_it_imports(tmp_path: pathlib.Path, text: str, *, reads: bool):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "lines.py").write_text(text)
    (tmp_path / "other.py").write_text("import sys\nsys._getframe(1)\n")
    path = tmp_path / "train.py"
    path.write_text("import lines\n")
    module = Project([str(path)]).module(load(str(path), path.read_bytes()))

    assert ("lines.py reads" in unrun._reader(module)) is reads
