"""`jax-dist lint` as its user sees it: what it prints, writes and exits with."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jax_dist.cli import lint_run, terminal
from jax_dist.cli.main import main
from jax_dist.lint.engine import linter
from jax_dist.lint.rules import linter_findings

_PMAP = "import jax\nstep = jax.pmap(update)\n"
_PSUM = "from jax import lax\nn = lax.psum(1, 'i')  # devices\n"
_MENDED = "from jax import lax\nn = lax.axis_size('i')  # devices\n"

_PMAP_TEXT = """\
a.py:2:8: JXD001 jax.pmap is in maintenance mode; jax-dist migrate rewrites it
2 | step = jax.pmap(update)
  |        ^^^^^^^^
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "JAX_DIST_OUTPUT_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    for page in (linter_findings.UNUSED, linter_findings.UNKNOWN):
        monkeypatch.setitem(linter.PAGES, page.code, page)
    return tmp_path


def _write(text: str, path: str = "a.py") -> pathlib.Path:
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _lint(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    try:
        code = main(("lint", *arguments), out=out, err=err)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, out.getvalue(), err.getvalue()


def _program(
    *arguments: str, data: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "jax_dist", "lint", *arguments],
        input=data,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": _ROOT, **environment},
    )


_ROOT = str(pathlib.Path(__file__).parents[2])


class TestFindings:
    def test_one(self):
        _write(_PMAP)

        assert _lint("a.py") == (1, f"{_PMAP_TEXT}\nFound 1 finding in 1 file.\n", "")

    def test_none(self):
        _write("import jax\n")

        assert _lint() == (0, "No findings.\n", "")

    def test_no_files(self):
        assert _lint() == (0, "No findings.\n", "There are no Python files or notebooks here.\n")

    def test_quiet(self):
        _write(_PMAP)

        assert _lint("-q") == (1, _PMAP_TEXT, "")
        assert _lint("-q", "--ignore", "JXD") == (0, "", "")

    def test_exit_zero(self):
        _write(_PMAP)

        assert _lint("--exit-zero")[0] == 0

    def test_statistics(self):
        _write(_PMAP + "other = jax.pmap(f)\n")
        _write(_PSUM, "b.py")

        assert _lint("--statistics")[:2] == (
            1,
            "2  JXD001      pmap-call\n"
            "1  JXD306  [*] psum-of-one\n"
            "Found 3 findings in 2 files (1 fixable with --fix).\n",
        )

    @pytest.mark.parametrize(
        ("name", "data", "said"),
        [
            ("wide.py", "x = 1\n".encode("utf-16"), "JXD901 the file is UTF-16, which "),
            ("wide.py", "x = 1\n".encode("utf-16-le"), "JXD901 Python 3"),
            ("garbage.py", b"\xff\xfe\xd8\x00\xdc", "JXD901 the file is UTF-16, which "),
            ("latin.py", "x = 'é'\n".encode("latin-1"), "JXD901 "),
            ("garbage.ipynb", b"\x80\x81", "JXD901 the file is no notebook: "),
            ("notes.txt", b"What to do: buy milk\n", "JXD901 Python 3"),
        ],
    )
    def test_a_file_that_cannot_be_read_is_a_finding_whatever_it_speaks_of(self, name, data, said):
        pathlib.Path(name).write_bytes(data)

        code, out, _ = _lint(name)
        assert code == 1
        assert re.match(rf"{name}:1:\d+: {re.escape(said)}", out)
        assert out.endswith("Found 1 finding in 1 file.\n")
        if name != "notes.txt":  # of a folder, only files that are called so are read
            assert _lint() == (1, out, "")

    @pytest.mark.parametrize("name", ["tool", "notes.txt"])
    def test_a_file_of_any_name_is_read_as_python(self, name):
        _write("x = 1\n", name)

        assert _lint(name) == (0, "No findings.\n", "")

    def test_bytes_in_the_encoding_that_the_file_names_can_be_read(self):
        pathlib.Path("a.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))

        assert _lint() == (0, "No findings.\n", "")

    def test_a_syntax_error_is_a_finding(self):
        _write("import jax\ndef pmap(:\n")

        code, out, _ = _lint("--select", "JXD001")
        assert code == 1
        assert out.startswith("a.py:2:10: JXD901 ")

    def test_a_notebook(self):
        cell = {"cell_type": "code", "source": ["%time\n", "import jax\n", "jax.pmap(f)"]}
        cell |= {"metadata": {}, "outputs": [], "execution_count": None}
        _write(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}), "a.ipynb")

        assert _lint()[1].startswith("a.ipynb:cell 1:3:1: JXD001 ")

    def test_rules_are_chosen_by_the_settings_and_then_by_the_options(self):
        _write(_PMAP)
        _write(_PSUM, "b.py")
        _write('ignore = ["pmap-call"]\n', "jax-dist.toml")

        assert "JXD001" not in _lint()[1]
        assert "JXD001" in _lint("--extend-select", "JXD001,JXD306")[1]
        assert _lint("--select", "JXD001", "--select=JXD3")[1].count("JXD001") == 1
        assert _lint("--ignore", "JXD3")[0] == 0

    def test_rules_can_be_off_in_some_files(self):
        _write(_PMAP, "tests/a.py")
        _write('per-file-ignores = { "tests/*" = ["JXD0"] }\n', "jax-dist.toml")

        assert _lint()[0] == 0
        assert _lint("tests/a.py")[0] == 0

    def test_suppressions_are_heeded_and_checked(self):
        _write("import jax\njax.pmap(f)  # noqa: JXD001\nx = 1  # noqa: JXD001\n")

        code, out, _ = _lint()
        assert code == 1
        assert out == (
            "a.py:3:8: JXD900 [*] nothing to switch off here: JXD001\n"
            "3 | x = 1  # noqa: JXD001\n"
            "  |        ^^^^^^^^^^^^^^\n"
            "  help: remove what is not used\n"
            "\n"
            "Found 1 finding in 1 file (1 fixable with --fix).\n"
        )

    def test_the_target_withholds_what_it_cannot_run(self):
        _write(_PSUM)
        _write('[project]\ndependencies = ["jax>=0.4.30"]\n', "pyproject.toml")

        assert _lint("--fix")[0] == _lint()[0]
        assert pathlib.Path("a.py").read_text() == _PSUM
        assert _lint("--fix", "--target-jax", "0.8") == (
            0,
            "No findings.\n",
            "Mended 1 finding in 1 file.\n",
        )


