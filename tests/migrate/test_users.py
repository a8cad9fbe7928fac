"""Who may use a name of a file though no Python file of its project says so."""

import pathlib

import pytest

from jax_dist.lint.engine.linter import load
from jax_dist.lint.model.project import Project
from jax_dist.migrate import imports

_USERS = {
    "eval.sh": "python - <<X\nimport train\nprint(train.fit(2))\nX\n",
    "Makefile": "eval:\n\tpython -c 'from train import fit; print(fit(2))'\n",
    "bin/evaluate": "#!/usr/bin/env python\nimport os, train as t\nprint(t.fit(2))\n",
    "conf/run.yaml": "_target_: train.fit\n",
    "conf/run.json": '{"target": "train:fit"}',
    "README.md": "    from pkg.train import fit\n",
    ".github/workflows/ci.yml": "- run: python -c 'import train; train.fit(2)'\n",
    "report.qmd": "```{python}\nfrom train import fit\n```\n",
    "run.bat": 'python -c "import train; train.fit(2)"\r\n',
    "runs.csv": "2,train.fit\n",
}
_OTHERS = {
    "eval.sh": "python train.py --fit 2\n",
    "README.md": "What you import, such as the fit, comes from a train of thought.\n",
    "bin/evaluate": "#!/usr/bin/env python\nimport training\nprint(training.fit(2))\n",
    "conf/run.yaml": "train: fit\nmodel: train.fitting\n",
    "other.sh": "python -c 'import train; train.outfit()'\n",
}


@pytest.mark.parametrize("is_project", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "uses"),
    [(*each, True) for each in _USERS.items()] + [(*each, False) for each in _OTHERS.items()],
)
def test_what_is_no_python_by_its_name(
    tmp_path: pathlib.Path, name: str, text: str, *, uses: bool, is_project: bool
):
    if is_project:
        (tmp_path / "pyproject.toml").touch()
    path = tmp_path / "train.py"
    path.write_text("def fit(n):\n    return n\n")
    by = tmp_path / name
    if not is_project and name.startswith("."):
        pytest.skip("folders that are hidden are looked at in projects alone")
    by.parent.mkdir(exist_ok=True, parents=True)
    by.write_text(text)
    module = Project([str(path)]).module(load(str(path), path.read_bytes()))

    assert imports.is_used_elsewhere(module, "fit") == uses


def test_a_package_goes_by_the_name_of_its_folder(tmp_path: pathlib.Path):
    (tmp_path / "pyproject.toml").touch()
    path = tmp_path / "train" / "__init__.py"
    path.parent.mkdir()
    path.write_text("def fit(n):\n    return n\n")
    (tmp_path / "eval.sh").write_text(_USERS["eval.sh"])
    module = Project([str(path)]).module(load(str(path), path.read_bytes()))

    assert imports.is_used_elsewhere(module, "fit")
    assert not imports.is_used_elsewhere(module, "module")
