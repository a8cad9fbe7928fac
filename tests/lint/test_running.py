"""Many files, in their order."""

import os
import pathlib

import pytest
import word_rules
from word_rules import words  # noqa: F401 (a fixture)

from jax_dist.lint.engine import linter, runner
from jax_dist.lint.engine.linter import Examiner
from jax_dist.lint.model.sources import Patterns

_FILES = ("a.py", "b.py", "c.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    for path, text in zip(_FILES, ("jax\nold\n", "old\n", "jax + risky + old\n"), strict=True):
        pathlib.Path(path).write_text(text)
    return tmp_path


@pytest.fixture
def checked(monkeypatch, words) -> list[str]:  # noqa: F811
    """The paths that were checked, in order."""
    paths: list[str] = []

    def check(source, *rest):
        paths.append(source.path)
        return word_rules.check(source, *rest)

    monkeypatch.setattr(linter, "check", check)
    return paths


def _run(examiner=Examiner(word_rules.CODES), **options):  # noqa: B008
    found = runner.run(_FILES, examiner, **options)
    return [f"{each.path}:{each.code}" for each in found]


_ALL = ["a.py:JXD101", "c.py:JXD102", "c.py:JXD101"]


def test_files_in_order_and_a_glance_passes_over_what_says_nothing_of_jax(checked):
    assert _run() == _ALL
    assert checked == ["a.py", "c.py"]


def test_the_pmaps_of_libraries_are_found_where_nothing_says_jax(tmp_path):
    text = "import equinox as eqx\nfrom flax import nnx\nf = eqx.filter_pmap(g)\nh = nnx.pmap(g)\n"
    path = tmp_path / "a.py"
    path.write_text(text)
    found = runner.run([str(path)], Examiner(frozenset({"JXD001"})))

    assert [(each.code, each.start.line) for each in found] == [("JXD001", 3), ("JXD001", 4)]


def test_progress_counts_all_files(checked):
    told = []
    _run(progress=lambda done, total: told.append((done, total)))

    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.usefixtures("checked")
def test_codes_can_be_off_in_some_files():
    examiner = Examiner(
        word_rules.CODES, ignores=((Patterns(("c.*",), os.getcwd()), frozenset({"JXD101"})),)
    )

    assert _run(examiner=examiner) == ["a.py:JXD101", "c.py:JXD102"]


@pytest.mark.usefixtures("checked")
def test_files_that_cannot_be_read_are_findings():
    pathlib.Path("b.py").write_bytes(b"# coding: nonsense\njax\n")

    found = runner.run([*_FILES, "gone.py"], Examiner(word_rules.CODES))

    assert [(each.path, each.message) for each in found if each.code == "JXD901"] == [
        ("b.py", "unknown encoding: nonsense"),
        ("gone.py", "the file cannot be read: No such file or directory"),
    ]


def test_a_fault_of_a_rule_stays_in_its_file(monkeypatch, words):  # noqa: F811
    def check(*arguments):
        raise ZeroDivisionError("one")

    monkeypatch.setattr(linter, "check", check)

    assert "a.py:JXD901" in _run()