class TestForms:
    def test_json(self):
        _write(_PMAP)

        code, out, _ = _lint("--output-format", "json")
        assert code == 1
        assert [(each["path"], each["code"]) for each in json.loads(out)] == [("a.py", "JXD001")]

    def test_the_environment_chooses_the_form_and_the_option_goes_first(self, monkeypatch):
        _write(_PMAP)
        monkeypatch.setenv("JAX_DIST_OUTPUT_FORMAT", "github")

        assert _lint()[1].startswith("::warning ")
        assert _lint("--output-format", "text")[1].startswith("a.py:2:8: ")

    def test_a_file(self):
        _write(_PMAP)

        assert _lint("-o", "out.json", "--output-format=json") == (1, "", "")
        assert json.loads(pathlib.Path("out.json").read_text())[0]["code"] == "JXD001"

    @pytest.mark.parametrize(
        ("when", "environment", "terminal_", "expected"),
        [
            ("auto", {}, True, True),
            ("auto", {}, False, False),
            ("auto", {"NO_COLOR": "1"}, True, False),
            ("auto", {"NO_COLOR": "", "FORCE_COLOR": "1"}, False, True),
            ("auto", {"TERM": "dumb"}, True, False),
            ("always", {"NO_COLOR": "1"}, False, True),
            ("never", {"FORCE_COLOR": "1"}, True, False),
        ],
    )
    def test_colours(self, monkeypatch, when, environment, terminal_, expected):
        monkeypatch.setenv("TERM", "xterm")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        stream = io.StringIO()
        stream.isatty = lambda: terminal_

        assert terminal.wants_colour(when, stream) is expected

    def test_coloured_findings(self):
        _write(_PMAP)

        assert "\x1b[1;31mJXD001\x1b[0m" in _lint("--color", "always")[1]
        assert "\x1b" not in _lint()[1]


