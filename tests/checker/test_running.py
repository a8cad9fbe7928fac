"""Many files: in order, whatever is remembered, however many processes."""

import json
import os
import pathlib

import pytest
import word_rules
from word_rules import words  # noqa: F401 (a fixture)

from jax_dist.checker.engine import linter, runner
from jax_dist.checker.engine.linter import Examiner
from jax_dist.checker.engine.runner import FindingStore
from jax_dist.checker.model.findings import Edit, Finding, Fix, Position, Safety
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.sources import Patterns

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


def _run(memory=None, examiner=Examiner(word_rules.CODES), files=_FILES, **options):  # noqa: B008
    found = runner.run(files, examiner, memory=memory, **options)
    return [f"{each.path}:{each.code}" for each in found]


def _memory(folder: str = "cache", paths=(".",), target=None, files=_FILES) -> FindingStore:
    return FindingStore(folder, paths, target, files)


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

    assert told == [(2, 3), (3, 3)]


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


class TestMemory:
    def test_only_what_changed_is_checked_again(self, checked):
        assert _run(_memory()) == _ALL
        checked.clear()
        assert _run(_memory()) == _ALL
        assert checked == []

        pathlib.Path("a.py").write_text("jax\nrisky\n")
        assert _run(_memory()) == ["a.py:JXD102", *_ALL[1:]]
        assert checked == ["a.py"]

    def test_what_a_file_was_a_moment_ago_does_not_count(self, checked):
        _run(_memory())
        status = os.stat("a.py")
        pathlib.Path("a.py").write_text("jax\nnew\n")  # as long as before
        os.utime("a.py", ns=(status.st_atime_ns, status.st_mtime_ns))

        assert _run(_memory()) == _ALL[1:]

    def test_other_codes_are_looked_for_anew(self, checked):
        _run(_memory())
        checked.clear()

        assert _run(_memory(), Examiner(frozenset({"JXD102"}))) == ["c.py:JXD102"]
        assert checked == ["a.py", "c.py"]

    @pytest.mark.parametrize("other", [{"target": (0, 7)}, {"files": ("a.py",)}, {"paths": ("x",)}])
    def test_nothing_counts_where_findings_may_differ(self, checked, other):
        _run(_memory())
        checked.clear()
        _run(_memory(**other))

        assert checked == ["a.py", "c.py"]

    def test_nothing_counts_once_a_file_that_was_looked_into_has_changed(self, checked):
        pathlib.Path("helper.py").write_text("import jax\np = jax.pmap\n")
        project = Project(["."])
        project.opened(os.path.abspath("helper.py"))
        # As if a.py had asked for it:
        running_memory = _memory()
        _run(running_memory)
        running_memory.save([os.path.abspath("helper.py")])
        checked.clear()
        _run(_memory())
        assert checked == []

        pathlib.Path("helper.py").write_text("import jax\np = jax.jit\n")
        _run(_memory())
        assert checked == ["a.py", "c.py"]

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", '{"context": 1}', "\xff", "[" * 100_000],
    )
    def test_a_broken_memory_is_an_empty_one(self, checked, text):
        _run(_memory())
        [file] = pathlib.Path("cache").glob("*.json")
        file.write_text(text, encoding="latin-1")

        assert _run(_memory()) == _ALL
        assert json.loads(file.read_text())["files"].keys() == {"a.py", "c.py"}

    def test_broken_entries_are_looked_up_again(self, checked):
        _run(_memory())
        [file] = pathlib.Path("cache").glob("*.json")
        kept = json.loads(file.read_text())
        kept["files"]["a.py"][1] = [["JXD101"]]
        file.write_text(json.dumps(kept))
        checked.clear()

        assert _run(_memory()) == _ALL
        assert checked == ["a.py"]

    def test_the_folder_says_what_it_is(self, checked):
        _run(_memory())

        assert pathlib.Path("cache/.gitignore").read_text() == "*\n"
        assert (
            pathlib.Path("cache/CACHEDIR.TAG")
            .read_text()
            .startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
        )

    def test_a_folder_that_cannot_be_made_is_no_error(self, checked):
        assert _run(_memory("a.py/cache")) == _ALL

    def test_findings_come_back_whole(self):
        fix = Fix(
            "do",
            Safety.UNSAFE,
            (Edit(1, 2, "é"), Edit(3, 3, "")),
            ("import jax",),
            "group",
        )
        start, end = Position(1, 2, 3), Position(4, 5)
        finding = Finding("a.py", "JXD1", "n", "m", start, end, (1, 9), "日本", fix)
        memory = _memory()
        memory.put("a.py", "digest", [finding])
        memory.save()

        assert _memory().get("a.py", "digest") == [finding]
        assert _memory().get("a.py", "other") is None
        assert _memory().get("b.py", "digest") is None
