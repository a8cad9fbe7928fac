"""Settings, the rules that they leave on, and the jax that a project requires."""

import os
import pathlib

import pytest

from jax_dist._usage import MisuseError
from jax_dist.lint.engine import config
from jax_dist.lint.engine.config import Choice
from jax_dist.lint.engine.linter import RULES

_RULES = RULES.values()
_OFF = {"JXD405"}


@pytest.fixture(autouse=True)
def project(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "a").mkdir(parents=True)
    return tmp_path


def test_all_settings(project):
    (project / "pyproject.toml").write_text(
        "[tool.jax-dist]\n"
        'select = ["JXD1"]\nextend-select = ["pmap-call"]\nignore = ["JXD105"]\n'
        'exclude = ["gen"]\nper-file-ignores = { "tests/*" = ["JXD1"] }\ntarget-jax = "0.7.2"\n'
    )

    read = config.load(["src"])

    assert read.file == str(project / "pyproject.toml")
    assert (read.select, read.extend_select) == (("JXD1",), ("pmap-call",))
    assert read.ignore == ("JXD105",)
    assert read.excluded.texts[-1] == "gen"
    assert ".git" in read.excluded.texts
    assert read.per_file_ignores == (("tests/*", ("JXD1",)),)
    assert read.target_jax == (0, 7, 2)


_A = '[tool.jax-dist]\nignore = ["A"]'


@pytest.mark.parametrize(
    ("files", "paths", "ignore"),
    [
        ({"pyproject.toml": _A}, ["src"], ("A",)),
        ({"pyproject.toml": _A, "src/pyproject.toml": "[tool.ruff]"}, ["src"], ("A",)),
        ({"src/a/pyproject.toml": _A}, ["src/a"], ("A",)),
        ({"src/a/pyproject.toml": _A}, ["src/a", "src"], ()),
    ],
)
def test_the_nearest_file_above_all_paths_counts(files, paths, ignore):
    for name, text in files.items():
        pathlib.Path(name).write_text(text)

    assert config.load(paths).ignore == ignore


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selct = []", "s.toml: there is no setting 'selct'. Did you mean select?"),
        ('select = "J"', "s.toml: select: must be a list of strings, such as [\"JXD1\"], not 'J'"),
        (
            "per-file-ignores = true",
            's.toml: per-file-ignores: must be a table, such as {"tests/*" = ["JXD1"]}, not True',
        ),
        ("target-jax = 0.7", "s.toml: target-jax: 0.7 is not a version of jax, such as '0.7.2'"),
        ("a = [", "s.toml: is not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(text, message):
    pathlib.Path("s.toml").write_text(f"[tool.jax-dist]\n{text}\n")

    with pytest.raises(MisuseError) as caught:
        config.load(["src"], "s.toml")

    assert str(caught.value) == message


def test_only_a_regular_file_with_our_table_can_be_asked_for():
    os.mkfifo("pipe")
    pathlib.Path("pyproject.toml").write_text("[project]\n")
    for name, reason in (
        ("nothing.toml", "cannot be read: No such file or directory"),
        ("pipe", "cannot be read: it is not a regular file"),
        ("pyproject.toml", "has no [tool.jax-dist]"),
    ):
        with pytest.raises(MisuseError) as caught:
            config.load(["src"], name)
        assert str(caught.value) == f"{name}: {reason}"


@pytest.mark.parametrize(
    ("choices", "on"),
    [
        ([], set(RULES) - _OFF),
        ([Choice(extend_select=("JXD405",))], set(RULES)),
        ([Choice(select=("ALL",))], set(RULES)),
        ([Choice(select=("JXD00",), ignore=("JXD001",))], {"JXD002", "JXD901"}),
        ([Choice(select=("jxd101",), ignore=("JXD1",))], {"JXD101", "JXD901"}),
        ([Choice(select=("JXD1",)), Choice(select=("JXD002",))], {"JXD002", "JXD901"}),
        ([Choice(ignore=("JXD101",)), Choice(extend_select=("JXD1",))], set(RULES) - _OFF),
        ([Choice(select=("pmap-call",), ignore=("pmap-call",))], {"JXD901"}),
        ([Choice(select=("JXD0",), ignore=("JXD0", "JXD9"))], set()),
    ],
)
def test_rules_that_are_left_on(choices, on):
    assert config.select_rules(choices, _RULES) == on


def test_a_selector_that_names_no_rule():
    with pytest.raises(MisuseError, match="^no rule is called 'JXD109'. Did you mean JXD10"):
        config.select_rules([Choice(select=("JXD109",))], _RULES)
    with pytest.raises(MisuseError, match="^select names no rule"):  # an empty variable of CI
        config.select_rules([Choice(select=())], _RULES)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "jax>=0.4.30,<0.7"]', (0, 4, 30)),
        ("pyproject.toml", '[project]\ndependencies = ["jax[cuda12] ~= 0.5"]', (0, 5)),
        ("pyproject.toml", '[project]\ndependencies = ["jax (>=0.6.1)"]', (0, 6, 1)),
        ("pyproject.toml", '[project]\ndependencies = ["jax==0.7.*"]', (0, 7)),
        ("pyproject.toml", '[project]\ndependencies = ["jax<0.7", "jaxlib>=0.4"]', None),
        ("pyproject.toml", '[project]\ndependencies = ["jax-md>=9", "jaxtyping>=8"]', None),
        ("pyproject.toml", '[tool.poetry.dependencies]\njax = "^0.4.20"', (0, 4, 20)),
        ("pyproject.toml", '[tool.poetry.dependencies]\njax = {version=">=0.4"}', (0, 4)),
        ("pyproject.toml", "[project]\ndependencies = ['jax>=0.7; a', 'jax>=0.4']", (0, 4)),
        ("requirements.txt", "numpy\njax>=0.4.1  # newest\n", (0, 4, 1)),
        ("requirements.txt", "jax @ git+https://github.com/jax-ml/jax@v0.7.2\n", None),
        ("setup.cfg", "[options]\ninstall_requires =\n    numpy\n    jax>=0.5.0\n", (0, 5, 0)),
        ("setup.py", 'setup(install_requires=["jax>=0.3.4"], url=f"{x}")', (0, 3, 4)),
    ],
)
def test_the_target_is_the_jax_that_a_project_requires(project, file, text, version):
    (project / file).write_text(text)
    (project / ".git").mkdir()

    assert config.load(["src"]).target_jax == version


@pytest.mark.parametrize("text", ["0.7.2", " v0.7.2", "0.7.2.dev20250101", "0.7.2rc1", "0.7.2+cu"])
def test_versions(text):
    assert config.version(text) == (0, 7, 2)
