"""What a process writes down, and its forks; and how it is known that something was not."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jax_dist.migrate.verify.recording import lost
from jax_dist.migrate.verify.recording.records import Records


class _Forks:
    """Has what Python does around a fork done here, where the process becomes its own fork."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._hooks: list[dict[str, Callable[[], Any]]] = []
        self._patch, self._process = patch, os.getpid()
        patch.setattr(os, "register_at_fork", lambda **hooks: self._hooks.append(hooks))

    def parent(self) -> None:
        self._run("before")
        self._run("after_in_parent")

    def child(self) -> None:
        self._run("before")
        self._process += 1
        self._patch.setattr(os, "getpid", lambda: self._process)
        self._run("after_in_child")

    def _run(self, name: str) -> None:
        for each in self._hooks:
            if name in each:
                each[name]()


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> _Forks:
    return _Forks(monkeypatch)


@pytest.fixture
def records(forks: _Forks, tmp_path: pathlib.Path) -> Records:
    lost.install(str(tmp_path))
    found = Records(str(tmp_path))
    found.after_forks(lambda: None)
    return found


def _events(folder: pathlib.Path) -> dict[str, list[Any]]:
    """The names of the events, by the process."""
    return {
        path.parent.name: [json.loads(line)["event"] for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*/calls.jsonl"))
    }


def _is_lost(folder: pathlib.Path) -> bool:
    return (folder / "lost").read_bytes() == b"\1"


def test_events_are_lines(records: Records, tmp_path: pathlib.Path):
    records.write(event="site", site=0)
    records.write(event="call", site=0, call=1)
    assert records.is_begun

    text = (tmp_path / "process-0" / "calls.jsonl").read_text()
    assert text == '{"event": "site", "site": 0}\n{"event": "call", "site": 0, "call": 1}\n'
    assert records.folder() == str(tmp_path / "process-0")
    assert not _is_lost(tmp_path)


def test_a_fork_begins_with_all_but_the_calls(
    records: Records, forks: _Forks, tmp_path: pathlib.Path
):
    inherited = ["site", "made", "place", "text", "inside", "around"]
    events = [*inherited, "called", "call", "problem", "total"]
    for each in events:
        records.write(event=each)
    forks.child()
    path = tmp_path / "process-0" / "calls.jsonl"
    path.write_text(path.read_text() + '{"event": "later"}\n')
    assert not (tmp_path / "process-0-1").exists()  # most forks map nothing
    assert not records.is_begun
    records.write(event="call")
    records.write(event="site")

    assert _events(tmp_path) == {
        "process-0": [*events, "later"],
        "process-0-1": [*inherited, "forked", "call", "site"],
    }
    assert not _is_lost(tmp_path)


def test_a_fork_of_a_parent_that_wrote_nothing(
    records: Records, forks: _Forks, tmp_path: pathlib.Path
):
    forks.child()
    records.write(event="site")

    assert _events(tmp_path) == {"process-0-1": ["site"]}
    assert not _is_lost(tmp_path)


@pytest.mark.parametrize("writes", [True, False])
def test_a_fork_of_a_fork(records: Records, forks: _Forks, tmp_path: pathlib.Path, *, writes: bool):
    records.write(event="site")
    forks.parent()
    forks.child()
    if writes:
        records.write(event="made")
    forks.child()
    if writes:
        path = tmp_path / "process-0-2" / "calls.jsonl"
        path.write_text(path.read_text() + '{"event": "later"}\n')
    records.write(event="call")

    child = ["site", "forked", "made", "later"] if writes else []
    kept = ["site", "forked", "made", "forked"] if writes else ["site", "forked"]
    assert _events(tmp_path) == {
        "process-0": ["site"],
        **({"process-0-2": child} if writes else {}),
        "process-0-2-1": [*kept, "call"],
    }


def test_the_number_of_a_fork_may_be_taken(records: Records, forks: _Forks, tmp_path: pathlib.Path):
    """Where two threads fork at once."""
    (tmp_path / "process-0-1").mkdir()
    forks.child()

    assert records.folder() == str(tmp_path / "process-0-2")


def test_a_fork_has_a_lock_of_its_own(records: Records, forks: _Forks):
    lock = records.lock
    forks.parent()
    assert records.lock is lock
    assert not lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]
    forks.child()
    assert lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]
    assert records.lock is not lock


def test_a_fork_does_what_else_is_to_be_done(forks: _Forks, tmp_path: pathlib.Path):
    done: list[bool] = []
    records = Records(str(tmp_path))
    records.after_forks(lambda: done.append(records.is_own))
    forks.parent()
    assert done == []
    forks.child()
    assert done == [True]


def test_where_there_are_no_forks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "register_at_fork")
    Records(str(tmp_path)).after_forks(lambda: None)


def test_a_process_that_forked_unseen_is_lost(
    records: Records, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    assert records.is_own
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not _is_lost(tmp_path)
    records.write(event="site")

    assert _events(tmp_path) == {}
    assert _is_lost(tmp_path)


def test_what_cannot_be_written_is_lost_and_the_program_goes_on(
    records: Records, tmp_path: pathlib.Path
):
    (tmp_path / "process-0").rmdir()
    records.write(event="site")

    assert _is_lost(tmp_path)


def test_what_interrupts_a_write_goes_on(
    records: Records, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        records.write(event="site")
    assert _is_lost(tmp_path)


def test_what_is_lost_stays_lost(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost, "_shared", None)
    lost.tell()  # nothing is recorded here
    lost.install(str(tmp_path))
    assert (tmp_path / "lost").read_bytes() == b"\0"
    lost.tell()
    lost.install(str(tmp_path))
    assert _is_lost(tmp_path)
