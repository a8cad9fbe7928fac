"""A copy of a project has its repository: git reads there what it reads in the project."""

import os
import pathlib
import shutil
import subprocess

import pytest

from jax_dist.migrate.verify import repository, workplace

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


@pytest.fixture
def top(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A repository with one commit, whose objects are in a pack."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    for name in [each for each in os.environ if each.startswith("GIT_") and each[4:5] != "C"]:
        monkeypatch.delenv(name)
    _git(tmp_path, "config", "--global", "user.email", "a@b.c")
    _git(tmp_path, "config", "--global", "user.name", "a")
    _git(tmp_path, "config", "--global", "protocol.file.allow", "always")
    return _repository(tmp_path / "top")


def _repository(folder: pathlib.Path) -> pathlib.Path:
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "a.py").write_text("x = 1\n")
    _git(folder, "init", "-q", "-b", "main")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "one")
    _git(folder, "gc", "-q")
    return folder


def _git(folder: pathlib.Path, *words: str) -> str:
    ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def _copy(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    view = folder / "0" / repository.within(root)
    workplace.copy(root, {root: view})
    return view


_READ = (["rev-parse", "HEAD"], ["rev-parse", "--abbrev-ref", "HEAD"], ["log", "--format=%s"])


def _assert_reads_the_same(root: pathlib.Path, copied: pathlib.Path) -> None:
    for words in _READ:
        assert _git(copied, *words) == _git(root, *words)


def test_git_reads_in_a_copy_what_it_reads_in_the_project(
    top: pathlib.Path, tmp_path: pathlib.Path
):
    (top / "package" / "a.py").write_text("x = 2\n")
    (top / ".git" / "index.lock").touch()  # of a git that runs now
    copied = _copy(top, tmp_path)

    _assert_reads_the_same(top, copied)
    assert _git(copied, "status", "--porcelain") == "M package/a.py"
    assert _git(copied, "describe", "--always", "--dirty").endswith("-dirty")


def test_what_git_writes_in_a_copy_is_not_in_the_project(top: pathlib.Path, tmp_path: pathlib.Path):
    def files() -> dict[pathlib.Path, bytes]:
        return {each: each.read_bytes() for each in top.rglob("*") if each.is_file()}

    before = files()
    copied = _copy(top, tmp_path)
    (copied / "package" / "a.py").write_text("x = 3\n")
    _git(copied, "commit", "-qam", "two")
    _git(copied, "tag", "a")
    _git(copied, "gc", "-q", "--prune=now")
    _git(copied, "config", "user.name", "b")

    assert _git(copied, "log", "--format=%s") == "two\none"
    assert files() == before


def test_a_work_tree_has_its_own_head(top: pathlib.Path, tmp_path: pathlib.Path):
    _git(top, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    (tmp_path / "tree" / "b.py").touch()
    _git(tmp_path / "tree", "add", "-A")
    _git(tmp_path / "tree", "commit", "-qm", "two")
    copied = _copy(tmp_path / "tree", tmp_path)

    _assert_reads_the_same(tmp_path / "tree", copied)
    assert _git(copied, "status", "--porcelain") == ""
    assert _git(copied, "log", "--format=%s") == "two\none"


def test_a_submodule_is_a_repository_of_its_own(top: pathlib.Path, tmp_path: pathlib.Path):
    other = _repository(tmp_path / "other")
    _git(other, "commit", "-qm", "of other", "--allow-empty")
    _git(top, "submodule", "--quiet", "add", str(other), "sub")
    copied = _copy(top, tmp_path)

    _assert_reads_the_same(top, copied)
    _assert_reads_the_same(top / "sub", copied / "sub")
    assert _git(copied / "sub", "rev-parse", "--show-toplevel") == str(copied / "sub")
    assert _git(copied / "sub", "status", "--porcelain") == ""
    _assert_reads_the_same(top / "sub", _copy(top / "sub", tmp_path / "alone"))


def test_a_clone_that_borrows_its_objects(top: pathlib.Path, tmp_path: pathlib.Path):
    _git(tmp_path, "clone", "-q", "--shared", str(top), "clone")
    copied = _copy(tmp_path / "clone", tmp_path)

    _assert_reads_the_same(tmp_path / "clone", copied)


def test_a_project_inside_a_repository(top: pathlib.Path, tmp_path: pathlib.Path):
    copied = _copy(top / "package", tmp_path)

    _assert_reads_the_same(top / "package", copied)
    assert _git(copied, "rev-parse", "--show-prefix") == "package/"
    assert _git(copied, "status", "--porcelain", ".") == ""


def test_a_folder_in_no_repository_has_none(tmp_path: pathlib.Path):
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)  # empty, and so none
    (folder / "a.py").touch()
    copied = _copy(folder, tmp_path)

    assert [each.name for each in copied.iterdir()] == ["a.py"]
