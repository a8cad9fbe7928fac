"""Settings, the rules that they leave on, and the jax that a project requires."""

import pathlib
import textwrap

import pytest
import word_rules

from jax_dist._usage import MisuseError
from jax_dist.lint.engine import config
from jax_dist.lint.engine.config import Choice


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    return tmp_path


def _pyproject(project: pathlib.Path, text: str) -> None:
    (project / "pyproject.toml").write_text(textwrap.dedent(text))


def test_all_settings(project):
    _pyproject(
        project,
        """\
        [tool.jax-dist]
        select = ["JXD1"]
        extend-select = ["perhaps"]
        ignore = ["JXD104"]
        exclude = ["gen"]
        extend-exclude = ["third_party"]
        per-file-ignores = { "tests/*" = ["JXD1"] }
        target-jax = "0.7.2"
        project-roots = ["src"]
        baseline = "known.json"
        """,
    )

    read = config.load(["src"])

    assert read.file == str(project / "pyproject.toml")
    assert read.choice == Choice(("JXD1",), ("perhaps",), ("JXD104",))
    assert read.excluded.texts == ("gen", "third_party")
    assert read.per_file_ignores == (("tests/*", ("JXD1",)),)
    assert read.target_jax == (0, 7, 2)
    assert read.project_roots == (str(project / "src"),)
    assert read.baseline == str(project / "known.json")


def test_our_own_file_needs_no_heading_and_goes_first(project):
    _pyproject(project, '[tool.jax-dist]\nignore = ["JXD1"]\n')
    (project / "jax-dist.toml").write_text('ignore = ["JXD2"]\n')

    assert config.load(["src"]).ignore == ("JXD2",)


def test_a_pyproject_without_our_heading_is_passed_over(project):
    _pyproject(project, '[tool.jax-dist]\nignore = ["JXD1"]\n')
    (project / "src" / "pyproject.toml").write_text("[tool.ruff]\n")

    assert config.load(["src"]).ignore == ("JXD1",)


def test_the_file_above_all_paths_counts(project):
    (project / "src" / "a").mkdir()
    (project / "src" / "a" / "jax-dist.toml").write_text('ignore = ["JXD1"]\n')

    assert config.load(["src/a"]).ignore == ("JXD1",)
    assert config.load(["src/a", "src"]).ignore == ()


@pytest.mark.parametrize(
    ("heading", "said"),
    [
        ("tool.jax_dist", "tool.jax_dist"),
        ("tool.jaxdist", "tool.jaxdist"),
        ("tool.jax_dist.lint", "tool.jax_dist"),
        ("jax-dist", "jax-dist"),
    ],
)
def test_a_table_of_another_name_is_named(project, heading: str, said: str):
    _pyproject(project, f'[{heading}]\nignore = ["JXD1"]\n')

    with pytest.raises(MisuseError) as caught:
        config.load(["src"])

    assert str(caught.value).endswith(
        f"pyproject.toml: [{said}] is not read; the table is [tool.jax-dist]"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "selct = []",
            "settings.toml: there is no setting 'selct'. Did you mean select?",
        ),
        (
            'select = "JXD1"',
            """settings.toml: select: must be a list of strings, such as ["JXD1"], not 'JXD1'""",
        ),
        (
            "ignore = [1]",
            'settings.toml: ignore: must be a list of strings, such as ["JXD1"], not [1]',
        ),
        (
            "per-file-ignores = true",
            "settings.toml: per-file-ignores: must be a table, such as "
            '{"tests/*" = ["JXD1"]}, not true',
        ),
        (
            "target-jax = 0.7",
            'settings.toml: target-jax: must be a version in quotes, such as "0.7.2", not 0.7',
        ),
        (
            'target-jax = "newest"',
            "settings.toml: target-jax: 'newest' is not a version of jax, such as 0.7.2",
        ),
        (
            'ignore = ["JXD777"]',
            "settings.toml: ignore: no rule is called 'JXD777'. Did you mean JXD107?",
        ),
        (
            'ignore = ["oldens"]',
            "settings.toml: ignore: no rule is called 'oldens'. Did you mean olden?",
        ),
        (
            'per-file-ignores = { "a.py" = ["x"] }',
            "settings.toml: per-file-ignores.\"a.py\": no rule is called 'x'. "
            "`jax-dist rule --all` lists the rules.",
        ),
        (
            "a = [",
            "settings.toml: is not TOML: Invalid value (at end of document)",
        ),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_cannot_be_followed_is_named(text, message):
    pathlib.Path("settings.toml").write_text(text + "\n")

    with pytest.raises(MisuseError) as caught:
        config.load(["src"], "settings.toml").check_codes(word_rules.PAGES)

    assert str(caught.value) == message


