"""Notes that others may have damaged: read as they were written, or not at all."""

import dataclasses
import os
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_dist import _notes


@dataclasses.dataclass(frozen=True)
class Note:
    name: str
    size: int
    seconds: float | None
    files: dict[str, tuple[int, int]]


class Pair(NamedTuple):
    notes: list[Note]
    done: bool


GOOD = b'{"name": "a", "size": 1, "seconds": 2, "files": {"x": [3, 4]}}'


def test_a_note_comes_back_in_its_types():
    note = Note("a", 1, 2.0, {"x": (3, 4)})

    assert _notes.parse(GOOD, Note) == note
    assert _notes.parse(b'{"done": true, "notes": [%s]}' % GOOD, Pair) == Pair([note], done=True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        GOOD[:-1],
        GOOD + b" x",
        GOOD.replace(b'"a"', b"1"),
        GOOD.replace(b"1,", b"true,"),
        GOOD.replace(b"1,", b"1.0,"),
        GOOD.replace(b"1,", b"1%s," % (30 * b"0")),
        GOOD.replace(b"1,", b"1%s," % (5000 * b"0")),
        GOOD.replace(b"2,", b"NaN,"),
        GOOD.replace(b"2,", b"1e999,"),
        GOOD.replace(b"2,", b"false,"),
        GOOD.replace(b"[3, 4]", b"[3]"),
        GOOD.replace(b"[3, 4]", b"[3, 4, 5]"),
        GOOD.replace(b'"size": 1, ', b""),
        GOOD.replace(b'"size": 1', b'"size": 1, "more": 1'),
        GOOD.decode().encode("utf-16"),
        b"\xff\xfe\0",
        200_000 * b"[",
        b'{"a":' * 200_000,
        b'"' + 100_000 * b'\\"',
    ],
    ids=lambda data: repr(data[:60]),
)
def test_anything_else_is_none(data):
    assert _notes.parse(data, Note) is None


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 7)))
def test_whatever_the_bytes_nothing_is_raised(change):
    if isinstance(change, tuple):
        place, bit = change
        change = GOOD[:place] + bytes([GOOD[place] ^ 1 << bit]) + GOOD[place + 1 :]

    found = _notes.parse(change, Note)

    assert found is None or [type(each) for each in (found.name, found.size)] == [str, int]


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "/", "/no/such/file"])
def test_what_is_no_file_is_none(path):
    assert _notes.load(path, Note) is None


def test_a_pipe_and_a_large_file_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "note").write_bytes(GOOD)

    assert _notes.load(tmp_path / "pipe", Note) is None
    assert _notes.load(tmp_path / "note", Note) is not None
    assert _notes.load(tmp_path / "note", Note, limit=len(GOOD) - 1) is None
