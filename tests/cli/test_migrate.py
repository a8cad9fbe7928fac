"""`jax-dist migrate`: what it prints, what it writes, and its exit codes."""

import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jax_dist import _files
from jax_dist.cli.main import main

_ROOT = str(pathlib.Path(__file__).parents[2])

_BEFORE = """\
import jax

size = jax.device_count
double = jax.pmap(lambda x: x * 2)
"""
_AFTER = """\
import jax
import jax_dist

size = jax.device_count
double = jax_dist.pmap(lambda x: x * 2)
"""
_DIFF = """\
--- a/a.py
+++ b/a.py
@@ -1,4 +1,5 @@
 import jax
+import jax_dist
 
 size = jax.device_count
-double = jax.pmap(lambda x: x * 2)
+double = jax_dist.pmap(lambda x: x * 2)
"""
_LEFT = """\
import jax


def show(f):
    return f"{jax.pmap(f)}"
"""
_BROKEN = "import jax\nf = jax.pmap(\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(("migrate", *arguments), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def _misuse(*arguments: str) -> str:
    code, out, err = _run(*arguments)
    assert (code, out) == (2, "")
    return err


def test_a_diff_is_shown_and_nothing_is_written(folder):
    (folder / "a.py").write_text(_BEFORE)

    code, out, err = _run("a.py")

    assert code == 0
    assert out == _DIFF
    assert err == (
        "1 file would change: 1 place done, 0 left.\n"
        "Apply it with --write, or pipe the diff into `git apply`.\n"
    )
    assert (folder / "a.py").read_text() == _BEFORE


@pytest.mark.parametrize("tool", ["git apply", "patch -p1 -s"])
def test_the_diff_can_be_applied_as_a_patch(folder, tool: str):
    (folder / "a.py").write_text(_BEFORE)
    _, out, _ = _run("a.py")

    subprocess.run(tool.split(), input=out, text=True, check=True)

    assert (folder / "a.py").read_text() == _AFTER


def test_write_changes_the_files_and_says_which(folder):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.py").write_text(_BEFORE)
    (folder / "other.py").write_text("pmap = None\n")

    code, out, err = _run("--write", ".")

    assert code == 0
    assert out == ""
    assert err == (
        "migrated a.py: 1 place\n"
        "migrated sub/b.py: 1 place\n"
        "2 files migrated: 2 places done, 0 left.\n"
    )
    assert (folder / "a.py").read_text() == (folder / "sub" / "b.py").read_text() == _AFTER
    assert sorted(path.name for path in folder.iterdir()) == ["a.py", "other.py", "sub"]
    assert _run("--write", ".") == (0, "", "Nothing to migrate in 3 files.\n")


def test_check_names_the_files_and_fails(folder):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "b.py").write_text(_AFTER)

    code, out, _ = _run("--check", ".")

    assert (code, out) == (1, "a.py\n")
    assert (folder / "a.py").read_text() == _BEFORE


def test_a_file_that_cannot_be_written_does_not_stop_the_others(folder, monkeypatch):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "b.py").write_text(_BEFORE)
    write = _files.write_atomically

    def refuse(path, data, **options):
        if path == "a.py":
            raise PermissionError(13, "Permission denied")
        write(path, data, **options)

    monkeypatch.setattr(_files, "write_atomically", refuse)

    code, _, err = _run("--write", ".")

    assert code == 1
    assert "a.py is left as it is: it cannot be written: Permission denied\n" in err
    assert (folder / "b.py").read_text() == _AFTER


def test_a_file_that_cannot_be_parsed_does_not_stop_the_others(folder):
    (folder / "a.py").write_text(_BROKEN)
    (folder / "b.py").write_text(_BEFORE)

    code, _, err = _run("--write", ".")

    assert code == 1
    assert err == (
        "migrated b.py: 1 place\n"
        "jax-dist migrate: a.py is left as it is: Python cannot parse it: line 2: "
        "'(' was never closed\n"
        "1 file migrated: 1 place done, 0 left.\n"
    )
    assert (folder / "a.py").read_text() == _BROKEN


