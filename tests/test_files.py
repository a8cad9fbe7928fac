"""Writing a file: all of the new content or all of the old, and no other file is touched."""

import errno
import os
import pathlib

import pytest

from jax_dist._files import write_atomically


def _existing(folder: pathlib.Path, content: bytes = b"old", mode: int = 0o640) -> pathlib.Path:
    path = folder / "x.py"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o751])
@pytest.mark.parametrize("data", ["new ü", "new ü".encode()])
def test_an_existing_file_keeps_its_mode_and_its_neighbours(tmp_path, mode, data):
    path = _existing(tmp_path, mode=mode)
    other = tmp_path / f"x.py.{os.getpid()}.tmp"
    other.write_text("of another program")

    write_atomically(path, data, expected=b"old")

    assert path.read_text(encoding="utf-8") == "new ü"
    assert path.stat().st_mode & 0o7777 == mode
    assert other.read_text() == "of another program"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files away")
def test_an_existing_file_keeps_its_owner(tmp_path):
    path = _existing(tmp_path)
    os.chown(path, 12, 34)

    write_atomically(path, b"new")

    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    (tmp_path / "plain").touch()

    write_atomically(tmp_path / "new", b"")

    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    path, link = _existing(tmp_path), tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(path)

    write_atomically(link, b"new")

    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert os.listdir(link.parent) == ["link"]


def _fail(error: BaseException):
    def fail(*args):
        raise error

    return fail


_FAILURES = {
    "full disk": ("fsync", _fail(OSError(errno.ENOSPC, "No space left on device")), "No space"),
    "interrupted": ("fsync", _fail(KeyboardInterrupt()), None),
    "exit": ("replace", _fail(SystemExit(1)), None),
    "another owner": ("chown", _fail(PermissionError(1, "no")), "owner and group would change"),
    "read-only mount": ("open", _fail(OSError(errno.EROFS, "Read-only file system")), "Read-only"),
    "changed": (None, None, "it has changed since it was read"),
    "read-only": (None, None, r"read-only; chmod u\+w"),
    "a pipe": (None, None, "not a regular file"),
}


@pytest.mark.parametrize("name", _FAILURES)
def test_a_failure_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch, name):
    function, fail, message = _FAILURES[name]
    path = _existing(tmp_path)
    if name == "read-only" or name == "read-only mount":
        path.chmod(0o444)
    if name == "another owner":
        monkeypatch.setattr(os, "stat", lambda path: _OtherOwner(os.lstat(path), path))
    if name == "a pipe":
        path.unlink()
        os.mkfifo(path)
    if function is not None:
        monkeypatch.setattr(os, function, fail)
    expected = b"another" if name == "changed" else None

    with pytest.raises((OSError, KeyboardInterrupt, SystemExit), match=message) as raised:
        write_atomically(path, b"new", expected=expected)

    monkeypatch.undo()
    assert ("chmod" in str(raised.value)) == (name == "read-only")
    assert name == "a pipe" or path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.py"]


class _OtherOwner:
    """The status of a file, as if the temporary one belonged to another user."""

    def __init__(self, status: os.stat_result, path: str):
        self.st_mode, self.st_gid = status.st_mode, status.st_gid
        self.st_uid = status.st_uid + os.fspath(path).endswith(".tmp")