class TestFixes:
    def test_fix(self):
        file = _write(_PSUM + "import jax\njax.pmap(f)\n")

        code, out, err = _lint("--fix")
        assert code == 1
        assert out.startswith("a.py:4:1: JXD001 ")
        assert err == "Mended 1 finding in 1 file.\n"
        assert file.read_text() == _MENDED + "import jax\njax.pmap(f)\n"

        assert _lint("--fix")[2] == ""

    def test_diff_writes_nothing(self):
        file = _write(_PSUM)

        assert _lint("--diff") == (
            1,
            "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n from jax import lax\n"
            "-n = lax.psum(1, 'i')  # devices\n+n = lax.axis_size('i')  # devices\n",
            "Would mend 1 finding in 1 file.\n",
        )
        assert file.read_text() == _PSUM

        file.write_text(_PMAP)
        assert _lint("--diff") == (0, "", "Would mend 0 findings in 0 files.\n")

    def test_the_standard_input_is_mended_into_the_standard_output(self):
        data = b"\xef\xbb\xbf" + _PSUM.replace("\n", "\r\n").encode() + b"import jax\rjax.pmap(f)"

        run = _program("-", "--fix", "--stdin-filename", "x.py", data=data)

        assert run.stdout == data.replace(b"psum(1, ", b"axis_size(")
        assert run.stderr.startswith(b"Mended 1 finding in 1 file.\nx.py:4:1: JXD001 ")
        assert run.returncode == 1

    def test_the_standard_input(self):
        run = _program("-", data=_PMAP.encode())

        assert run.stdout.startswith(b"-:2:8: JXD001 ")
        assert run.returncode == 1

    def test_a_file_that_somebody_else_has_changed_is_left(self, monkeypatch):
        def check(source, *rest, real=linter.check):
            findings = real(source, *rest)
            if source.path == "a.py":
                file.write_text("theirs")
            return findings

        file, other = _write(_PSUM), _write(_PSUM, "b.py")
        monkeypatch.setattr(linter, "check", check)
        # As if it happened between the reading and the writing:
        monkeypatch.setattr(lint_run._Lint, "_read", lambda self, path: _PSUM.encode())

        code, out, err = _lint("--fix", "--target-jax=0.10")

        assert code == 1
        assert out.startswith("a.py:2:5: JXD306 ")
        assert err.startswith("a.py is left as it is: it has changed since it was read\n")
        assert err.endswith("1 finding in 1 file.\n")
        assert file.read_text() == "theirs"
        assert other.read_text() != _PSUM


class TestBaseline:
    def test_what_is_known_is_hidden_and_what_is_gone_is_told(self):
        file = _write(_PMAP)
        assert _lint("--write-baseline", "known.json") == (
            0,
            "",
            "Listed 1 finding in known.json.\n",
        )
        assert _lint("--baseline", "known.json") == (
            0,
            "No findings.\n",
            "known.json hides 1 known finding.\n",
        )

        file.write_text("import jax\nother = jax.pmap(f)\n")
        code, out, err = _lint("--baseline", "known.json")
        assert code == 1
        assert out.startswith("a.py:2:9: JXD001 ")
        assert err == (
            "known.json: a.py: JXD001 is gone: step = jax.pmap(update)\n"
            "--write-baseline known.json takes out what is gone.\n"
        )

    def test_the_settings_can_name_it(self):
        _write(_PMAP)
        _lint("--write-baseline", "ci/known.json".replace("ci/", ""))
        _write('baseline = "known.json"\n', "jax-dist.toml")

        assert _lint("-q") == (0, "", "")


