"""Files are fixed, and never broken."""

import pathlib
import shutil
import subprocess

import pytest

from jax_dist.lint import new_imports
from jax_dist.lint.engine import fixer
from jax_dist.lint.engine.linter import RULES, Examiner
from jax_dist.lint.findings import Fix, Safety
from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import Module

_SAFE = frozenset({Safety.SAFE})
_BOTH = frozenset({Safety.SAFE, Safety.UNSAFE})
_PSUM = "from jax import lax\nn = lax.psum(1, 'i')\n"
_FIXED = "from jax import lax\nn = lax.axis_size('i')\n"


def _fix(text: str | bytes, allowed=_SAFE, path: str = "a.py") -> fixer.FixResult:
    data = text.encode() if isinstance(text, str) else text
    return fixer.fix(path, data, Examiner(frozenset(RULES)), allowed)


def test_only_what_is_allowed():
    text = _PSUM + "m = lax.all_gather(x, 'i').mean(axis=0)\n"

    safe = _fix(text)
    assert safe.data.decode() == _FIXED + "m = lax.all_gather(x, 'i').mean(axis=0)\n"
    assert [each.code for each in safe.findings] == ["JXD301"]
    assert (safe.made, safe.rejected) == (1, "")
    assert _fix(text, _BOTH).data.decode() == _FIXED + "m = lax.pmean(x, 'i')\n"


def test_as_often_as_it_takes():
    text = "import jax\ny = jax.tree_map(f, jax.tree_map(g, x), jax.lax.psum(1, 'i'))\n"

    after = _fix(text)
    assert after.data.decode() == (
        "import jax\ny = jax.tree.map(f, jax.tree.map(g, x), jax.lax.axis_size('i'))\n"
    )
    assert after.made == 3
    assert _fix(after.data).data == after.data


def test_a_fix_that_would_make_a_finding_is_rejected(monkeypatch):
    def placed(module, fixes, real=fixer.new_imports.place_imports):
        return real(module, fixes) + b"jax.pmap(f)\n"

    monkeypatch.setattr(fixer.new_imports, "place_imports", placed)
    before = b"import jax\njax.lax.psum(1, 'i')\n"
    after = _fix(before)

    assert after.data == before
    assert after.rejected == (
        "there would be a new JXD001 in line 3: jax.pmap is in maintenance mode; "
        "jax-dist migrate rewrites it"
    )


def test_a_fix_that_would_break_the_file_is_rejected(monkeypatch):
    monkeypatch.setattr(fixer.new_imports, "place_imports", lambda module, fixes: b"def (:\n")

    after = _fix(_PSUM)
    assert after.data.decode() == _PSUM
    assert after.rejected.startswith("there would be a new JXD901 in line 1: Python ")


@pytest.mark.parametrize("text", [_PSUM + "def f(:\n", _PSUM.rstrip() + "  # noqa: JXD306\n"])
def test_what_cannot_be_parsed_or_is_switched_off_stays(text):
    assert _fix(text).data.decode() == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbf%s\r\nx\r\n", b"\xef\xbb\xbf%s\r\nx\r\n"),
        (b"# coding: latin-1\n%s; '\xe9'", b"# coding: latin-1\n%s; '\xe9'"),
        (b"%s\rx\r", b"%s\rx\r"),
        (b"%s  # \x0c\n", b"%s  # \x0c\n"),
    ],
)
def test_other_bytes_stay(before, after):
    old, new = b"import jax; jax.lax.psum(1, 'i')", b"import jax; jax.lax.axis_size('i')"

    assert _fix(before % old).data == after % new


def test_a_notebook():
    before = (
        '{"cells": [{"cell_type": "code", "source": ["%time x\\n", "import jax\\n", '
        '"jax.lax.psum(1, \'i\')"], "outputs": [1e400, 1e-7]}], "nbformat": 4, "metadata": {}}\n'
    )

    after = _fix(before, path="a.ipynb").data.decode()
    assert after == before.replace("psum(1, ", "axis_size(")


_SHARDING = "from jax.sharding import NamedSharding\n"


@pytest.mark.parametrize(
    ("above", "line", "below"),
    [
        (
            "from a import b\nimport flax\nimport jax\nimport jax.numpy\n",
            _SHARDING,
            "import optax\n",
        ),
        ("import flax\nimport jax\nimport optax\n", _SHARDING, ""),
        ('"""A docstring."""\n', "import functools\n", "import os\n"),
        ('"""A docstring."""\nimport equinox\n', "import jax_dist\n", "import numpy\n"),
    ],
)
def test_a_new_import_stands_in_the_order_of_its_block(above, line, below):
    module = Module(sources.read("a.py", f"{above}{below}".encode()))

    after = new_imports.place_imports(module, [Fix("import it", Safety.SAFE, (), (line.strip(),))])

    assert after.decode() == above + line + below


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

    def test_colors(self):
        assert fixer.diff("a", b"old\nx\n", b"new\nx\n", color=True) == (
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
