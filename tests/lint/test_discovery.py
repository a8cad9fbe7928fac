"""Which files are looked at."""

import os
import pathlib

import pytest

from jax_dist._usage import MisuseError
from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import Patterns


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.py",
        "a.pyi",
        "notes.ipynb",
        "README.md",
        "pkg/c.py",
        "pkg/deep/d.py",
        "build/x.py",
        ".git/x.py",
        "pkg/.venv/x.py",
        "pkg/node_modules/x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def _find(*paths: str, exclude: tuple[str, ...] = sources.EXCLUDED) -> tuple[str, ...]:
    return sources.find_files(paths, Patterns(exclude, os.getcwd())).files


@pytest.mark.usefixtures("tree")
class TestFind:
    def test_sorted_and_without_what_is_not_ours(self):
        assert _find(".") == ("a.pyi", "b.py", "notes.ipynb", "pkg/c.py", "pkg/deep/d.py")

    def test_what_is_named_is_looked_at(self):
        assert _find("build", "README.md") == ("README.md", "build/x.py")

    def test_each_file_once_however_it_is_named(self):
        assert _find("pkg/", "./pkg/c.py", "pkg//deep") == ("pkg/c.py", "pkg/deep/d.py")

    def test_excluded_by_name_by_glob_and_by_place(self):
        assert _find(".", exclude=("*.pyi", "build", "pkg/deep", ".*", "node_modules")) == (
            "b.py",
            "notes.ipynb",
            "pkg/c.py",
        )

    def test_a_virtual_environment_is_known_by_what_it_holds(self):
        os.makedirs("pkg/env/lib")
        pathlib.Path("pkg/env/pyvenv.cfg").touch()
        pathlib.Path("pkg/env/lib/x.py").touch()

        assert _find("pkg") == ("pkg/c.py", "pkg/deep/d.py")
        assert _find("pkg/env") == ("pkg/env/lib/x.py",)

    def test_links_are_not_followed(self):
        os.symlink("..", "pkg/loop")
        os.symlink("c.py", "pkg/same.py")
        os.symlink("nowhere.py", "pkg/dead.py")
        os.symlink("/proc/self/environ", "x.py")
        os.mkfifo("pkg/pipe.py")

        assert _find("pkg") == ("pkg/c.py", "pkg/deep/d.py")
        found = sources.find_files(["pkg/pipe.py", "x.py"], Patterns(sources.EXCLUDED, "."))
        assert found.files == ()
        assert found.skipped == (
            "pkg/pipe.py is no regular file, and links are not followed",
            "x.py is no regular file, and links are not followed",
        )

    def test_only_regular_files_are_read(self):
        os.mkfifo("pipe")

        for path in ("pipe", "/dev/zero"):
            with pytest.raises(OSError, match="not a regular file"):
                sources.read_bytes(path)

    def test_a_name_that_is_no_text_is_shown_as_text(self):
        pathlib.Path(os.fsdecode(b"pkg/x\xff.py")).touch()

        assert list(map(sources.display, _find("pkg"))) == [
            "pkg/c.py",
            "pkg/deep/d.py",
            r"pkg/x\udcff.py",
        ]

    def test_a_missing_path_is_named_with_what_is_near(self):
        with pytest.raises(MisuseError) as caught:
            _find("pkg", "pkg/d.py", "nothing/at/all")

        here = os.getcwd()
        assert str(caught.value) == (
            f"there is no file or folder pkg/d.py, seen from {here}. Did you mean c.py?\n"
            f"there is no file or folder nothing/at/all, seen from {here}. "
            "There is no all in nothing/at."
        )


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("tests", "tests/a.py", True),
        ("tests", "mytests/a.py", False),
        ("test_*.py", "pkg/test_a.py", True),
        ("tests/*", "tests/deep/a.py", True),
        ("tests/*", "pkg/tests/a.py", False),
        ("**/gen/*", "pkg/gen/a.py", False),
        ("**/gen", "pkg/gen/a.py", True),
        ("./pkg/old/", "pkg/old/a.py", True),
        ("pkg/old", "pkg/older/a.py", False),
    ],
)
def test_patterns(pattern, path, expected):
    assert Patterns((pattern,), os.getcwd()).match(path) is expected
