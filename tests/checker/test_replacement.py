"""A file is replaced as a whole, or stays."""

import os
import signal
import time
import warnings

import pytest

from jax_dist.checker.engine import replacement


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


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has files without a name")
@pytest.mark.parametrize("moment", ["fsync", "fork"])
def test_one_that_is_killed_leaves_nothing(tmp_path, monkeypatch, moment):
    (tmp_path / "a").write_bytes(b"old")
    _in_a_child(lambda: monkeypatch.setattr(os, moment, _die), tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has files without a name")
def test_one_whose_group_is_killed_between_two_names_comes_to_its_end(tmp_path, monkeypatch):
    """The file has a name of ours then, which must not be left."""
    link, parent = os.link, []

    def killed(*args, **options):
        link(*args, **options)
        os.killpg(parent[0], signal.SIGKILL)

    def prepare():
        os.setsid()
        parent.append(os.getpid())
        monkeypatch.setattr(os, "link", killed)

    (tmp_path / "a").write_bytes(b"old")
    _in_a_child(prepare, tmp_path / "a")
    deadline = time.monotonic() + 20
    while os.listdir(tmp_path) != ["a"] and time.monotonic() < deadline:
        time.sleep(0.01)

    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def _in_a_child(prepare, path) -> None:
    """Writes to a file in a process that is killed meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        prepare()
        replacement.write(str(path), b"new", expected=b"old")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def _die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
