"""`jax-dist migrate`: what it prints, what it writes, and its exit codes."""

import io
import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from jax_dist import _files
from jax_dist._compat import CAN_REWRITE
from jax_dist.cli.main import main
from jax_dist.migrate import migration
from jax_dist.migrate.verify import trial
from jax_dist.migrate.verify.ledger import Ledger, LedgerEntry, Rung

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
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(("migrate", *arguments), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def _misuse(*arguments: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as caught:
        main(("migrate", *arguments), out=out, err=err)
    assert caught.value.code == 2
    assert out.getvalue() == ""
    return err.getvalue()


def test_a_command_that_there_is_not_and_a_module_that_nobody_could_import():
    assert "nosuchprogram cannot be started: there is no such program" in _misuse(
        "--verify", "a.py", "--", "nosuchprogram"
    )
    assert "--helpers a-b.py: no program could import a module of this name" in _misuse(
        "--to", "jax", "--helpers", "a-b.py", "a.py"
    )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("jax.py", "it would hide the module jax from programs that import it"),
        ("src/random.py", "it would hide the module random from programs that import it"),
        ("numpy.py", "it would hide the module numpy from programs that import it"),
        ("pytest.py", "it would hide the module pytest from programs that import it"),
        ("utils.py", "for Python, the package utils beside it has the same name"),
        ("class.py", "no program could import a module of this name"),
        ("__main__.py", "no program could import a module of this name"),
    ],
)
def test_a_module_for_helpers_that_would_be_or_hide_another(
    folder: pathlib.Path, path: str, why: str
):
    (folder / "utils").mkdir()
    (folder / "utils" / "a.py").touch()
    before = sorted(folder.rglob("*"))

    better = os.path.join(os.path.dirname(path), "_mapped.py")
    assert _misuse("--to", "jax", "--write", "--helpers", path, ".") == (
        f"jax-dist migrate: --helpers {path}: {why}. Give another name, as {better}\n"
    )
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["package/random.py", "data.py"])
def test_a_module_for_helpers_that_hides_nothing(folder: pathlib.Path, path: str):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "data").mkdir()  # of no Python
    (folder / "a.py").write_text(_BEFORE)

    assert _run("--to", "jax", "--write", "--helpers", path, ".")[0] == 0
    assert (folder / path).is_file()


def test_a_diff_is_shown_and_nothing_is_written(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)

    code, out, err = _run("a.py")

    assert code == 0
    assert out == _DIFF
    assert err == "1 file would change: 1 place done, 0 left.\n"
    assert (folder / "a.py").read_text() == _BEFORE


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["jax", "jax_dist"])
def test_time_grows_with_the_places_of_a_file(folder: pathlib.Path, target: str):
    """Whatever looks at all places for each of them takes far longer: 16 s for 4,000 once."""
    one, four = (_cpu_seconds(folder, target, places) for places in (1000, 4000))

    assert four < 4
    assert four < 6 * one  # start-up is a part of both


