"""A damaged cache: programs go on, and the next run but one finds all of them."""

import pathlib
import random
import signal
from unittest import mock

import pytest
from cached_program import run
from jax._src.compilation_cache import compress_executable, decompress_executable

from jax_dist._cache.store import Store


def _half_of_program(data: bytes) -> bytes:
    program = decompress_executable(data)
    return compress_executable(program[: len(program) // 2])


_DAMAGES = {  # by the function whose entry gets it
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "random_bytes": lambda data: random.Random(0).randbytes(len(data)),
    "half_of_program": _half_of_program,
    "no_program": lambda data: compress_executable(b"abcd"),
}


@pytest.mark.parametrize("warnings", ["default", "error"])
def test_damaged_entries_are_compiled_once_and_replaced(tmp_path, warnings):
    options = {"functions": list(_DAMAGES), "variables": {"PYTHONWARNINGS": warnings}}
    first = run(tmp_path, **options)
    for name, damage in _DAMAGES.items():
        (path,) = tmp_path.rglob(f"jit_{name}-*-cache")
        path.write_bytes(damage(path.read_bytes()))
    after, last = run(tmp_path, **options), run(tmp_path, **options)

    hits = [set(result["hits"].values()) for result in (first, after, last)]
    assert hits == [{False}, {False}, {True}]
    assert after["values"] == last["values"] == first["values"]
    reasons = [line for line in after["messages"] if "its cache entry cannot be loaded" in line]
    assert len(reasons) == len(_DAMAGES) - 1  # an empty one is only a miss


@pytest.mark.parametrize("content", ["empty", "not empty"])
def test_a_directory_in_place_of_an_entry_is_named_once_or_replaced(tmp_path, content):
    run(tmp_path, functions=["one", "two"])
    for path in tmp_path.rglob("*-cache"):
        path.unlink()
        path.mkdir()
        if content == "not empty":
            (path / "file").touch()
    after, last = (run(tmp_path, functions=["one", "two"]) for _ in range(2))

    warnings = [line for line in after["messages"] if not line.startswith("INFO")]
    assert set(after["hits"].values()) == {False}
    if content == "empty":
        assert warnings == []
        assert set(last["hits"].values()) == {True}
    else:
        (warning,) = warnings
        assert "Directory not empty; the program goes on" in warning


@pytest.mark.parametrize("moment", ["between the bytes", "before the rename"])
def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path, moment):
    assert run(tmp_path, die=moment)["signal"] in (signal.SIGKILL, signal.SIGXFSZ)
    assert list(tmp_path.rglob("*-cache")) == []
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    assert run(tmp_path)["hits"] == {"step": False}
    assert run(tmp_path)["hits"] == {"step": True}


def test_a_full_disk_is_named_once(tmp_path, monkeypatch, caplog):
    def fail(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jax_dist._cache.store.write_atomically", fail)
    store = Store(tmp_path)
    for key in ("jit_a-1", "jit_b-2"):
        assert store.get(key) is None
        store.put(key, b"program")

    assert store.unwritten_reason("jit_b-2") == "it could not be written: No space left on device"
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write {tmp_path}/jit_a-1-cache: No space left on device; the program goes on"
    ]


def test_an_entry_that_the_system_cannot_read_is_replaced(tmp_path, monkeypatch):
    store = Store(tmp_path)
    pathlib.Path(tmp_path, "jit_a-1-cache").write_bytes(b"theirs")
    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "read_bytes", mock.Mock(side_effect=PermissionError(13, "")))
        assert store.get("jit_a-1") is None
    store.put("jit_a-1", b"ours")

    assert store.get("jit_a-1") == b"ours"


def test_an_entry_that_another_process_wrote_meanwhile_stays(tmp_path):
    store = Store(tmp_path)
    assert store.get("jit_a-1") is None
    pathlib.Path(tmp_path, "jit_a-1-cache").write_bytes(b"theirs")
    store.put("jit_a-1", b"ours")

    assert store.get("jit_a-1") == b"theirs"
    store.put("jit_a-1", b"ours")  # JAX could not load it, and compiled
    assert store.get("jit_a-1") == b"ours"