class TestMisuse:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nothing.py"], "there is no file or folder nothing.py, seen from {folder}. "),
            (["--select", "JXD77"], "no rule is called 'JXD77'. "),
            (["--ignore", "pmap-cal"], "no rule is called 'pmap-cal'. Did you mean pmap-call?"),
            (["--target-jax", "new"], "'new' is not a version of jax, such as 0.7.2"),
            (["--config", "no.toml"], "no.toml: cannot be read: No such file or directory"),
            (["--baseline", "no.json"], "the baseline no.json cannot be read: No such file or "),
            (["-", "a.py"], "- reads the standard input, and goes with no other path"),
            (["--diff", "--write-baseline=b"], "--diff and --write-baseline do not go together"),
            (["--unsafe-fixes"], "say --fix with --unsafe-fixes to make the fixes, or --diff to "),
            (["-o", "no/out"], "--output-file no/out cannot be written: there is no folder no: "),
        ],
    )
    def test_is_explained(self, folder, arguments, message):
        _write(_PMAP)

        code, out, err = _lint(*arguments)

        assert (code, out) == (2, "")
        assert err.startswith(f"jax-dist lint: {message}".format(folder=folder))
        assert "Traceback" not in err

    def test_a_setting_is_explained(self):
        _write("selct = []\n", "jax-dist.toml")

        file = os.path.abspath("jax-dist.toml")
        assert _lint() == (
            2,
            "",
            f"jax-dist lint: {file}: there is no setting 'selct'. Did you mean select?\n",
        )

    def test_an_unknown_form_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("JAX_DIST_OUTPUT_FORMAT", "jsn")

        assert _lint() == (
            2,
            "",
            "jax-dist lint: $JAX_DIST_OUTPUT_FORMAT is 'jsn'. Did you mean json?\n",
        )

    def test_a_fault_of_ours_stays_in_its_file(self, monkeypatch):
        check = linter.check

        def broken(source, *arguments):
            if source.path == "a.py":
                raise ZeroDivisionError("a rule is broken")
            return check(source, *arguments)

        monkeypatch.setattr(linter, "check", broken)
        _write(_PMAP)
        _write(_PMAP, "b.py")

        code, out, _ = _lint(".")
        assert code == 1
        assert [line for line in out.splitlines() if ".py:" in line] == [
            "a.py:1:1: JXD901 jax-dist failed on this file (ZeroDivisionError: a rule is broken); "
            "please report it",
            "b.py:2:8: JXD001 jax.pmap is in maintenance mode; jax-dist migrate rewrites it",
        ]

    def test_a_folder_that_cannot_be_opened_is_no_clean_run(self, monkeypatch):
        def scandir(folder, real=os.scandir):
            if folder == "locked":
                raise PermissionError(13, "Permission denied")
            return real(folder)

        _write("", "locked/a.py")
        monkeypatch.setattr(os, "scandir", scandir)

        code, _, err = _lint()
        assert code == 2
        assert err.startswith("jax-dist lint: the folder locked cannot be read\n")


class TestRunning:
    def test_it_loads_nothing_heavy(self):
        _write(_PMAP)
        code = (
            "import sys\nfrom jax_dist.cli.main import main\n"
            "main(['lint', 'a.py'])\nmain(['lint', '--diff', 'a.py'])\n"
            "print(sorted({'jax', 'jaxlib', 'numpy', 'libcst'} & set(sys.modules)))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": _ROOT},
        )

        assert run.stdout.startswith("a.py:2:8: JXD001")
        assert run.stdout.splitlines()[-1] == "[]"

    def test_nobody_reads_to_the_end(self):
        class Closed(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError(32, "Broken pipe")

        _write(_PMAP)
        err = io.StringIO()

        assert main(("lint", "a.py"), out=Closed(), err=err) == 2
        assert err.getvalue() == ""

    def test_progress_is_not_told_in_a_pipe(self):
        stream = io.StringIO()
        progress = terminal.ProgressLine(stream, "files checked")
        progress._next = 0.0
        progress(1, 2)
        progress.close()

        assert stream.getvalue() == ""


def test_the_hooks_for_pre_commit_run():
    text = pathlib.Path(_ROOT, ".pre-commit-hooks.yaml").read_text()
    entries = [line.split()[1:] for line in text.splitlines() if line.startswith("  entry:")]
    _write(_PSUM)

    script, command = ["hooks/jax-dist", "lint"], ["jax-dist", "lint"]
    assert entries == [script, [*script, "--fix"], command, command]
    assert [_lint(*entry[2:], "a.py")[0] for entry in entries] == [1, 0, 0, 0]


def test_the_script_of_the_hooks_needs_no_package():
    _write(_PSUM)
    script = pathlib.Path(_ROOT, "hooks", "jax-dist")
    assert os.access(script, os.X_OK)

    run = subprocess.run(  # -I -S: without site-packages and PYTHONPATH
        [sys.executable, "-I", "-S", script, "lint", "a.py"], capture_output=True, text=True
    )

    assert (run.returncode, run.stderr) == (1, "")
    assert "Found 1 finding" in run.stdout


def test_help_teaches(capsys):
    assert _lint("--help")[0] == 0

    text = capsys.readouterr().out
    for words in ("exit codes: 0", "jax-dist lint --diff src", "[tool.jax-dist]", "noqa: JXD001"):
        assert words in text
