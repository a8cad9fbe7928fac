"""Files that commands write: over their own of an earlier run, and over nothing else."""

import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jax_dist._usage import MisuseError
from jax_dist.cli import outputs
from jax_dist.cli.main import main

_PMAP = "import jax\n\nf = jax.pmap(lambda x: x)\n"
_FORMS = ("text", "json", "sarif", "github")


def _run(*arguments: str) -> tuple[int, str]:
    """The exit code, and what is said."""
    err = io.StringIO()
    try:
        code = main(arguments, out=io.StringIO(), err=err)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, err.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_PMAP)
    (tmp_path / "clean.py").write_text("import jax\n")
    return tmp_path


_OTHERS = {
    "victim.py": (b"x = 1\n", "Python source"),
    "victim.ipynb": (b"{}", "a notebook"),
    "notes.md": (b"# Notes\n\nNo findings.\n", "other text"),
    "settings.json": (b'{"version": 1}', "other JSON"),
    "rows.json": (b'[{"path": 1}]', "other JSON"),
    "scan.sarif": (b'{"runs": [{"tool": {"driver": {"name": "ruff"}}}]}', "other JSON"),
    "weights": (b"\xff\xfe\x00\x01", "a binary file"),
}
_OPTIONS = {
    ("lint", "--write-baseline"): "a baseline",
    ("lint", "--output-file"): "a report of jax-dist lint",
    ("lint", "-o"): "a report of jax-dist lint",
}


@pytest.mark.parametrize(("command", "option"), _OPTIONS)
@pytest.mark.parametrize("name", _OTHERS)
def test_what_is_no_such_file_is_never_overwritten(
    folder: pathlib.Path, command: str, option: str, name: str
):
    data, described = _OTHERS[name]
    (folder / name).write_bytes(data)

    code, err = _run(command, option, name, "train.py")

    long = "--output-file" if option == "-o" else option
    assert code == 2
    assert err == (
        f"jax-dist {command}: {long} {name}: the file is {described}, not "
        f"{_OPTIONS[command, option]}, and is left as it is. Give another name, or remove it "
        "first.\n"
    )
    assert (folder / name).read_bytes() == data


@pytest.mark.parametrize("name", ["report.md", "report.json"])
def test_a_report_is_refused_before_anything_is_migrated(folder: pathlib.Path, name: str):
    (folder / name).write_text("mine")

    code, err = _run("migrate", "--write", "--report", name, "train.py")

    assert code == 2
    assert f"--report {name}: the file is other text, not a report of jax-dist migrate" in err
    assert (folder / name).read_text() == "mine"
    assert (folder / "train.py").read_text() == _PMAP


def test_it_is_refused_before_any_file_is_mended(folder: pathlib.Path):
    before = "import jax\nn = jax.tree_leaves(x)\n"
    (folder / "old.py").write_text(before)

    assert _run("lint", "--fix", "-o", "clean.py", "old.py")[0] == 2
    assert (folder / "old.py").read_text() == before


def test_what_was_put_there_meanwhile_is_left(folder: pathlib.Path):
    (folder / "known.json").write_text("mine")

    with pytest.raises(MisuseError, match="the file is other text, not a baseline"):
        outputs.save("--write-baseline", "known.json", "{}", "a baseline")
    assert (folder / "known.json").read_text() == "mine"


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("options", [(), ("--quiet", "--statistics")])
def test_a_report_of_lint_is_written_again(
    folder: pathlib.Path, form: str, options: tuple[str, ...]
):
    """Whatever is found, and in whatever form the earlier one was."""
    found = (("train.py", 1), ("clean.py", 0)) * (len(_FORMS) // 2) + (("train.py", 1),)
    for other, (path, code) in zip((*_FORMS, form), found, strict=True):
        said = _run("lint", *options, "--color=always", "--output-format", other, "-o", "r", path)
        assert said == (code, "")
    assert "JXD001" in (folder / "r").read_text()


@pytest.mark.parametrize("name", ["r.md", "r.json"])
def test_a_report_of_migrate_is_written_again(folder: pathlib.Path, name: str):
    for path in ("train.py", "clean.py", "train.py"):
        assert _run("migrate", "--quiet", "--report", name, path) == (0, "")

    assert "train.py" in (folder / name).read_text()


def test_a_baseline_is_written_again_and_is_no_report(folder: pathlib.Path):
    for path, count in (("train.py", "1 finding"), ("clean.py", "0 findings")):
        assert _run("lint", "--write-baseline", "known.json", path) == (
            0,
            f"Listed {count} in known.json.\n",
        )
    before = (folder / "known.json").read_text()

    for arguments in (("lint", "-o"), ("migrate", "--report")):
        code, err = _run(*arguments, "known.json", "train.py")
        assert code == 2
        assert "known.json: the file is a baseline, not a report of jax-dist" in err
    assert (folder / "known.json").read_text() == before
    assert json.loads(before) == {"version": 1, "findings": {}}


def test_an_empty_file_is_taken(folder: pathlib.Path):
    (folder / "new.json").write_text("\n")

    assert _run("lint", "--write-baseline", "new.json", "train.py")[0] == 0


def test_a_folder_is_refused(folder: pathlib.Path):
    (folder / "out").mkdir()

    code, err = _run("lint", "-o", "out", "train.py")

    assert (code, err) == (
        2,
        "jax-dist lint: --output-file out cannot be written: it is a folder\n",
    )


def test_a_device_is_written_to_and_stays_one():
    command = [sys.executable, "-m", "jax_dist", "lint", "-o", "/dev/stdout", "train.py"]

    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 1
    assert run.stdout.startswith("train.py:3:5: JXD001")
    assert _run("lint", "-o", "/dev/null", "train.py") == (1, "")
    assert not os.path.isfile("/dev/null")


def test_a_pipe_is_written_to(folder: pathlib.Path):
    os.mkfifo("pipe")
    command = [sys.executable, "-m", "jax_dist", "lint", "-o", "pipe", "train.py"]
    with subprocess.Popen(command) as run, open("pipe", encoding="utf-8") as pipe:
        assert pipe.read().startswith("train.py:3:5: JXD001")

    assert run.returncode == 1
    assert (folder / "pipe").is_fifo()