def _cpu_seconds(folder: pathlib.Path, target: str, places: int) -> float:
    text = "import jax\n\n\ndef step(x):\n    return jax.lax.psum(x, 'i')\n\n\n"
    text += "".join(f"f{n} = jax.pmap(step, axis_name='i')\n" for n in range(places))
    (folder / "a.py").write_text(text)
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    ended = subprocess.run(
        [sys.executable, "-m", "jax_dist", "migrate", "--to", target, "a.py"],
        env={**os.environ, "PYTHONPATH": _ROOT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{places} places done, 0 left" in ended.stderr
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start


@pytest.mark.parametrize("tool", ["git apply", "patch -p1 -s"])
def test_the_diff_can_be_applied_as_a_patch(folder: pathlib.Path, tool: str):
    (folder / "a.py").write_text(_BEFORE)
    _, out, _ = _run("a.py")

    subprocess.run(tool.split(), input=out, text=True, check=True)

    assert (folder / "a.py").read_text() == _AFTER


def test_colours_where_asked_for(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)

    _, out, _ = _run("--color", "always", "a.py")

    assert "\x1b[32m+import jax_dist\x1b[0m\n" in out


def test_write_changes_the_files_and_says_which(folder: pathlib.Path):
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


def test_a_second_run_has_nothing_to_do(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)
    _run("--write", "a.py")

    assert _run("--write", "a.py") == (0, "", "Nothing to migrate in 1 file.\n")


def test_check_names_the_files_and_fails(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "b.py").write_text(_AFTER)

    code, out, _ = _run("--check", ".")

    assert (code, out) == (1, "a.py\n")
    assert (folder / "a.py").read_text() == _BEFORE


def test_check_passes_where_only_what_must_be_left_is_left(folder: pathlib.Path):
    (folder / "a.py").write_text(_LEFT)

    code, out, _ = _run("--check", "--to", "jax", "a.py")

    assert (code, out) == (0, "")


def test_a_file_that_changes_meanwhile_is_not_written(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "b.py").write_text(_BEFORE)
    migrate = migration.migrate

    def slow(*arguments, **options):
        found = migrate(*arguments, **options)
        (folder / "a.py").write_text("# mine\n")
        return found

    monkeypatch.setattr(migration, "migrate", slow)

    code, _, err = _run("--write", ".")

    assert code == 1
    assert err == (
        "migrated b.py: 1 place\n"
        "jax-dist migrate: a.py is left as it is: it has changed since it was read\n"
        "1 file migrated: 1 place done, 0 left.\n"
    )
    assert (folder / "a.py").read_text() == "# mine\n"
    assert (folder / "b.py").read_text() == _AFTER


def test_a_file_that_cannot_be_written_does_not_stop_the_others(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "b.py").write_text(_BEFORE)
    write = _files.write_atomically

    def refuse(path: str, data: bytes, **options) -> None:
        if path == "a.py":
            raise PermissionError(13, "Permission denied")
        write(path, data, **options)

    monkeypatch.setattr(_files, "write_atomically", refuse)

    code, _, err = _run("--write", ".")

    assert code == 1
    assert "a.py is left as it is: Permission denied\n" in err
    assert (folder / "b.py").read_text() == _AFTER


def test_a_file_that_cannot_be_parsed_does_not_stop_the_others(folder: pathlib.Path):
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


def test_a_file_that_cannot_be_parsed_is_not_one_without_places(folder: pathlib.Path):
    (folder / "a.py").write_text(_BROKEN)

    code, _, err = _run("a.py")

    assert code == 1
    assert "Nothing to migrate" not in err


def test_what_is_left_is_said_with_the_way_to_learn_more(folder: pathlib.Path):
    (folder / "a.py").write_text(_LEFT)

    code, out, err = _run("--to", "jax", "a.py")

    assert (code, out) == (0, "")
    assert err == (
        "0 files would change: 0 places done, 1 left.\n"
        "  left: a.py:5: pmap stands inside of an f-string\n"
        "--report FILE.md lists every place, and what to do by hand.\n"
    )


_TRAINER = """\
import sys

import jax
import numpy as np
from flax import jax_utils

if sys.argv[1:]:
    jax.distributed.initialize()
step = jax.pmap(lambda params, batch: params - jax.lax.pmean(batch.mean(), "i"), "i")


def train(params, batches):
    params = jax_utils.replicate(params)
    for batch in batches:
        params = step(params, batch)
    return jax_utils.unreplicate(params)


train(np.zeros((8, 4), np.float32), [np.ones((8, 2), np.float32)])
"""


@pytest.mark.skipif(not CAN_REWRITE, reason="a global view needs jax 0.10")
def test_an_option_that_leaves_fewer_places_is_named(folder: pathlib.Path):
    pytest.importorskip("flax")
    (folder / "a.py").write_text(_TRAINER)

    _, _, err = _run("--to", "global", "--verify", "a.py", "--", sys.executable, "a.py")
    assert "0 places done, 1 left." in err
    assert "\n--one-process would leave 1 fewer. It is a promise about the program.\n" in err
    assert (folder / "a.py").read_text() == _TRAINER


def test_another_target_that_leaves_fewer_places_is_named(folder: pathlib.Path):
    (folder / "a.py").write_text("import jax\n\nf = jax.pmap(lambda x: x * 2)\n")

    _, _, err = _run("--to", "global", "--verify", "a.py", "--", sys.executable, "a.py")
    assert "\n--to jax_dist would leave 1 fewer.\n" in err
    assert "would leave" not in _run("--to", "jax_dist", "a.py")[2]
    (folder / "a.py").write_text('import jax\n\nprint(f"{jax.pmap(abs)}")\n')
    assert "left: a.py:3: pmap stands" in _run("--to", "jax", "--helpers", "b.py", "a.py")[2]


def test_quiet_says_nothing_but_what_went_wrong(folder: pathlib.Path):
    (folder / "a.py").write_text(_LEFT)
    (folder / "b.py").write_text(_BROKEN)

    _, out, err = _run("--quiet", "--to", "jax", ".")

    assert out == ""
    assert err == (
        "jax-dist migrate: b.py is left as it is: Python cannot parse it: line 2: "
        "'(' was never closed\n"
    )


def test_a_report_for_machines(folder: pathlib.Path):
    (folder / "a.py").write_text(_LEFT + _BEFORE)

    _run("--to", "jax", "--report", "out.json", "--quiet", "a.py")

    found = json.loads((folder / "out.json").read_text())
    assert found["summary"] == {"files": 1, "changed": 1, "done": 1, "left": 1, "problems": 0}
    places = [(each["line"], each["code"], each["status"]) for each in found["places"]]
    assert places == [(5, "JXD001", "left"), (9, "JXD001", "done")]


def test_a_report_for_people_on_the_standard_output(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)

    code, out, err = _run("--report", "-", "a.py")

    assert code == 0
    assert out.startswith("# Migration to jax_dist\n\n1 file changed, 1 place done, 0 left.\n")
    assert "+++" not in out
    assert "--report" not in err


def test_excluded_folders_are_passed_over(folder: pathlib.Path):
    for name in ("src", "old"):
        (folder / name).mkdir()
        (folder / name / "a.py").write_text(_BEFORE)

    _, out, _ = _run("--check", "--exclude", "old", ".")

    assert out == "src/a.py\n"


def test_promises_make_plain_jax(folder: pathlib.Path):
    text = "import jax\n\n\ndef twice(x):\n    f = jax.pmap(lambda x: x * 2)\n    return f(x)\n"
    (folder / "a.py").write_text(text)

    assert "+    f = mapped(lambda x: x * 2)\n" in _run("--to", "jax", "a.py")[1]
    found = _run("--to", "jax", "--one-process", "--all-devices", "a.py")[1]
    assert "+    f = jax.jit(\n" in found


def test_a_new_module_is_shown_and_written(folder: pathlib.Path):
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(b.f)\n")
    (folder / "pkg" / "b.py").write_text("f = abs\n")

    _, shown, _ = _run("--to", "jax", "pkg")
    code, out, err = _run("--to", "jax", "--write", "pkg")

    assert "--- /dev/null\n+++ b/pkg/_mapped.py\n" in shown
    assert (code, out) == (0, "")
    assert err == (
        "wrote pkg/_mapped.py\n"
        "migrated pkg/a.py: 1 place\n"
        "2 files migrated: 1 place done, 0 left.\n"
    )
    written = {path.name: path.read_text() for path in (folder / "pkg").iterdir()}
    assert written["a.py"] == ("from . import b\nfrom ._mapped import mapped\n\nf = mapped(b.f)\n")
    assert _run("--to", "jax", "--check", "pkg") == (0, "", "Nothing to migrate in 4 files.\n")
    for path in ("a.py", "_mapped.py"):
        (folder / "pkg" / path).unlink()
    (folder / "pkg" / "a.py").write_text("import jax\nfrom . import b\n\nf = jax.pmap(b.f)\n")
    subprocess.run(["git", "apply"], input=shown, text=True, check=True)
    assert written == {path.name: path.read_text() for path in (folder / "pkg").iterdir()}


def test_a_module_that_cannot_be_written_keeps_its_files_as_they_are(folder: pathlib.Path):
    text = "import jax\n\nf = jax.pmap(abs)\n"
    (folder / "a.py").write_text(text)
    (folder / "b.py").write_text(text.replace("jax.pmap", "jax.shard_map") + "jax.tree_map\n")

    code, _, err = _run("--to", "jax", "--write", "--helpers", "none/helpers.py", ".")

    assert code == 1
    assert "none/helpers.py is left as it is: in " in err
    assert "a.py is left as it is: the module for its helpers could not be written\n" in err
    assert "migrated b.py: 1 place\n" in err
    assert (folder / "a.py").read_text() == text


def test_a_module_that_no_file_needs_any_more_is_not_left_behind(folder: pathlib.Path):
    (folder / "a.py").write_text("import jax\n\nf = jax.pmap(abs)\n")
    (folder / "a.py").chmod(0o444)

    code, _, err = _run("--to", "jax", "--write", "--helpers", "own.py", "a.py")

    assert code == 1
    assert "removed own.py: no file that needs it could be written\n" in err
    assert "a.py is left as it is: it is read-only" in err
    assert err.endswith("0 files migrated: 0 places done, 0 left.\n")
    assert [path.name for path in folder.iterdir()] == ["a.py"]


def test_the_whole_contract_in_a_module_of_its_own(folder: pathlib.Path):
    (folder / "a.py").write_text("import jax\n\nf = jax.pmap(abs)\n")

    assert (
        _run("--to", "jax", "--write", "--helpers", "full", "--helpers", "own.py", "a.py")[0] == 0
    )

    assert (folder / "a.py").read_text().startswith("from own import mapped\n")
    assert "class _Program:" in (folder / "own.py").read_text()


@pytest.mark.parametrize("flag", ["--write", "--check"])
def test_read_only_files_stay_as_they_are(folder: pathlib.Path, flag: str):
    (folder / "a.py").write_text(_BEFORE)
    (folder / "a.py").chmod(0o444)

    code, out, err = _run(flag, ".")

    assert code == 1
    assert (folder / "a.py").read_text() == _BEFORE
    if flag == "--write":
        assert "a.py is left as it is: it is read-only; chmod u+w makes it writable\n" in err
    else:
        assert out == "a.py\n"


def test_what_needs_a_newer_jax_is_left(folder: pathlib.Path):
    (folder / "a.py").write_text("import jax\nx = jax.lax.pvary(1, 'i')\n")

    assert _run("--check", "a.py")[0] == 1
    assert _run("--check", "--target-jax", "0.7.2", "a.py")[0] == 0


def test_all_reasons_are_said_the_most_frequent_first(folder: pathlib.Path):
    (folder / "a.py").write_text(
        "import jax\nkind = type(jax.pmap(abs))\nprint(f'{jax.pmap(abs)}', f'{jax.pmap(len)}')\n"
    )

    _, _, err = _run("a.py")

    assert [line for line in err.splitlines() if line.startswith("  ")] == [
        "  left: a.py:3 and 1 other place: pmap stands inside of an f-string",
        "  left: a.py:2: pmap is asked about itself, and another function would answer differently",
    ]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [((), _DIFF.replace("a.py", "stdin.py")), (("--write",), _AFTER), (("--check",), "stdin.py\n")],
)
def test_the_standard_input(
    arguments: tuple[str, ...], output: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(_BEFORE.encode())))

    _, out, _ = _run(*arguments, "-")

    assert out == output


