"""What a program does to files while it is verified does not last, wherever they lie."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest

from jax_dist._usage import MisuseError
from jax_dist.migrate.results import FileMigration, PlaceResult
from jax_dist.migrate.verify import isolation, sandbox, workplace
from jax_dist.migrate.verify.ledger import Ledger
from jax_dist.migrate.verify.trial import verified

_WAYS = {"overlay": "", "locked copy": "1", "copy": "unlocked"}


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder)
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    for name in ("best.ckpt", "second.ckpt", "sub/last.ckpt"):
        (outside / name).write_text("mine")
    (folder / "link").symlink_to(outside)
    return folder


@pytest.fixture(params=["overlay", "locked copy", pytest.param("copy", marks=pytest.mark.thorough)])
def way(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch) -> str:
    """Each way of keeping runs apart that this machine has."""
    monkeypatch.setenv("JAX_DIST_VERIFY_BY_COPY", _WAYS[request.param])
    (tmp_path / "trial").mkdir()
    found = sandbox.Workspace([], tmp_path / "trial", [tmp_path / "project"], 8, None).way
    if found != request.param:
        pytest.skip(f"runs are kept apart by another way here: {found}")
    return request.param


def _verified(project: pathlib.Path, text: str, **options: object) -> Ledger:
    file = project / "program.py"
    file.write_text(text)
    migrated = FileMigration(str(file), file.read_bytes(), file.read_bytes() + b"print('end')\n")
    return verified([sys.executable, "program.py"], [migrated], **options)


def _tree(folder: pathlib.Path) -> dict[str, tuple[bytes, int]]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each): (each.read_bytes(), each.stat().st_mode) for each in files}


_HARM = {
    "it deletes": "os.remove(outside + '/best.ckpt')",
    "it writes over": "open(outside + '/best.ckpt', 'w').write('theirs')",
    "it writes a new file": "open(outside + '/new.ckpt', 'w').write('theirs')",
    "it renames": "os.rename(outside + '/best.ckpt', outside + '/old.ckpt')",
    "it renames a folder": "os.rename(outside + '/sub', outside + '/old')\n"
    "print(open(outside + '/old/last.ckpt').read(), os.path.exists(outside + '/sub'))",
    "it takes": "shutil.move(outside + '/best.ckpt', 'best.ckpt')",
    "it puts over": "open('new', 'w').close(); shutil.move('new', outside + '/best.ckpt')",
    "it removes a tree": "shutil.rmtree(outside)",
    "it cuts off": "os.truncate(outside + '/best.ckpt', 0)",
    "it makes a folder": "os.makedirs(outside + '/sub/new')",
    "it changes rights": "os.chmod(outside + '/best.ckpt', 0o777)",
    "through a link": "os.remove('link/best.ckpt')",
    "through a link in the project": "open('link/sub/last.ckpt', 'a').write('theirs')",
    "from an open folder": "folder = os.open(outside, os.O_RDONLY)\n"
    "os.open('best.ckpt', os.O_WRONLY | os.O_TRUNC, dir_fd=folder)",
    "a database": "import sqlite3\n"
    "sqlite3.connect(outside + '/best.db').execute('create table t(x)')",
    "by a hard link": "try: os.link(outside + '/best.ckpt', 'a'); open('a', 'a').write('theirs')\n"
    "except OSError: os.chmod(outside, 0)",
}
_NATIVE = {
    "another program": "subprocess.run(['rm', '-r', outside])",
    "another Python": "subprocess.run([sys.executable, '-I', '-c', 'import shutil, sys; "
    "shutil.rmtree(sys.argv[1])', outside])",
    "native code": "ctypes.CDLL(None).unlink(os.fsencode(outside + '/best.ckpt'))",
}


def _harmful(harm: str, tmp_path: pathlib.Path) -> str:
    return (
        "import ctypes, os, shutil, subprocess, sys\n"
        f"outside = {str(tmp_path / 'outside')!r}\n"
        f"print(sorted(os.listdir(outside)))\n{harm}\n"
    )


@pytest.mark.parametrize("harm", _HARM.values(), ids=_HARM)
def test_no_file_outside_of_the_project_is_lost(
    project: pathlib.Path, tmp_path: pathlib.Path, way: str, harm: str
):
    before = _tree(tmp_path / "outside")
    found = _verified(project, _harmful(harm, tmp_path))

    assert _tree(tmp_path / "outside") == before
    assert found.runs is not None
    if way == "overlay":  # it runs as ever, and neither run sees what the other one did
        assert (found.runs.before.exit_code, found.runs.after.exit_code) == (0, 0)
        assert found.runs.before.output + "\nend" == found.runs.after.output
    else:
        assert found.runs.before.exit_code == found.runs.after.exit_code == 1
        (note,) = [each for each in found.notes if "kept from writing to" in each]
        assert str(tmp_path / "outside") in note
        assert "--scratch FOLDER" in note


@pytest.mark.parametrize("harm", _NATIVE.values(), ids=_NATIVE)
def test_no_file_is_lost_by_what_is_not_python_code(
    project: pathlib.Path, tmp_path: pathlib.Path, way: str, harm: str
):
    if way == "copy":
        pytest.skip("this way sees Python code only, and its report says so")
    before = _tree(tmp_path / "outside")
    _verified(project, _harmful(harm, tmp_path))

    assert _tree(tmp_path / "outside") == before


def test_what_is_no_file_of_the_user_can_be_written(project: pathlib.Path, way: str):
    """The null device, temporary files, shared memory, locks between processes."""
    found = _verified(
        project,
        "import multiprocessing, os, tempfile\n"
        "from multiprocessing import shared_memory\n"
        "open(os.devnull, 'w').write('x')\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    open(os.path.join(folder, 'a'), 'w').write('x')\n"
        "with multiprocessing.Lock():\n"
        "    memory = shared_memory.SharedMemory(create=True, size=8)\n"
        "memory.close(); memory.unlink()\n",
    )

    assert found.runs is not None
    assert found.runs.after.exit_code == 0, found.runs.after.output
    assert not any("--scratch" in each for each in found.notes)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_for_scratch_is_written_to_and_empty_again(
    project: pathlib.Path, tmp_path: pathlib.Path, way: str, *, is_new: bool
):
    folder = tmp_path / "scratch"
    if not is_new:
        folder.mkdir()
    found = _verified(
        project,
        f"import os\nprint(os.listdir({str(folder)!r}))\n"
        f"os.makedirs({str(folder / 'run' / '1')!r})\n"
        f"open({str(folder / 'run' / 'best.ckpt')!r}, 'w').write('theirs')\n",
        scratch=[str(folder)],
    )

    assert found.runs is not None
    assert (found.runs.before.output, found.runs.after.output) == ("[]", "[]\nend")
    assert not any("--scratch" in each for each in found.notes)
    assert not folder.exists() if is_new else os.listdir(folder) == []


def test_a_notebook_runs_as_it_is(project: pathlib.Path):
    """Its text is an expression of Python, too."""
    file = project / "a.ipynb"
    file.write_text('{"cells": []}')
    migrated = FileMigration(str(file), file.read_bytes(), b'{"cells": [{}]}')
    program = f"import json; print(json.load(open({str(file)!r})))"
    found = verified([sys.executable, "-c", program], [migrated])

    assert found.runs is not None
    outputs = found.runs.before.output, found.runs.after.output
    assert outputs == ("{'cells': []}", "{'cells': [{}]}")


def test_what_a_link_in_the_place_of_scratch_leads_to_stays(
    project: pathlib.Path, tmp_path: pathlib.Path, way: str
):
    before, folder = _tree(tmp_path / "outside"), tmp_path / "scratch"
    _verified(
        project,
        f"import os\nos.rmdir({str(folder)!r})\n"
        f"os.symlink({str(tmp_path / 'outside')!r}, {str(folder)!r})\n",
        scratch=[str(folder)],
    )

    assert _tree(tmp_path / "outside") == before
    assert not os.path.lexists(folder)


def test_a_folder_that_holds_files_is_no_scratch(project: pathlib.Path, tmp_path: pathlib.Path):
    outside = str(tmp_path / "outside")
    with pytest.raises(MisuseError, match="must be a new folder or an empty one"):
        _verified(project, "pass\n", scratch=[outside])

    assert len(_tree(tmp_path / "outside")) == 3


def test_a_folder_of_the_project_is_no_scratch(project: pathlib.Path):
    with pytest.raises(MisuseError, match=r"/project/new: it lies in the project"):
        _verified(project, "pass\n", scratch=["new"])

    assert not (project / "new").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process was started for")
@pytest.mark.parametrize(
    ("program", "child"),
    [(sys.executable, "import time; time.sleep(600) # {}"), ("sh", "sleep 600; true {}")],
    ids=["Python", "a shell"],
)
def test_what_a_program_starts_in_a_session_of_its_own_ends_too(
    project: pathlib.Path, way: str, program: str, child: str
):
    child = child.format(project)
    found = _verified(
        project,
        "import subprocess\n"
        f"subprocess.Popen([{program!r}, '-c', {child!r}], start_new_session=True)\n",
    )

    left = []
    for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            left += [line for line in [each.read_bytes()] if child.encode() in line]
    assert left == []
    assert found.runs is not None
    assert not found.runs.is_complete  # nobody knows what it would have called
    (before, after) = (each for each in found.runs.unproven if "still ran" in each)
    assert child in before
    assert after.endswith("still ran when the command ended after the migration: wait for it")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process was started for")
@pytest.mark.parametrize(
    "start",
    [
        "import multiprocessing\n"
        "multiprocessing.get_context('spawn').Process(target=print).start()\n",
        "import multiprocessing\nmultiprocessing.get_context('forkserver').Pool(1).map(abs, [1])\n",
        "import subprocess\nsubprocess.Popen(['sleep', '600'])\n",
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.5)'])\n",
    ],
    ids=["a process", "a pool", "no Python", "one that ends at once"],
)
def test_what_ends_by_itself_or_is_no_python_hides_no_calls(project: pathlib.Path, start: str):
    found = _verified(project, f"if __name__ == '__main__':\n{textwrap.indent(start, '    ')}")

    assert found.runs is not None
    assert found.runs.is_complete


def test_what_cannot_be_copied_is_left_out(project: pathlib.Path, way: str):
    """A pipe would never end; opening a socket fails."""
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")  # its path may be too long from the root
        found = _verified(project, "import os\nprint(sorted(os.listdir()))\n")

    assert found.exit_code == 0
    assert found.runs is not None
    there = ["link", "pipe", "program.py", "pyproject.toml", "socket"]
    wanted = there if way == "overlay" else [e for e in there if e not in ("pipe", "socket")]
    assert found.runs.before.output == str(wanted)


@pytest.mark.parametrize("name", ["gone", "folder"])
def test_what_goes_while_it_is_copied_is_passed_over(
    project: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    (project / "gone").touch()
    (project / "folder").mkdir()

    def chosen(path: pathlib.Path) -> bool:  # asked before anything of its folder is copied
        if path.name == name:
            path.unlink() if path.is_file() else path.rmdir()
        return True

    monkeypatch.setattr(workplace, "_is_copied", chosen)
    workplace.copy(project, {project: tmp_path / "copy"})

    there = {"folder", "gone", "link", "pyproject.toml"}
    assert {*os.listdir(tmp_path / "copy")} == there - {name}


def test_what_cannot_be_read_is_named(
    project: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    os.mkfifo(project / "pipe")
    monkeypatch.setattr(workplace, "_is_copied", lambda path: True)
    with pytest.raises(MisuseError, match=r"--verify has to copy \S+/project/pipe, and cannot: "):
        workplace.copy(project, {project: tmp_path / "copy"})


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("at", ["project", "around it"])
def test_a_program_may_ask_git(project: pathlib.Path, way: str, at: str):
    top = str(project if at == "project" else project.parent)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", "-C", top, *words], check=True)
    asked = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    found = _verified(
        project,
        f"import subprocess\nprint(subprocess.check_output({asked}, text=True).strip())\n",
    )

    assert found.runs is not None
    assert found.runs.before.output == head.strip()
    assert found.exit_code == 0


_START = b"__import__('runpy').run_path('/a/sitecustomize.py', run_name='_jax_dist_late')"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"import jax\n", _START + b"; import jax\n"),
        (b'"""Doc."""\r\nimport jax\r\n', b'"""Doc."""\r\n' + _START + b"; import jax\r\n"),
        (b"\n\nif a:\n    b\n", b"\n" + _START + b"\nif a:\n    b\n"),
        (b"\xef\xbb\xbfimport jax\n", b"\xef\xbb\xbf" + _START + b"; import jax\n"),
        (b"# a\n@b\nclass A: pass\n", b"# a\n@b\nclass A: pass\n"),
        (b"from __future__ import annotations\n", b"from __future__ import annotations\n"),
        (b"if a:\n    b\n", b"if a:\n    b\n"),
        (b"a b\n", b"a b\n"),
        (b"", b""),
    ],
)
def test_a_file_starts_the_recording_and_keeps_its_lines(data: bytes, expected: bytes):
    assert sandbox._with_start(data, pathlib.Path("/a")) == expected


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_a_python_without_our_path_is_recorded(project: pathlib.Path, flag: str):
    file = project / "program.py"
    before = b"import sys\nprint(sys.flags.ignore_environment)\nx = 1\n"
    file.write_bytes(before)
    after = before.replace(b"x = 1", b"x = 2")
    place = PlaceResult("program.py", 3, None, "", "done", "1")
    migrated = FileMigration(str(file), before, after, (place,))
    found = verified([sys.executable, flag, "program.py"], [migrated])

    assert found.exit_code == 0
    assert found.runs is not None
    assert found.runs.before.output == found.runs.after.output == "1"


def test_a_mount_point_may_have_any_name(tmp_path: pathlib.Path):
    listed = tmp_path / "mountinfo"
    listed.write_bytes(b"1 2 0:1 / /mnt/a\\040b\\134c rw - ext4 /dev/a rw\n")

    assert [*isolation.mount_points(str(listed))] == ["/mnt/a b\\c"]
