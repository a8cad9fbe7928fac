"""`jax-dist lint` as its user sees it: what it prints, writes and exits with."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from jax_dist.cli.main import main
from jax_dist.lint.engine import linter

_PMAP = "import jax\nstep = jax.pmap(update)\n"
_PSUM = "from jax import lax\nn = lax.psum(1, 'i')  # devices\n"
_FIXED = "from jax import lax\nn = lax.axis_size('i')  # devices\n"
_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
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


def _program(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "jax_dist", "lint", *arguments],
        input=data,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )


def test_findings():
    _write(_PMAP)
    text = (
        "a.py:2:8: JXD001 jax.pmap is in maintenance mode; jax-dist migrate rewrites it\n"
        "2 | step = jax.pmap(update)\n  |        ^^^^^^^^\n"
    )

    assert _lint("a.py") == (1, f"{text}\nFound 1 finding in 1 file.\n", "")
    assert _lint("-q") == (1, text, "")
    assert _lint("-q", "--ignore", "JXD") == (0, "", "")
    assert _lint("--exit-zero")[0] == 0
    assert _lint("--output-format", "concise") == (1, text.splitlines()[0] + "\n", "")
    assert json.loads(_lint("--output-format", "json")[1])[0]["code"] == "JXD001"
    assert "\x1b[1;31mJXD001\x1b[0m" in _lint("--color", "always")[1]


def test_no_findings():
    assert _lint() == (0, "No findings.\n", "There are no Python files or notebooks here.\n")
    _write("import jax\n")
    assert _lint() == (0, "No findings.\n", "")


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("latin.py", "jax.pmap('é')\n".encode("latin-1"), ""),
        ("garbage.ipynb", b"\x80 jax.pmap", "the file is no notebook: "),
        ("notes.txt", b"What to do: buy jax, pmap\n", "Python 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_finding(name, data, reason):
    pathlib.Path(name).write_bytes(data)

    code, out, _ = _lint(name)
    assert code == 1
    assert re.match(rf"{name}:1:\d+: JXD901 {re.escape(reason)}", out)


def test_a_file_that_cannot_be_fixed_is_no_success():
    _write(_PSUM).chmod(0o444)

    code, _, err = _lint("--fix", "--exit-zero")

    assert (code, "left as it is" in err) == (1, True)


def test_the_options_and_the_settings_choose_rules():
    _write(_PMAP)
    _write(_PSUM, "tests/b.py")
    settings = '[tool.jax-dist]\nignore = ["pmap-call"]\nper-file-ignores = {"tests/*" = ["JXD3"]}'
    _write(settings, "pyproject.toml")

    assert _lint()[0] == 0
    assert "JXD001" in _lint("--extend-select", "JXD001,JXD306")[1]
    assert _lint("--select", "JXD001", "--select=JXD3")[1].count("JXD") == 1


def test_fix():
    file = _write(_PSUM + "import jax\njax.pmap(f)\n")

    code, out, err = _lint("--fix")
    assert (code, err) == (1, "Fixed 1 finding in 1 file.\n")
    assert out.startswith("a.py:4:1: JXD001 ")
    assert file.read_text() == _FIXED + "import jax\njax.pmap(f)\n"
    assert _lint("--fix")[2] == ""


def test_diff_writes_nothing():
    file = _write(_PSUM)

    assert _lint("--diff") == (
        1,
        "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n from jax import lax\n"
        "-n = lax.psum(1, 'i')  # devices\n+n = lax.axis_size('i')  # devices\n",
        "Would fix 1 finding in 1 file.\n",
    )
    assert file.read_text() == _PSUM


def test_the_standard_input_is_fixed_into_the_standard_output():
    data = b"\xef\xbb\xbf" + _PSUM.replace("\n", "\r\n").encode() + b"import jax\rjax.pmap(f)"

    run = _program("-", "--fix", "--stdin-filename", "x.py", data=data)
    assert run.stdout == data.replace(b"psum(1, ", b"axis_size(")
    assert run.stderr.startswith(b"Fixed 1 finding in 1 file.\nx.py:4:1: JXD001 ")
    assert run.returncode == 1
    assert _program("-", data=_PMAP.encode()).stdout.startswith(b"-:2:8: JXD001 ")


def test_a_file_that_somebody_else_has_changed_is_left(monkeypatch):
    file, other = _write("theirs"), _write(_PSUM, "b.py")
    # As if it happened between the reading and the writing:
    monkeypatch.setattr(linter.sources, "read_bytes", lambda path: _PSUM.encode())

    code, out, err = _lint("--fix", "--target-jax=0.10")

    assert code == 1
    assert out.startswith("a.py:2:5: JXD306 ")
    assert err.startswith("a.py: left as it is: it has changed since it was read\n")
    assert (file.read_text(), other.read_text()) == ("theirs", _FIXED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "there is no file or folder nothing.py, seen from {folder}. "),
        (["--select", "JXD77"], "no rule is called 'JXD77'. "),
        (["--ignore", "pmap-cal"], "no rule is called 'pmap-cal'. Did you mean pmap-call?"),
        (["--target-jax", "new"], "'new' is not a version of jax, such as '0.7.2'"),
        (["--config", "no.toml"], "no.toml: cannot be read: No such file or directory"),
        (["-", "a.py"], "- reads the standard input, and goes with no other path"),
        (["--unsafe-fixes"], "--unsafe-fixes needs --fix, or --diff"),
    ],
)
def test_misuse_is_explained(folder, arguments, message):
    _write(_PMAP)

    code, out, err = _lint(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"jax-dist lint: {message}".format(folder=folder))


def test_an_error_of_ours_stays_in_its_file(monkeypatch):
    def load(path, data, real=linter.load):
        if path == "a.py":
            raise ZeroDivisionError("a rule is broken")
        return real(path, data)

    monkeypatch.setattr(linter, "load", load)
    _write(_PMAP)
    _write(_PMAP, "b.py")

    assert _lint("--output-format", "concise")[1] == (
        "a.py:1:1: JXD901 jax-dist failed (ZeroDivisionError: a rule is broken); please report it\n"
        "b.py:2:8: JXD001 jax.pmap is in maintenance mode; jax-dist migrate rewrites it\n"
    )


def test_a_named_file_that_is_skipped_makes_no_clean_run():
    os.symlink("/proc/self/environ", "x.py")

    code, out, err = _lint("x.py")
    assert (code, out) == (2, "No findings.\n")
    assert err.startswith("jax-dist lint: skipped: x.py is no regular file, and links are not ")


def test_it_loads_nothing_heavy():
    _write(_PMAP)
    code = (
        "import sys\nfrom jax_dist.cli.main import main\n"
        "main(['lint', 'a.py'])\nmain(['lint', '--diff', 'a.py'])\n"
        "print(sorted({'jax', 'jaxlib', 'numpy', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(_ROOT)}
    )

    assert run.stdout.splitlines()[-1] == "[]"


def test_the_hooks_for_pre_commit_run():
    hooks = yaml.safe_load((_ROOT / ".pre-commit-hooks.yaml").read_text())
    _write(_PSUM)

    codes = []
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        if program == "hooks/jax-dist":  # -I -S: without site-packages and PYTHONPATH
            command = [sys.executable, "-I", "-S", _ROOT / program, *arguments, "a.py"]
            codes.append(subprocess.run(command, capture_output=True, check=False).returncode)
        else:
            codes.append(_lint(*arguments[1:], "a.py")[0])
    assert [hook["id"] for hook in hooks] == ["jax-dist-lint", "jax-dist-fix"]
    assert codes == [1, 0]
    assert os.access(_ROOT / "hooks" / "jax-dist", os.X_OK)


def test_the_steps_of_the_action_run():
    action = yaml.safe_load((_ROOT / "action.yml").read_text())
    _write(_PSUM, "src/a.py")
    inputs = {name: each["default"] for name, each in action["inputs"].items()}

    def run(**given: str) -> subprocess.CompletedProcess[str]:
        (step,) = action["runs"]["steps"]
        env = {**os.environ, "GITHUB_ACTION_PATH": str(_ROOT)}
        for name, text in step["env"].items():
            env[name] = {**inputs, **given}[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", text)[1]]
        command = ["bash", "-e", "-c", step["run"]]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    found = run()
    assert found.returncode == 1
    assert found.stdout.startswith("::warning title=jax-dist (JXD306),file=src/a.py,line=2,")
    assert run(paths="src", options="--ignore JXD306").returncode == 0


def test_the_problem_matcher_reads_the_concise_form():
    matcher = json.loads((_ROOT / ".github" / "jax-dist-matcher.json").read_text())
    (pattern,) = matcher["problemMatcher"][0]["pattern"]
    cell = {"cell_type": "code", "source": "import jax\njax.pmap(f)"}
    _write(json.dumps({"cells": [cell]}), "b.ipynb")
    _write(_PMAP)

    lines = _lint("--output-format", "concise")[1].splitlines()
    found = [re.match(pattern["regexp"], line) for line in lines]
    assert [
        [match[pattern[name]] for name in ("file", "line", "column", "code")] for match in found
    ] == [["a.py", "2", "8", "JXD001"], ["b.ipynb", "2", "1", "JXD001"]]