def test_bytes_outside_the_change_stay(folder: pathlib.Path):
    before = "\ufeff# \xe9t\xe9\r\nimport jax\r\nf = jax.pmap(jax.jit(abs))  # \u2713".encode()
    (folder / "a.py").write_bytes(before)

    _run("--write", "a.py")

    after = before.replace(b"jax.pmap", b"jax_dist.pmap")
    after = after.replace(b"import jax\r\n", b"import jax\r\nimport jax_dist\r\n")
    assert (folder / "a.py").read_bytes() == after


def test_a_notebook(folder: pathlib.Path):
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nothing",), "there is no file or folder nothing, seen from "),
        (("-", "."), "- reads the standard input, and goes with no other path\n"),
        (("--idiomatic", "."), "--idiomatic goes with --to jax only\n"),
        (("--one-process", "."), "--one-process goes with --to jax and --to global only\n"),
        (("--all-devices", "."), "--all-devices goes with --to jax only\n"),
        (("--helpers", "a.py", "."), "--helpers goes with --to jax only\n"),
        (
            ("--to", "jax", "--helpers", "a.py", "--helpers", "b.py", "."),
            "--helpers names one module, not 2 modules\n",
        ),
        (
            ("--to", "jax", "--helpers", "a", "."),
            "--helpers a: the name must end with .py, or be full\n",
        ),
        (
            ("--idiomatic", "--to", "jax", "."),
            "--idiomatic asks a run of the program what carries the device axis: add --verify "
            "and, behind --, a command that runs the code\n",
        ),
        (
            ("--verify", "."),
            "--verify needs a command: jax-dist migrate --verify src -- python a.py\n",
        ),
        (
            (".", "--", "python", "a.py"),
            "what stands behind -- is the command of --verify, which is not given\n",
        ),
        (
            ("--check", "--verify", ".", "--", "true"),
            "--check changes nothing, so there is nothing to --verify\n",
        ),
        (
            ("--report", "out.html", "."),
            "--report out.html: the name must end with .md, .json or .sarif\n",
        ),
        (
            ("--report", "no/out.md", "."),
            "--report no/out.md cannot be written: there is no folder no: make it first\n",
        ),
        (
            ("--verify", "--write", "--certificate", "no/proof.json", ".", "--", "true"),
            "--certificate no/proof.json cannot be written: there is no folder no: make it first\n",
        ),
        (("--verify", "-", "--", "true"), "--verify needs files, not the standard input\n"),
    ],
)
def test_misuse_is_explained(arguments: tuple[str, ...], text: str):
    assert _misuse(*arguments).startswith(f"jax-dist migrate: {text}")


