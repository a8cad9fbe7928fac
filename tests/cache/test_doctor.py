"""What the doctor finds, what he mends, and that nothing healthy is lost."""

import os
import pathlib
import stat
import zlib

import cache_runs
import pytest

from jax_dist import cache
from jax_dist.cache import diagnosis
from jax_dist.cache.entries import sealed

HASHES = [letter * 64 for letter in "0123456789abcdef"]
GOOD = zlib.compress(b"\0\0\0\x02" + b"program")
_OLD = 1_000_000_000.0  # seconds since 1970


def _entry(folder, name, place=0, data=GOOD, *, used=False, **writer):
    path = folder / f"{name}-{HASHES[place]}-cache"
    path.write_bytes(sealed(path.name.removesuffix("-cache"), data, **writer) if writer else data)
    os.utime(path, (_OLD + used, _OLD))
    return path


def _kinds(health):
    return [finding.kind for finding in health.findings]


@pytest.fixture(autouse=True)
def _much_space(monkeypatch):
    """How full the disk of the test is, is not what most tests are about."""
    monkeypatch.setattr(diagnosis, "_SCARCE", 0)


def test_a_healthy_cache(tmp_path):
    _entry(tmp_path, "jit_step")
    health = cache.doctor(tmp_path)

    assert str(health) == f"{tmp_path}: 1 entry, 19 B; all is well"
    assert health.healthy


def test_each_kind_of_damage_is_found_and_removed(tmp_path):
    program = cache_runs.run(tmp_path, functions=["step", *cache_runs.DAMAGES])
    part = pathlib.Path(program["folder"])
    cache_runs.damage_all(tmp_path)
    before = {path.name for path in part.iterdir()}
    found = cache.doctor(tmp_path)
    mended = cache.doctor(tmp_path, fix=True)
    gone = {name.partition("-")[0] for name in before - {path.name for path in part.iterdir()}}

    # Half a program, well compressed, only XLA could tell from a whole one; `enable` replaces it.
    assert sorted(_kinds(found)) == ["damaged", "damaged", "damaged", "empty"]
    assert not found.healthy
    assert mended.healthy
    assert gone == {"jit_truncated", "jit_empty", "jit_random_bytes", "jit_no_program"}
    assert mended.entries == 2
    assert cache.doctor(tmp_path).findings == ()


def test_a_finding_says_what_and_what_to_do(tmp_path):
    path = _entry(tmp_path, "jit_step", data=b"")

    assert str(cache.doctor(tmp_path)) == (
        f"{tmp_path}: 1 entry, 0 B\n"
        f"empty: {path}\n"
        "  It is empty, so its program is compiled every time.\n"
        "  help: jax-dist cache doctor --fix, or enable(), which compiles it once and replaces it"
    )
    assert str(cache.doctor(tmp_path, fix=True)) == (
        f"{tmp_path}: 0 entries, 0 B\n"
        f"empty: {path}\n"
        "  It is empty, so its program is compiled every time.\n"
        "  fixed: removed, 0 B"
    )


def test_files_without_their_entry(tmp_path):
    _entry(tmp_path, "jit_step").with_name(f"jit_step-{HASHES[0]}-atime").write_bytes(bytes(8))
    gone = tmp_path / f"jit_gone-{HASHES[1]}-atime"
    gone.write_bytes(bytes(8))
    (tmp_path / "my-atime").write_text("not of a cache")
    left = [finding.where for finding in cache.doctor(tmp_path).findings]
    cache.doctor(tmp_path, fix=True)

    assert left == [str(gone)]
    assert not gone.exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_an_entry_under_another_name_is_told_whose_it_is(tmp_path):
    path = _entry(tmp_path, "jit_step", run="1")
    moved = path.rename(tmp_path / f"jit_loss-{HASHES[1]}-cache")
    health = cache.doctor(tmp_path)

    assert str(health) == (
        f"{tmp_path}: 1 entry, {moved.stat().st_size} B\n"
        f"misplaced: {moved}\n"
        f"  It is that of jit_step-{HASHES[0]}, under another name, so its program is compiled "
        "every time.\n"
        "  help: jax-dist cache doctor --fix, or enable(), which compiles it once and replaces it"
    )
    assert cache.doctor(tmp_path, fix=True).healthy
    assert not moved.exists()


