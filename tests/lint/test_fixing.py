"""Files are mended, and never harmed."""

import pathlib
import shutil
import subprocess

import pytest
import word_rules
from word_rules import words  # noqa: F401 (a fixture)

from jax_dist.lint.engine import fixer
from jax_dist.lint.engine.linter import Examiner
from jax_dist.lint.model.findings import Safety

_SAFE = frozenset({Safety.SAFE})
_BOTH = frozenset({Safety.SAFE, Safety.UNSAFE})


def _mended(text: str | bytes, allowed=_SAFE, path: str = "a.py"):
    data = text.encode() if isinstance(text, str) else text
    return fixer.mended(path, data, Examiner(word_rules.CODES), allowed)


@pytest.mark.usefixtures("words")
class TestMended:
    def test_only_what_is_allowed(self):
        text = "old\nrisky\nidea\nplain\n"

        mended = _mended(text)
        assert mended.data == b"new\nrisky\nidea\nplain\n"
        assert [each.code for each in mended.findings] == ["JXD102", "JXD103", "JXD104"]
        assert [each.code for each in mended.made] == ["JXD101"]
        assert mended.refused == ""

        assert _mended(text, _BOTH).data == b"new\nnew\nidea\nplain\n"

    def test_as_often_as_it_takes(self):
        mended = _mended("wide + old + wide\n")  # three that clash

        assert mended.data == b"new + new + new\n"
        assert [each.code for each in mended.made] == ["JXD105", "JXD101", "JXD105"]
        assert _mended(mended.data).data == mended.data

    def test_a_fix_that_makes_a_new_finding_is_refused_and_the_others_are_made(self):
        mended = _mended("old\nharm\nold\n")

        assert mended.data == b"new\nharm\nnew\n"
        assert mended.refused == "there would be a new JXD104 in line 2: plain is not good"
        assert [each.code for each in mended.findings] == ["JXD106"]

    def test_a_fix_that_breaks_the_file_is_refused(self):
        mended = _mended("broken\nold\n")

        assert mended.data == b"broken\nnew\n"
        assert mended.refused.startswith("Python could not parse the file any more: line 1: ")

    def test_a_file_that_cannot_be_parsed_is_left(self):
        assert _mended("old\ndef f(:\n").data == b"old\ndef f(:\n"

    def test_what_is_switched_off_stays(self):
        assert _mended("old  # noqa: JXD101\n").data == b"old  # noqa: JXD101\n"

    def test_a_comment_that_a_fix_makes_needless_goes_too(self):
        assert _mended("clear + plain  # jax-dist: ignore[JXD104]\n").data == b"new\n"

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"\xef\xbb\xbfold\r\nx\r\n", b"\xef\xbb\xbfnew\r\nx\r\n"),
            (b"# coding: latin-1\nold, '\xe9'", b"# coding: latin-1\nnew, '\xe9'"),
            (b"old\rx\r", b"new\rx\r"),
            (b"old\x0c\n\tx = 1" [:3] + b"  # \x0c\n", b"new  # \x0c\n"),
        ],
    )  # fmt: skip
    def test_bytes_that_are_not_mended_stay(self, before, after):
        assert _mended(before).data == after

    def test_a_notebook(self):
        before = (
            '{"cells": [{"cell_type": "code", "source": ["%time x\\n", "old\\n", "y"], '
            '"outputs": [1.5]}], "nbformat": 4, "metadata": {}}\n'
        )

        assert _mended(before, path="a.ipynb").data.decode() == before.replace("old", "new")


class TestDiff:
    def test_text(self):
        assert fixer.diff("a.py", b"1\n2\nold\n4\n", b"1\n2\nnew\n4\n") == (
            "--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n 1\n 2\n-old\n+new\n 4\n"
        )
        assert fixer.diff("a.py", b"x", b"x") == ""

    def test_a_new_file(self):
        assert fixer.diff("b/a.py", b"", b"1\n", new=True) == (
            "--- /dev/null\n+++ b/b/a.py\n@@ -0,0 +1 @@\n+1\n"
        )

    def test_a_file_is_named_as_seen_from_here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        assert fixer.diff(str(tmp_path / "a.py"), b"", b"1").startswith("--- a/a.py\n")

    def test_colours(self):
        assert fixer.diff("a", b"old\nx\n", b"new\nx\n", colour=True) == (
            "\x1b[31m--- a/a\x1b[0m\n\x1b[32m+++ b/a\x1b[0m\n\x1b[36m@@ -1,2 +1,2 @@\x1b[0m\n"
            "\x1b[31m-old\x1b[0m\n\x1b[32m+new\x1b[0m\n x\n"
        )

    @pytest.mark.parametrize("tool", ["patch -p1 --binary -s", "git apply"])
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"old", b"new"),
            (b"a\nold", b"a\nnew\n"),
            (b"a\r\nold\r\n", b"a\r\nnew\r\n"),
            (b"a\x0cb\n\xc2\x85old\n", b"a\x0cb\n\xc2\x85new\n"),
        ],
    )
    def test_tools_take_it(self, tmp_path: pathlib.Path, before, after, tool):
        if shutil.which(tool.split()[0]) is None:
            pytest.skip(f"needs {tool}")
        (tmp_path / "a.py").write_bytes(before)
        text = fixer.diff("a.py", before, after) + fixer.diff("n/b.py", b"", after, new=True)

        subprocess.run(tool.split(), cwd=tmp_path, input=text.encode(), check=True)

        assert (tmp_path / "a.py").read_bytes() == after
        assert (tmp_path / "n" / "b.py").read_bytes() == after