def test_excluded_folders_are_passed_over(folder):
    for name in ("src", "old"):
        (folder / name).mkdir()
        (folder / name / "a.py").write_text(_BEFORE)

    _, out, _ = _run("--check", "--exclude", "old", ".")

    assert out == "src/a.py\n"


def test_what_needs_a_newer_jax_is_left(folder):
    (folder / "a.py").write_text("import jax\nx = jax.tree_map(abs, 1)\n")

    assert _run("--check", "a.py")[0] == 1
    assert _run("--check", "--target-jax", "0.4.20", "a.py")[0] == 0


def test_bytes_outside_the_change_stay(folder):
    before = "\ufeff# \xe9t\xe9\r\nimport jax\r\nf = jax.pmap(jax.jit(abs))  # \u2713".encode()
    (folder / "a.py").write_bytes(before)

    _run("--write", "a.py")

    after = before.replace(b"jax.pmap", b"jax_dist.pmap")
    after = after.replace(b"import jax\r\n", b"import jax\r\nimport jax_dist\r\n")
    assert (folder / "a.py").read_bytes() == after


def test_a_notebook(folder):
    lines = ["%time\n", "import jax\n", "f = jax.pmap(jax.jit(abs))"]
    cell = {"cell_type": "code", "source": lines, "metadata": {}, "outputs": ["kept"]}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "a.ipynb").write_text(json.dumps(book, indent=1))

    code, _, err = _run("--write", "a.ipynb")

    assert (code, err) == (
        0,
        "migrated a.ipynb: 1 place\n1 file migrated: 1 place done, 0 left.\n",
    )
    written = json.loads((folder / "a.ipynb").read_text())
    assert written["cells"][0]["source"] == [
        "%time\n",
        "import jax\n",
        "import jax_dist\n",
        "f = jax_dist.pmap(jax.jit(abs))",
    ]
    assert written["cells"][0]["outputs"] == ["kept"]


_CASES_OF_MISUSE = {
    "no such path": (("nothing",), "there is no file or folder nothing, seen from "),
    "a command and --check": (("--check", ".", "--", "true"), "a command does not go with"),
    "no such command": ((".", "--", "nosuchprogram"), "nosuchprogram cannot be started: there is"),
    "jit without a command": (
        ("--to", "jit", "."),
        "migrate --to jit PATH needs a command",
    ),
    "a report of another kind": (("--report", "out.html", "."), "--report out.html: the name must"),
    "a report in no folder": (
        ("--report", "no/out.md", "."),
        "--report no/out.md: its directory does not exist",
    ),
}


@pytest.mark.parametrize("name", _CASES_OF_MISUSE)
def test_misuse_is_explained(name: str):
    arguments, text = _CASES_OF_MISUSE[name]

    assert _misuse(*arguments).startswith(f"jax-dist migrate: {text}")


def test_the_places_that_are_left_are_listed(folder):
    (folder / "a.py").write_text(_LEFT)

    code, out, err = _run("a.py")

    assert (code, out) == (0, "")
    assert err == (
        "0 files would change: 0 places done, 1 left.\n"
        "  left: a.py:5: pmap is inside an f-string\n"
        "--report FILE.md lists every place, and what to do by hand.\n"
    )
    assert _run("--quiet", "a.py") == (0, "", "")


def test_one_place_of_a_file(folder):
    text = "import jax\n\nf = jax.pmap(abs)\ng = jax.pmap(len)\n"
    (folder / "a.py").write_text(text)

    _, _, err = _run("--write", "a.py:4")

    assert "1 place done" in err
    assert (folder / "a.py").read_text() == text.replace(
        "jax.pmap(len)", "jax_dist.pmap(len)"
    ).replace("import jax\n", "import jax\nimport jax_dist\n")


def test_reports(folder):
    (folder / "a.py").write_text(_LEFT + _BEFORE)

    for suffix in ("json", "md", "txt"):
        _run("--report", f"out.{suffix}", "--quiet", "a.py")
    _, concise, _ = _run("--concise", "a.py")

    result = json.loads((folder / "out.json").read_text())
    assert result["summary"] == {"files": 1, "changed": 1, "done": 1, "left": 1, "problems": 0}
    places = [(place["line"], place["code"], place["status"]) for place in result["places"]]
    assert places == [(5, "JXD001", "left"), (9, "JXD001", "done")]
    assert (
        (folder / "out.md")
        .read_text()
        .startswith("# Migration to jax_dist\n\n1 file changed, 1 place done, 1 left.\n")
    )
    assert (
        concise
        == (folder / "out.txt").read_text()
        == (
            "a.py:5: jax.pmap left: pmap is inside an f-string. "
            "Take it out of the string.\n"
            "a.py:9: jax.pmap -> jax_dist\n"
        )
    )