def test_help_teaches(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(("migrate", "--help"))

    text = capsys.readouterr().out
    assert "exit codes: 0 all is well" in text
    assert "--verify src -- python train.py" in text


_PROGRAM = """\
import jax
import jax.numpy as jnp

step = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
print(step(jnp.arange(8.0))[0])
"""


def test_verify_runs_the_command_before_and_after(folder: pathlib.Path):
    (folder / "a.py").write_text(_PROGRAM)

    code, out, err = _run("--to", "jax", "--verify", "a.py", "--", sys.executable, "a.py")

    assert code == 0, err
    proved = "1 of 1 place proved." if CAN_REWRITE else "1 replayed 1 of 1 calls."
    assert proved in out
    assert "+    jax.shard_map(" in out
    assert (folder / "a.py").read_text() == _PROGRAM  # --write was not given


class _Trial:
    """Stands for `verified`: says how sure the places of each line are."""

    def __init__(self, **rungs: Rung) -> None:
        self.rungs = rungs
        self.given: dict[str, object] = {}

    def __call__(self, command, files, **options) -> Ledger:
        self.given = {"command": command, **options}
        entries = [
            LedgerEntry(
                each.path, each.line, each.what, self.rungs.get(f"line_{each.line}", Rung.RAN)
            )
            for file in files
            for each in file.outcomes
            if each.status == "done"
        ]
        return Ledger(tuple(command), tuple(entries), "copy")


@pytest.mark.parametrize(
    ("rung", "options", "code"),
    [
        (Rung.SAME_PROGRAM, ("--require", "proved"), 0),
        (Rung.EQUAL_BY_RULES, ("--require", "proved"), 0),
        (Rung.REPLAYED, (), 0),
        (Rung.REPLAYED, ("--require", "proved"), 1),
        (Rung.SAME_IN_TWO_RUNS, ("--require", "replayed"), 0),
        (Rung.SAME_IN_TWO_RUNS, ("--require", "proved"), 1),
        (Rung.RAN, (), 1),
        (Rung.RAN, ("--require", "replayed"), 1),
        (Rung.RAN, ("--require", "ran"), 0),
        (Rung.NEVER_RAN, (), 1),
        (Rung.NEVER_RAN, ("--require", "ran"), 1),
        (Rung.DIFFERENT, (), 1),
        (Rung.DIFFERENT, ("--keep",), 1),
    ],
)
def test_what_is_less_sure_than_asked_for_is_put_back(
    rung: Rung, options: tuple[str, ...], code: int, folder: pathlib.Path, monkeypatch
):
    (folder / "a.py").write_text(_TWO)
    sure = _Trial(line_2=rung, line_3=Rung.SAME_PROGRAM)
    monkeypatch.setattr(trial, "verified", sure)

    found, out, _ = _run("--write", *options, "--verify", "a.py", "--", "python")

    kept = code == 0 or "--keep" in options
    first = "jax_dist.pmap(f)" if kept else "jax.pmap(f)"
    assert found == code
    assert (folder / "a.py").read_text().splitlines()[-2:] == [
        f"a = {first}",
        "b = jax_dist.pmap(g)",
    ]
    assert ("put back" in out) is not kept


_TWO = "import jax\na = jax.pmap(f)\nb = jax.pmap(g)\n"


def test_an_edit_made_meanwhile_survives_and_is_named(folder: pathlib.Path, monkeypatch):
    (folder / "a.py").write_text(_TWO)
    sure = _Trial(line_2=Rung.REPLAYED, line_3=Rung.REPLAYED)

    def verified(*args, **options) -> Ledger:
        (folder / "a.py").write_text(_TWO + "# mine\n")
        return sure(*args, **options)

    monkeypatch.setattr(trial, "verified", verified)
    code, _, err = _run("--write", "--verify", "a.py", "--", "python")

    assert code == 1
    assert (folder / "a.py").read_text() == _TWO + "# mine\n"
    assert "a.py is left as it is: it has changed since it was read" in err


def test_verify_hands_its_options_on(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "a.py").write_text(_BEFORE)
    sure = _Trial()
    monkeypatch.setattr(trial, "verified", sure)

    _run(
        *("--verify", "--devices", "4", "--timeout", "60", "--keep", "--scratch", "/scratch"),
        *("--write", "a.py", "--", "python", "train.py", "--", "--write"),
    )

    given = sure.given
    assert given.pop("progress")
    assert given == {
        "command": ("python", "train.py", "--", "--write"),
        "devices": 4,
        "timeout": 60.0,
        "scratch": ["/scratch"],
    }


def test_where_nothing_changes_there_is_nothing_to_prove(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "a.py").write_text(_AFTER)
    monkeypatch.setattr(trial, "verified", None)

    code, _, err = _run("--verify", "a.py", "--", "python")

    assert (code, err) == (0, "Nothing to migrate in 1 file.\n")


def test_no_jax_is_imported(folder: pathlib.Path):
    (folder / "a.py").write_text(_BEFORE)
    script = (
        "import sys\n"
        "from jax_dist.cli.main import main\n"
        "main(['migrate', '--to', 'jax', '--report', 'r.md', 'a.py'])\n"
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
