"""A file is replaced as a whole, or stays."""

import os
import signal
import warnings

import pytest

from jax_dist.lint.engine import replacement


def test_permissions_and_links_stay(tmp_path):
    file, link = tmp_path / "a.py", tmp_path / "link.py"
    file.write_bytes(b"old")
    file.chmod(0o751)
    link.symlink_to("a.py")

    replacement.write(str(link), b"new", expected=b"old")

    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o751
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.py", "link.py"]


def test_a_file_that_was_changed_meanwhile_is_left(tmp_path):
    file = tmp_path / "a.py"
    file.write_bytes(b"theirs")

    with pytest.raises(replacement.ChangedError, match="it was changed by somebody else"):
        replacement.write(str(file), b"ours", expected=b"old")

    assert file.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["a.py"]


def test_a_new_file(tmp_path):
    replacement.write(str(tmp_path / "a"), b"x")

    assert (tmp_path / "a").read_bytes() == b"x"


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def replace(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        replacement.write(str(tmp_path / "a"), b"x")

    assert os.listdir(tmp_path) == []


def test_one_that_is_killed_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        replacement.write(str(tmp_path / "a"), b"new", expected=b"old")
        os._exit(0)

    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