def test_a_report_lists_comments_on_pmap(folder):
    (folder / "a.py").write_text(
        "# Train with pmap.\nimport jax\n\n\n"
        "def train(step, w, x):  # pmap'd, no pmapping\n    print('pmap')  # pmapping\n"
        '    return jax.pmap(step, axis_name="i", in_axes=(None, 0), out_axes=None)(w, x)\n'
    )
    for suffix in ("json", "md"):
        _run("--to", "shard_map", "--report", f"out.{suffix}", "a.py")
    _, concise, err = _run("--to", "shard_map", "--concise", "a.py")
    after = json.loads((folder / "out.json").read_text())["comments"]
    comments = [line for line in concise.splitlines() if line.startswith("  ")]

    texts = ["# Train with pmap.", "def train(step, w, x):  # pmap'd, no pmapping"]
    assert [line["text"] for line in after] == texts
    assert comments == [f"  a.py:{line['line']}: {line['text']}" for line in after]
    assert "These comments still speak of pmap\n" in concise
    assert "## These comments still speak of pmap\n" in (folder / "out.md").read_text()
    assert "1 file changed, 1 place done, 0 left." in (folder / "out.md").read_text()
    assert "1 file would change: 1 place done, 0 left.\n" in err


def test_names_of_files_cannot_command_a_terminal(folder):
    (folder / "a\x1b[31m.py").write_text(_LEFT)

    assert "\x1b" not in _run(".")[2]


def test_a_new_module_is_shown_and_written(folder):
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(b.f)\n")
    (folder / "pkg" / "b.py").write_text("f = abs\n")

    _, shown, _ = _run("--to", "vendored", "pkg")
    code, out, err = _run("--to", "vendored", "--write", "pkg")

    assert "--- /dev/null\n+++ b/pkg/_mapped.py\n" in shown
    assert (code, out) == (0, "")
    assert err == (
        "wrote pkg/_mapped.py\n"
        "migrated pkg/a.py: 1 place\n"
        "2 files migrated: 1 place done, 0 left.\n"
    )
    written = {path.name: path.read_text() for path in (folder / "pkg").iterdir()}
    assert written["a.py"] == "from . import b\nfrom ._mapped import mapped\n\nf = mapped(b.f)\n"
    assert _run("--to", "vendored", "--check", "pkg")[:2] == (0, "")
    for path in ("a.py", "_mapped.py"):
        (folder / "pkg" / path).unlink()
    (folder / "pkg" / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(b.f)\n")
    subprocess.run(["git", "apply"], input=shown, text=True, check=True)
    assert written == {path.name: path.read_text() for path in (folder / "pkg").iterdir()}


def test_no_jax_is_imported(folder):
    (folder / "a.py").write_text(_BEFORE)
    script = (
        "import sys\n"
        "from jax_dist.cli.main import main\n"
        "main(['migrate', '--to', 'vendored', '--report', 'r.md', 'a.py'])\n"
        "print(sorted({'jax', 'jaxlib', 'numpy', 'libcst'} & set(sys.modules)))\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": _ROOT},
    )

    assert run.stdout.endswith("\n[]\n")


def test_a_place_that_takes_another_form_says_why(folder: pathlib.Path):
    (folder / "a.py").write_text(
        "import jax\n\n\n"
        "def step(w, x):\n"
        '    return w - jax.lax.pmean(x.mean(0), "i")\n\n\n'
        "def train(w, x):\n"
        '    return jax.pmap(step, axis_name="i", in_axes=(None, 0), out_axes=None)(w, x)\n'
    )
    code, _, err = _run("--to", "jit", "a.py", "--", sys.executable, "-c", "0")

    assert code == 0
    assert "  to shard_map: a.py:9: stays in shard_map: the command never calls it\n" in err