@pytest.mark.usefixtures("project")
def test_a_file_that_is_asked_for_must_be_there():
    with pytest.raises(MisuseError) as caught:
        config.load(["src"], "nothing.toml")

    assert str(caught.value) == "nothing.toml: cannot be read: No such file or directory"


def test_a_pyproject_that_is_asked_for_must_have_our_heading(project):
    _pyproject(project, "[project]\n")

    with pytest.raises(MisuseError) as caught:
        config.load(["src"], "pyproject.toml")

    assert str(caught.value) == (
        "pyproject.toml: has no [tool.jax-dist]; without it nothing is set there"
    )


@pytest.mark.parametrize(
    ("choices", "on"),
    [
        ([], "101 102 103 104 105 106 107 108 900 901 902"),
        ([Choice(extend_select=("perhaps",))], "101 102 103 104 105 106 107 108 201 900 901 902"),
        ([Choice(select=("JXD10",), ignore=("JXD101", "JXD107"))], "102 103 104 105 106 108 901"),
        ([Choice(select=("jxd101",), ignore=("JXD1",))], "101 901"),
        ([Choice(select=("JXD1",)), Choice(select=("JXD2",))], "201 901"),
        ([Choice(ignore=("JXD101",)), Choice(extend_select=("JXD1",))], "101 102 103 104 105 "
         "106 107 108 900 901 902"),
        ([Choice(select=("ALL",), ignore=("JXD1", "JXD9"))], "201"),
        ([Choice(select=("olden",), ignore=("olden",))], "901"),
    ],
)  # fmt: skip
def test_rules_that_are_left_on(choices, on):
    codes = config.selected(choices, word_rules.PAGES)

    assert " ".join(sorted(code.removeprefix("JXD") for code in codes)) == on


def test_a_selector_that_means_nothing_is_misuse():
    with pytest.raises(MisuseError, match="^no rule is called 'JXD109'. Did you mean JXD10"):
        config.selected([Choice(select=("JXD109",))], word_rules.PAGES)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "jax>=0.4.30,<0.7"]', (0, 4, 30)),
        ("pyproject.toml", '[project]\ndependencies = ["jax[cuda12] ~= 0.5"]', (0, 5)),
        ("pyproject.toml", '[project]\ndependencies = ["jax (>=0.6.1)"]', (0, 6, 1)),
        ("pyproject.toml", '[project]\ndependencies = ["jax==0.7.*"]', (0, 7)),
        ("pyproject.toml", '[project]\ndependencies = ["jax<0.7", "jaxlib>=0.4"]', None),
        ("pyproject.toml", '[project]\ndependencies = ["jax-md>=9", "jaxtyping>=8"]', None),
        ("pyproject.toml", '[project]\ndependencies = ["jax!=0.4.1"]', None),
        ("pyproject.toml", '[tool.poetry.dependencies]\njax = "^0.4.20"', (0, 4, 20)),
        ("pyproject.toml", '[tool.poetry.dependencies]\njax = {version=">=0.4"}', (0, 4)),
        (
            "pyproject.toml",
            "[project]\ndependencies = ['jax>=0.7; python_version>\"3.10\"', 'jax>=0.4']",
            (0, 4),
        ),
        ("requirements.txt", "numpy\njax>=0.4.1  # newest\n", (0, 4, 1)),
        ("requirements.txt", "jax @ git+https://github.com/jax-ml/jax@v0.7.2\n", None),
        ("setup.cfg", "[options]\ninstall_requires =\n    numpy\n    jax>=0.5.0\n", (0, 5, 0)),
        ("setup.py", 'setup(install_requires=["jax>=0.3.4"], url=f"{x}")', (0, 3, 4)),
        ("setup.py", 'setup(install_requires=["jax>=0.3.4"', None),
    ],
)
def test_the_jax_that_a_project_requires(project, file, text, version):
    (project / file).write_text(text)

    assert config.lower_bound(str(project)) == version


def test_the_target_is_the_required_jax_unless_it_is_set(project):
    _pyproject(project, '[project]\ndependencies = ["jax>=0.6.1"]\n')
    assert config.load(["src"]).target_jax == (0, 6, 1)

    _pyproject(
        project, '[project]\ndependencies = ["jax>=0.6"]\n[tool.jax-dist]\ntarget-jax = "0.8"\n'
    )
    assert config.load(["src"]).target_jax == (0, 8)


@pytest.mark.parametrize("text", ["0.7.2", " v0.7.2", "0.7.2.dev20250101", "0.7.2rc1", "0.7.2+cu"])
def test_versions(text):
    assert config.version(text) == (0, 7, 2)
