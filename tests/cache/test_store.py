"""The folder of compiled programs, without JAX: whole files only, and no more than it may hold."""

import os
import stat
import subprocess
import sys
import textwrap
import zlib

import cache_runs
import pytest

from jax_dist.cache import entries
from jax_dist.cache.entries import sealed
from jax_dist.cache.store import Store

KEY, OTHER, THIRD = (f"jit_{name}-{64 * name[0]}" for name in ("a", "b", "c"))

LIMIT = 2 * len(sealed(KEY, 10 * b"x"))  # room for two entries of 10 bytes


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_there_once_it_is_put(tmp_path):
    said = []
    store = Store(tmp_path, said=said.append)

    assert store.get(KEY) is None
    store.put(KEY, b"program")
    assert store.get(KEY) == b"program"
    assert said == [None]
    assert _names(tmp_path) == [f"{KEY}-cache"]
    (entry,) = entries.of_folder(tmp_path)
    assert entries.opened(entry.path.read_bytes()).seal.key == KEY


def test_a_program_is_its_own_only(tmp_path, caplog):
    store = Store(tmp_path)
    store.put(KEY, b"one")
    store.put(OTHER, b"two")
    one, other = (tmp_path / f"{key}-cache" for key in (KEY, OTHER))
    swapped = one.read_bytes(), other.read_bytes()
    one.write_bytes(swapped[1])
    other.write_bytes(swapped[0])

    assert (store.get(KEY), store.get(OTHER)) == (None, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"{one}: it is that of {OTHER}, under another name, so its program is compiled again",
        f"{other}: it is that of {KEY}, under another name, so its program is compiled again",
    ]
    store.put(KEY, b"one")
    assert (store.get(KEY), store.get(OTHER)) == (b"one", None)


def test_no_flipped_bit_is_read_as_another_program(tmp_path):
    store, path = Store(tmp_path), tmp_path / f"{KEY}-cache"
    store.put(KEY, zlib.compress(b"program"))
    whole = path.read_bytes()
    misses = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = store.get(KEY)
        misses += found is None
        assert found is None or zlib.decompress(found) == b"program"

    assert misses > len(zlib.compress(b"program")) + 64  # each in the program and its checksum


def test_jax_without_us_reads_what_we_write(tmp_path):
    Store(tmp_path).put(KEY, zlib.compress(b"program"))

    assert zlib.decompress((tmp_path / f"{KEY}-cache").read_bytes()) == b"program"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "dangling link"])
def test_what_is_no_file_is_replaced(tmp_path, kind):
    path, store = tmp_path / f"{KEY}-cache", Store(tmp_path)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        links = {"device": "/dev/null", "loop": path.name, "dangling link": "/no/such/file"}
        path.symlink_to(links[kind])

    assert store.get(KEY) is None
    store.put(KEY, b"program")
    assert store.get(KEY) == b"program"


def test_a_folder_that_is_not_empty_is_left(tmp_path):
    path, said = tmp_path / f"{KEY}-cache", []
    path.mkdir()
    (path / "mine").touch()
    Store(tmp_path, said=said.append).put(KEY, b"program")

    assert said == ["it could not be written: Is a directory"]
    assert (path / "mine").exists()


def test_a_good_entry_is_not_written_again(tmp_path):
    store = Store(tmp_path)
    store.put(KEY, b"first")
    store.put(KEY, b"second")

    assert store.get(KEY) == b"first"


def test_an_entry_that_could_not_be_loaded_is_replaced_once(tmp_path):
    store = Store(tmp_path)
    store.put(KEY, b"damaged")
    store.unusable(KEY)
    store.put(KEY, b"good")
    store.put(KEY, b"other")

    assert store.get(KEY) == b"good"


def test_an_empty_entry_is_none(tmp_path):
    store = Store(tmp_path)
    (tmp_path / f"{KEY}-cache").touch()

    assert store.get(KEY) is None
    store.put(KEY, b"program")
    assert store.get(KEY) == b"program"


