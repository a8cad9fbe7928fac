"""`migrate --write --verify`, ended in many ways: the tree is as it was, or as announced.

All here run the command as a user would, on a program that maps functions in several files and has
a child of its own. It sends how far it is, for no file that it writes can be seen here.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.slow

_ROOT = str(pathlib.Path(__file__).parents[3])
_HELPERS = 8
_RUNS = 3  # what carries the device axis; before the migration; after it
_PROGRAM = """\
import os, pathlib, signal, socket, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if os.environ["MODE"] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import jax
import numpy as np
import {names}
f = jax.pmap(lambda x: x * 2)
x = f(np.ones(jax.device_count()))
for module in ({names}):
    x = module.f(x)
pathlib.Path("written.txt").write_text("by the program")
port = int(os.environ["PORT"])
socket.socket(type=socket.SOCK_DGRAM).sendto(b"reached", ("127.0.0.1", port))
time.sleep(float(os.environ["SECONDS"]))
"""
_EDIT = "# mine\n"


@dataclass(frozen=True)
class _Project:
    folder: pathlib.Path
    heard: socket.socket

    @property
    def tree(self) -> pathlib.Path:
        return self.folder / "project"

    @property
    def temporary(self) -> pathlib.Path:
        return self.folder / "temporary"

    def content(self) -> dict[str, tuple[bytes, int]]:
        files = (each for each in self.tree.rglob("*") if each.is_file())
        return {
            str(each.relative_to(self.tree)): (each.read_bytes(), each.stat().st_mode)
            for each in files
        }

    def started(self, *options: str, seconds: float = 0, mode: str = "") -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": _ROOT,
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.temporary),
            "PORT": str(self.heard.getsockname()[1]),
            "SECONDS": str(seconds),
            "MODE": mode,
        }
        proof = ["--verify", ".", "--", sys.executable, "program.py"]
        # `nohup`, around the tests, has SIGHUP ignored, and a shell may do so with the others.
        script = "import signal, sys\n"
        script += "for each in (1, 2, 3): signal.signal(each, signal.SIG_DFL)\n"
        script += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        script += "from jax_dist.cli.main import main\nsys.exit(main())\n"
        return subprocess.Popen(
            [sys.executable, "-c", script, "migrate", "--to", "jax", *options, *proof],
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def is_reached(self) -> bool:
        """Whether the program has run to where it rests."""
        try:
            return bool(self.heard.recv(10, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def alive(self) -> list[str]:
        """The command lines of all that was started here, by the process table."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = []
        for each in pathlib.Path("/proc").iterdir():
            try:
                if each.name.isdigit() and mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append((each / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # gone, or a zombie
                continue
        return found


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    with socket.socket(type=socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        yield made


@pytest.fixture
def project(tmp_path: pathlib.Path, heard: socket.socket) -> _Project:
    made = _Project(tmp_path, heard)
    for folder in (made.tree, made.temporary):
        folder.mkdir()
    (made.tree / "pyproject.toml").touch()
    names = [f"helper_{number}" for number in range(_HELPERS)]
    (made.tree / "program.py").write_text(_PROGRAM.format(names=", ".join(names)))
    for name in names:
        (made.tree / f"{name}.py").write_text("import jax\nf = jax.pmap(lambda x: x + 1)\n")
        (made.tree / f"{name}.py").chmod(0o640)
    return made


@pytest.fixture
def announced(project: _Project, tmp_path: pathlib.Path) -> dict[str, tuple[bytes, int]]:
    """What the project holds when it is migrated with a proof that nothing disturbs."""
    (tmp_path / "other").mkdir()
    other = _Project(tmp_path / "other", project.heard)
    shutil.copytree(project.folder, other.folder, dirs_exist_ok=True, ignore=_itself)
    process = other.started("--write")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert os.listdir(other.temporary) == []
    for _ in range(_RUNS):  # of this one, not of the test's
        project.heard.recv(10, socket.MSG_DONTWAIT)
    return other.content()


def _itself(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "other"]


def _waited_for(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _edit(path: pathlib.Path) -> None:
    with path.open("a") as file:
        file.write(_EDIT)


def _send(process: subprocess.Popen, number: int, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(process.pid, number)


def _check_whole(project: _Project, before: dict, announced: dict, edited: Sequence[str] = ()):
    """Each file is one of both, no other one is there, and nothing runs on.

    What is killed while it writes leaves the file that it was about to rename.
    """
    assert _waited_for(lambda: not project.alive(), 20), project.alive()
    for unfinished in project.tree.glob("*.py.*.tmp"):
        unfinished.unlink()
    now = project.content()
    assert set(before) <= set(now) <= {*before, *announced}
    for name, content in now.items():
        if name in edited:
            assert content[0].endswith(_EDIT.encode())
            content = (content[0].removesuffix(_EDIT.encode()), content[1])
            assert content == before[name]
        else:
            assert content in (before.get(name), announced.get(name)), name


def test_what_is_announced_is_written(project: _Project, announced: dict):
    """A process that is killed later is compared with this."""
    process = project.started("--write")
    output, _ = process.communicate(timeout=300)

    assert process.returncode == 0, output
    assert project.content() == announced
    assert project.content()["helper_0.py"][1] & 0o777 == 0o640
    assert os.listdir(project.temporary) == []
    assert _waited_for(lambda: not project.alive(), 20)


_TERM, _INT, _HUP, _QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
_CASES = {  # the signals, whether all of the group get them, and how the program takes them
    "TERM": ([_TERM], False, ""),
    "INT": ([_INT], False, ""),
    "INT of the group": ([_INT], True, ""),
    "HUP": ([_HUP], False, ""),
    "HUP of the group": ([_HUP], True, ""),
    "QUIT": ([_QUIT], False, ""),
    "INT twice, of one that is deaf": ([_INT] * 2, False, "deaf"),
    "TERM twice, of one that is deaf": ([_TERM] * 2, False, "deaf"),
    "INT five times": ([_INT] * 5, False, ""),
    "KILL": ([signal.SIGKILL], False, ""),
    "KILL of the group": ([signal.SIGKILL], True, ""),
}


@pytest.mark.parametrize("case", list(_CASES))
def test_a_signal_ends_all_and_changes_nothing(project: _Project, case: str):
    signals, group, mode = _CASES[case]
    before = project.content()
    process = project.started("--write", seconds=300, mode=mode)
    assert _waited_for(project.is_reached), process.poll()
    _edit(project.tree / "helper_1.py")
    for number in signals:
        _send(process, number, group=group)
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)

    assert process.returncode != 0, output
    _check_whole(project, before, {}, ["helper_1.py"])
    if signal.SIGKILL not in signals:
        assert os.listdir(project.temporary) == []


@pytest.mark.parametrize("options", [["--write"], []])
def test_an_edit_made_meanwhile_survives(project: _Project, announced: dict, options: list[str]):
    before, write = project.content(), bool(options)
    process = project.started(*options, seconds=2)
    project.heard.settimeout(120)
    for _ in range(_RUNS):
        project.heard.recv(10)
    _edit(project.tree / "helper_1.py")
    output, _ = process.communicate(timeout=300)

    assert process.returncode == (1 if write else 0), output
    assert ("helper_1.py is left as it is" in output) is write
    now = project.content()
    assert now.pop("helper_1.py")[0].endswith(_EDIT.encode())
    for each in (before, announced):
        each.pop("helper_1.py")
    assert now == (announced if write else before)


def test_it_may_be_killed_at_any_moment(project: _Project, announced: dict):
    """Thirty moments, of the process and of its group; a third of them while it writes."""
    before = project.content()
    began = time.monotonic()
    process = project.started()
    process.communicate(timeout=300)
    seconds = time.monotonic() - began
    drawn = random.Random(15)
    partly = 0
    for number in range(30):
        process = project.started("--write")
        if number % 3 == 2:
            while process.poll() is None and project.content() == before:
                time.sleep(0.001)
            time.sleep(drawn.uniform(0, 0.02))
        else:
            time.sleep(drawn.uniform(0, seconds))
        edited = ["program.py"] if number % 5 == 0 and project.content() == before else []
        for name in edited:
            _edit(project.tree / name)
        _send(process, signal.SIGKILL, group=bool(number % 2))
        process.communicate(timeout=60)
        _check_whole(project, before, announced, edited)
        partly += project.content() not in (before, announced)
        for name, (data, mode) in before.items():
            (project.tree / name).write_bytes(data)
            (project.tree / name).chmod(mode)
        for name in set(announced) - set(before):
            (project.tree / name).unlink(missing_ok=True)

    process = project.started()
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert os.listdir(project.temporary) == []  # what killed ones have left goes with the next
    assert partly  # else no moment lay between two files
