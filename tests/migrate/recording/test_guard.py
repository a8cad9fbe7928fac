"""What Python code may write to where no overlay keeps files apart."""

import json
import os
import pathlib
import subprocess
import sys
import urllib.parse
from typing import Any

from jax_dist.migrate.verify.recording import guard

_MINE, _OTHER = "mine/a", "other/a"
# What is done, and whether it is refused. `mine` may be written to; `other` holds `a` and `sub`.
_DEEDS = {
    **{f"open('{_OTHER}', '{mode}')": True for mode in ("w", "a", "r+", "x", "wb")},
    "open('other/a')": False,
    "open('other/a', 'rb')": False,
    "open('mine/new', 'w')": False,
    "open('mine', 'w')": False,  # for the system to refuse
    "open('mine2/a', 'w')": True,
    "open('mine/link/a', 'w')": True,
    "open('mine/../other/a', 'w')": True,
    "open('other/into/a', 'w')": False,
    "open(b'other/a', 'w')": True,
    "open(pathlib.Path('other/a'), 'w')": True,
    "open(os.dup(1), 'w')": False,
    "os.open('other/a', os.O_RDONLY)": False,
    **{
        f"os.open('{_OTHER}', os.{flag})": True
        for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")
    },
    "os.open('a', os.O_WRONLY, dir_fd=folder)": True,
    "os.open('a', os.O_RDONLY, dir_fd=folder)": False,
    # The event tells of the name alone: it has to be allowed, too.
    "os.open('a', os.O_WRONLY, dir_fd=own)": True,
    "os.open('mine/a', os.O_WRONLY, dir_fd=here)": False,
    "os.open('mine/new2', os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=here)": False,
    "os.open('mine/new3', os.O_CREAT | os.O_WRONLY)": False,
    "os.open('mine/a', os.O_WRONLY, dir_fd=folder)": True,
    "os.open('mine/a', os.O_RDONLY, dir_fd=folder)": False,
    "os.open('mine/a', os.O_WRONLY, dir_fd=deep)": True,
    "os.truncate('other/a', 0)": True,
    "os.truncate('mine/a', 0)": False,
    "os.truncate(os.dup(1), 0)": False,
    "os.chmod('other/a', 0o600)": True,
    "os.chown('other/a', -1, -1)": True,
    "os.utime('other/a')": True,
    "os.utime('mine/a')": False,
    "os.setxattr('other/a', 'user.a', b'')": True,
    "os.removexattr('other/a', 'user.a')": True,
    "os.setxattr('other/a', 'mine/a', b'')": True,
    **{
        f"os.{deed}": True  # of an open folder, whatever there is under the name elsewhere
        for deed in (
            *("remove('mine/a', dir_fd=folder)", "mkdir('mine/q', dir_fd=folder)"),
            *("rmdir('mine/q', dir_fd=folder)", "symlink('/e', 'mine/q', dir_fd=folder)"),
            "rename('mine/a', 'mine/z', src_dir_fd=folder)",
            "rename('mine/a', 'mine/z', dst_dir_fd=folder)",
            "link('mine/a', 'mine/z', src_dir_fd=folder)",
            "link('mine/a', 'mine/z', dst_dir_fd=folder)",
        )
    },
    "os.remove('other/a')": True,
    "os.remove('a', dir_fd=folder)": True,
    "os.remove('mine/link')": False,  # the link, and not what it leads to
    "os.remove('other/into')": True,
    "os.rmdir('other/sub')": True,
    "os.rmdir('other/sub/')": True,
    "os.mkdir('other/new')": True,
    "os.mkdir('new', dir_fd=folder)": True,
    "os.mkdir('mine/folder')": False,
    "os.mkdir('folder2', dir_fd=own)": False,
    "os.symlink('/elsewhere', 'other/new')": True,
    "os.symlink('/elsewhere', 'mine/new-link')": False,
    "os.symlink('/elsewhere', 'new', dir_fd=folder)": True,
    "os.rename('mine/a', 'other/b')": True,
    "os.rename('other/a', 'mine/b')": True,
    "os.rename('mine/b', 'mine/c')": False,
    "os.rename('b', 'mine/c', src_dir_fd=folder)": True,
    "os.rename('mine/b', 'c', dst_dir_fd=folder)": True,
    "os.rename('b', 'c', src_dir_fd=own, dst_dir_fd=own)": False,
    "os.link('mine/a', 'other/b')": True,
    "os.link('other/a', 'mine/d')": True,
    "os.link('mine/a', 'mine/d')": False,
    "sqlite3.connect('other/b')": True,
    "sqlite3.connect('mine/db')": False,
    "sqlite3.connect(':memory:')": False,
    "sqlite3.connect('file:other/b', uri=True)": True,
    "sqlite3.connect('file:other/a?mode=ro', uri=True)": False,
    "sys.audit('open', 'other/a', 'w', None)": False,
    "os.mkdir(os.path.abspath('mine/folder3'), dir_fd=folder)": False,
    "os.mkdir(os.path.abspath('other/folder3'), dir_fd=own)": True,
    "os.stat('other/a')": False,
    "os.listdir('other')": False,
}
_PROGRAM = """\
import importlib.util, json, os, pathlib, sqlite3, sys

spec = importlib.util.spec_from_file_location("guard", sys.argv[1])
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
folder, own, here, deep = (
    os.open(name, os.O_RDONLY) for name in ("other", "mine", ".", "mine/deep")
)
real = os.open
guard.install("records", ["mine", "records", "written"])
found = {"wrapped": os.open is not real and os.open.__name__ == "open"}
for deed in json.load(sys.stdin):
    try:
        eval(deed)
        found[deed] = False
    except PermissionError as error:
        found[deed] = "--scratch FOLDER" in str(error) and error.filename
    except OSError:  # of the system
        found[deed] = False
plain = real("mine/new4", os.O_CREAT | os.O_WRONLY)
found["mode"] = os.stat(plain).st_mode & 0o777
print(json.dumps(found))
"""