def test_what_was_used_last_stays(tmp_path):
    store = Store(tmp_path, max_size=LIMIT)
    for age, key in ((300, KEY), (200, OTHER)):
        store.put(key, 10 * b"x")
        past = os.stat(tmp_path).st_mtime - age
        os.utime(tmp_path / f"{key}-cache", (past, past))
    store.get(KEY)
    store.put(THIRD, 10 * b"y")

    assert _names(tmp_path) == [f"{KEY}-cache", f"{THIRD}-cache"]


def test_each_use_is_noted(tmp_path, monkeypatch):
    # Most systems note it themselves, but not all do, and not each time.
    noted = []
    monkeypatch.setattr("jax_dist.cache.store._touch", noted.append)
    store = Store(tmp_path)
    store.put(KEY, b"program")
    store.get(KEY)
    store.get(OTHER)

    assert noted == [tmp_path / f"{KEY}-cache"]


def test_what_is_larger_than_the_whole_cache_is_not_written(tmp_path):
    said = []
    store = Store(tmp_path, max_size=LIMIT, said=said.append)
    store.put(KEY, 10 * b"x")
    store.put(OTHER, LIMIT * b"x")

    assert [entry.key for entry in entries.of_folder(tmp_path)] == [KEY]
    assert said == [None, f"it is larger than the whole cache may be ({LIMIT} bytes)"]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).put(KEY, b"program")

    assert _names(tmp_path) == []


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o600), (0o2770, 0o660)])
def test_who_may_read_the_folder_may_read_its_files(tmp_path, folder_mode, file_mode):
    tmp_path.chmod(folder_mode)
    Store(tmp_path).put(KEY, b"program")

    assert stat.S_IMODE((tmp_path / f"{KEY}-cache").stat().st_mode) == file_mode


_WRITER = textwrap.dedent("""
    import pathlib, sys
    from jax_dist.cache.store import Store

    store = Store(pathlib.Path(sys.argv[1]))
    for _ in range(60):
        store.unusable(sys.argv[2])  # so that it is replaced each time
        store.put(sys.argv[2], sys.argv[3].encode() * 2_000_000)
    assert "jax" not in sys.modules
""")


def test_a_reader_sees_whole_files_while_two_processes_write(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), KEY, letter],
            env=cache_runs.environment(),
        )
        for letter in "xy"
    ]
    store, seen = Store(tmp_path), set()
    while any(writer.poll() is None for writer in writers):
        data = store.get(KEY)
        seen.add(None if data is None else (len(data), data[:1], data.count(data[:1])))

    assert [writer.returncode for writer in writers] == [0, 0]
    whole = {(2_000_000, letter, 2_000_000) for letter in (b"x", b"y")}
    assert whole <= seen <= {None, *whole}
    assert _names(tmp_path) == [f"{KEY}-cache"]


def test_only_files_named_as_jax_names_them_are_entries(tmp_path):
    for name in ("pip-cache", f"{KEY}-cache.bak", "jit_a-1234-cache", f"{KEY}-cache"):
        (tmp_path / name).write_bytes(b"x")

    assert [entry.path.name for entry in entries.of_folder(tmp_path)] == [f"{KEY}-cache"]


def test_only_parts_of_a_cache_are_looked_into(tmp_path):
    for name in ("x86_64-0-jaxlib-0.10.2", "somebody", "jaxlib"):
        (tmp_path / name).mkdir()

    assert [folder.name for folder in entries.folders(tmp_path)[1:]] == ["x86_64-0-jaxlib-0.10.2"]


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("500MB", 500_000_000), ("2 GiB", 2_147_483_648), ("1.5k", 1500), ("3B", 3)],
)
def test_sizes(text, size):
    assert entries.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "5 parsecs", "1e3"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size; write it as 500MB or 2GiB"):
        entries.bytes_of(text)