def test_other_bytes_than_were_written_are_found(tmp_path):
    path = _entry(tmp_path, "jit_step", data=b"\x28\xb5\x2f\xfd program", run="1")
    path.write_bytes(path.read_bytes().replace(b"program", b"program".upper()))  # zstd would not

    assert _kinds(cache.doctor(tmp_path)) == ["damaged"]


def test_what_is_no_file_is_named(tmp_path):
    names = [tmp_path / f"jit_{name}-{HASHES[0]}-cache" for name in ("folder", "loop", "pipe")]
    names[0].mkdir()
    names[1].symlink_to(names[1])
    os.mkfifo(names[2])
    health = cache.doctor(tmp_path)

    assert [(finding.kind, finding.where) for finding in health.findings] == [
        ("unreadable", str(name)) for name in names
    ]


def test_what_a_dead_writer_left(tmp_path):
    young, old = tmp_path / ".12-a.unfinished", tmp_path / ".13-b.unfinished"
    for path in (young, old):
        path.touch()
    os.utime(old, (_OLD, _OLD))
    cache.doctor(tmp_path, fix=True)

    assert (young.exists(), old.exists()) == (True, False)


def test_a_folder_that_everybody_can_write_to(tmp_path):
    _entry(tmp_path, "jit_step")
    tmp_path.chmod(0o777)
    health = cache.doctor(tmp_path, fix=True)

    assert _kinds(health) == ["unsafe"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert cache.doctor(tmp_path).healthy


@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["with entries, as /tmp", "without entries"])
def test_a_folder_that_may_be_meant_for_all_is_left_as_it_is(tmp_path, mode):
    if mode == 0o1777:
        _entry(tmp_path, "jit_step")
    tmp_path.chmod(mode)
    health = cache.doctor(tmp_path, fix=True)

    assert _kinds(health) == ["unsafe"]
    assert not health.healthy
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


def test_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "_SCARCE", 10**18)

    assert _kinds(cache.doctor(tmp_path)) == ["disk full"]


def test_a_read_only_cache():
    # Nobody can make a file in /proc/self, root neither.
    assert _kinds(cache.doctor("/proc/self")) == ["read-only"]


def test_keys_that_never_repeat(tmp_path):
    for place in range(3):
        _entry(tmp_path, "jit_loss", place, run=f"run {place}")
        _entry(tmp_path, "jit_step", place, run=f"run {place}", used=place == 1)
        _entry(tmp_path, "jit_shapes", place, run="run 0")
    (finding,) = cache.doctor(tmp_path).findings

    assert (finding.kind, finding.where) == ("never repeats", "jit_loss")
    assert finding.what == "3 runs wrote 3 keys of it, and none was asked for again."


def test_keys_that_never_repeat_in_real_runs(tmp_path):
    # The place in the list is a constant of the program: step has another key in each run.
    for functions in (["same", "step"], ["same", "same2", "step"], ["same", "b", "c", "step"]):
        cache_runs.run(tmp_path, functions=functions)
    (finding,) = cache.doctor(tmp_path).findings

    assert (finding.kind, finding.where) == ("never repeats", "jit_step")


def test_no_folder_and_a_file(tmp_path):
    (tmp_path / "file").touch()

    assert _kinds(cache.doctor(tmp_path / "none")) == ["no folder"]
    assert cache.doctor(tmp_path / "none").healthy
    assert _kinds(cache.doctor(tmp_path / "file", fix=True)) == ["not a folder"]
    assert (tmp_path / "file").exists()


def test_other_files_are_left_alone(tmp_path):
    for name in ("pip-cache", "notes.txt", "jit_step-123-cache", "a.unfinished", "a-failure"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    health = cache.doctor(tmp_path, fix=True)

    assert health.findings == ()
    assert sorted(tmp_path.iterdir()) == before


def test_to_look_is_not_to_use(tmp_path):
    path = _entry(tmp_path, "jit_step", run="1")
    cache.doctor(tmp_path)

    assert path.stat().st_atime == _OLD