def _done(folder: pathlib.Path) -> dict[str, Any]:
    """All deeds in one process; those that are refused leave all as it was."""
    for name in ("mine", "mine2", "records", "other/sub", "mine/deep/mine"):
        (folder / name).mkdir(parents=True)
    for name in (_MINE, "mine/b", _OTHER):
        (folder / name).write_text("text")
    (folder / "mine" / "link").symlink_to(folder / "other")
    (folder / "mine" / "deep" / "mine" / "a").symlink_to(folder / "other" / "a")
    (folder / "other" / "into").symlink_to(folder / "mine")
    command = [sys.executable, "-S", "-c", _PROGRAM, guard.__file__]
    done = subprocess.run(
        command, cwd=folder, input=json.dumps([*_DEEDS]), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_refused_and_how_that_is_told(tmp_path: pathlib.Path):
    found = _done(tmp_path)
    assert {deed: bool(found[deed]) for deed in _DEEDS} == _DEEDS

    told = [
        json.loads(line)
        for path in (tmp_path / "records").glob("refused-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert found["wrapped"] is True
    folder = tmp_path.resolve()
    other = str(folder / "other" / "a")
    for deed in ("open('other/a', 'w')", "open('mine/link/a', 'w')", "os.remove('other/a')"):
        assert found[deed] == other
    assert found["os.rename('mine/a', 'other/b')"] == str(folder / "other" / "b")
    assert found["os.remove('other/into')"] == str(folder / "other" / "into")
    assert found["os.rmdir('other/sub/')"] == str(folder / "other" / "sub")
    assert found["os.open('mine/a', os.O_WRONLY, dir_fd=deep)"] == other
    assert len(told) == sum(_DEEDS.values())
    assert other in told
    assert (tmp_path / "other" / "a").read_text() == "text"
    assert sorted(os.listdir(tmp_path / "other")) == ["a", "into", "sub"]
    assert {"new", "new2"} <= {*os.listdir(tmp_path / "mine")}
    assert (tmp_path / "mine" / "new3").stat().st_mode & 0o777 == found["mode"]


def test_the_file_of_a_database(tmp_path: pathlib.Path):
    real = os.path.realpath
    odd = tmp_path / "a b?c"

    assert guard._database("a") == guard._database(b"a") == real("a")
    assert guard._database("") == guard._database(":memory:") == ""
    assert guard._database("file:a?cache=shared") == guard._database("file:a") == real("a")
    assert guard._database("file:a?mode=ro") == ""
    assert guard._database("file:a?cache=shared&mode=memory") == ""
    assert guard._database("file:?cache=shared") == guard._database("file::memory:") == ""
    assert guard._database(f"file:{urllib.parse.quote(str(odd))}?mode=rw") == str(odd)
    assert guard._database(f"file://{urllib.parse.quote(str(odd))}") == str(odd)
    assert guard._database("a?mode=ro") == real("a?mode=ro")
