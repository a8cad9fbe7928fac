"""What the folders of a run hold is read as it was written."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jax_dist.migrate.verify import evidence
from jax_dist.migrate.verify.evidence import Array, CallRecord, Run, RunRecord, SiteRecord

_PLACE = {"file": "/a.py", "line": 3, "within": ["f", "<module>"], "function": "step"}


def _site(number: int, kind: str, **place: Any) -> dict[str, Any]:
    return {"event": "site", "site": number, "kind": kind, **_PLACE, **place}


def _call(site: int, call: int, **more: Any) -> dict[str, Any]:
    return {
        **{"event": "call", "site": site, "call": call, "arrays": f"{site}-{call}.npz"},
        **{"given": [], "returned": [], "raised": None, "text": None, "structure": "leaf"},
        **{"donated": [], **more},
    }


def _read(folder: pathlib.Path, *processes: list[dict[str, Any]]) -> RunRecord:
    return _read_named(folder, {str(number): events for number, events in enumerate(processes)})


def _read_named(folder: pathlib.Path, processes: dict[str, list[dict[str, Any]]]) -> RunRecord:
    for name, events in processes.items():
        own = folder / f"process-{name}"
        own.mkdir()
        (own / "calls.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return evidence.read(0, "", folder).record


def test_nothing_was_written(tmp_path: pathlib.Path):
    (tmp_path / "lost").write_bytes(b"\0")
    assert evidence.read(3, "out", tmp_path) == Run(3, "out", RunRecord())


def test_which_places_ran(tmp_path: pathlib.Path):
    (tmp_path / "places-1.txt").write_text("2\n3\n3 alone\n")
    (tmp_path / "places-2.txt").write_text("5\n")
    (tmp_path / "refused-2.jsonl").write_text('"/b"\n"/a"\n"/b"\n')
    (tmp_path / "refused-1.jsonl").write_text('"/c"\n"cut')
    found = evidence.read(0, "", tmp_path)

    assert (found.ran, found.alone) == ({2, 3, 5}, {3})
    assert found.refused == ("/c", "/b", "/a")


def test_processes_are_in_the_order_of_their_ranks(tmp_path: pathlib.Path):
    """Which of them imports jax first may differ from run to run."""
    ranks = (1, 0, None, 1)
    calls = [_call(0, 0, **({} if rank is None else {"rank": rank})) for rank in ranks]
    sites = [_site(0, "pmap", function=str(number)) for number in range(4)]
    record = _read(tmp_path, *([site, call] for site, call in zip(sites, calls, strict=True)))

    found = [(site.process, site.function) for site in record.sites]
    assert found == [(0, "1"), (1, "2"), (2, "0"), (3, "3")]


def test_what_was_mapped_is_told_from_what_was_not(tmp_path: pathlib.Path):
    record = _read(
        tmp_path,
        [
            *(_site(0, "pmap"), _site(1, "jit", line=5), _site(2, "host", function="7")),
            *(_site(3, "shard_map"), _call(0, 0), _call(1, 0), _call(2, 0)),
        ],
    )

    assert [(site.number, site.is_mapped) for site in record.sites] == [
        *((0, True), (1, False), (3, True))
    ]
    assert [(site.function, site.is_mapped) for site in record.hosts] == [("7", False)]
    assert [site.number for site in record.called] == [0]
    assert [site.number for site in record.idle] == [3]
    assert record.hidden == ()
    first = record.sites[0]
    assert (first.file, first.line, first.function) == ("/a.py", 3, "step")
    assert first.within == ("f", "<module>")


def test_processes_are_in_their_order(tmp_path: pathlib.Path):
    record = _read(tmp_path, *[[_site(0, "pmap", line=number)] for number in range(11)])

    assert [(site.process, site.line) for site in record.sites] == [(n, n) for n in range(11)]


def test_calls_with_their_texts(tmp_path: pathlib.Path):
    array = {"path": "[0]", "dtype": "float32", "shape": [8, 2], "devices": 8, "parts": 8}
    more = {"digest": "d", "rows": ["r"], "mean": 1.0, "weak": True, "placed": "p"}
    large = {**array, **more}
    text = {"event": "text", "site": 0, "number": 4, "text": {"in": []}}
    call = {"given": [{**array, "key": "given0"}], "returned": [large], "text": 4, "donated": [0]}
    record = _read(
        tmp_path, [_site(0, "pmap"), text, _call(0, 0, **call), _call(0, 1, raised="ValueError")]
    )

    (site,) = record.sites
    archive = tmp_path / "process-0" / "0-0.npz"
    assert site.calls == [
        CallRecord(
            (Array("[0]", "float32", (8, 2), 8, 8, archive, "given0"),),
            (Array(**{**large, "shape": (8, 2), "rows": ("r",), "archive": None}),),
            None,
            text,
            "leaf",
            (0,),
        ),
        CallRecord((), (), "ValueError", None, "leaf", ()),
    ]
    assert site.count == 2
    assert [array.weak for array in (*site.calls[0].given, *site.calls[0].returned)] == [
        *(False, True)
    ]


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([_call(0, 0), _call(0, 4)], 5),
        ([_call(0, 4), _call(0, 0)], 5),
        ([_call(0, 0), {"event": "total", "site": 0, "calls": 7}], 7),
        ([_call(0, 4), {"event": "total", "site": 0, "calls": 3}], 5),
        ([_call(0, 0), {"event": "problem", "site": 0, "problem": "", "call": 1}], 2),
        ([_call(0, 0), {"event": "problem", "site": 0, "problem": ""}], 1),
        ([_call(0, 2), {"event": "problem", "site": 0, "problem": "", "call": 1}], 3),
    ],
)
def test_calls_are_counted_that_were_not_written(tmp_path: pathlib.Path, events: Any, count: int):
    assert _read(tmp_path, [_site(0, "pmap"), *events]).sites[0].count == count


def test_what_was_traced_as_a_part(tmp_path: pathlib.Path):
    inside = {"event": "inside", "text": None}
    text = {"event": "text", "site": 1, "number": 0, "why": "it takes an iterator"}
    record = _read(
        tmp_path,
        [
            *(_site(0, "jit"), _site(1, "pmap"), _site(2, "jit"), _site(3, "jit"), text),
            *({**inside, "site": 1, "cover": 0, "text": 0}, {**inside, "site": 2, "cover": 3}),
            {**inside, "site": 1, "cover": None},
        ],
    )
    jit, part, inner, outer = record.sites

    assert [site.is_mapped for site in record.sites] == [True, True, False, False]
    assert [site.inside for site in record.sites] == [False, True, True, False]
    assert [site.hidden for site in record.sites] == [False, True, False, False]
    assert (part.covers, inner.covers) == ([jit], [outer])
    assert part.traced == [text, {"why": "it has no text"}]
    assert record.hidden == (part,)
    assert record.idle == (jit,)


def test_what_is_hidden_and_called_is_compared(tmp_path: pathlib.Path):
    inside = {"event": "inside", "site": 0, "text": None, "cover": None}
    record = _read(tmp_path, [_site(0, "pmap"), _site(1, "jit"), inside, _call(0, 0)])

    assert record.hidden == ()
    assert record.idle == ()
    assert [site.number for site in record.called] == [0]
    assert _read_hidden_jit(tmp_path / "jit").hidden == ()


def _read_hidden_jit(folder: pathlib.Path) -> RunRecord:
    folder.mkdir()
    inside = {"event": "inside", "site": 0, "text": None, "cover": None}
    return _read(folder, [_site(0, "jit"), inside])


def test_the_places_of_a_site(tmp_path: pathlib.Path):
    record = _read(
        tmp_path,
        [
            *(_site(0, "pmap"), _site(1, "jit"), {"event": "place", "site": 0, "place": 4}),
            *(
                {"event": "made", "site": 0, "what": "f"},
                {"event": "called", "site": 0, "what": "g"},
            ),
            {"event": "around", "site": 1, "place": 9},
            {"event": "problem", "site": 0, "problem": "OSError: full"},
        ],
    )
    mapped, jit = record.sites

    assert (mapped.places, mapped.made, mapped.told) == ({4}, {"f"}, {"g"})
    assert (jit.around, jit.is_mapped) == ({9}, True)
    assert record.problems == ("step: OSError: full",)


def test_what_flowed_where(tmp_path: pathlib.Path):
    (tmp_path / "process-0").mkdir()
    (tmp_path / "process-0" / "flow.json").write_text('{"again": [1]}')
    (tmp_path / "process-1").mkdir()
    (tmp_path / "process-1" / "flow.json").write_text('{"again": [1')

    assert evidence.read(0, "", tmp_path).record.flows == ({"again": [1]},)


def test_whether_all_was_written_down(tmp_path: pathlib.Path):
    told = tmp_path / "lost"
    assert not _read(tmp_path, [_site(0, "pmap")]).is_complete  # nothing tells it
    told.write_bytes(b"\0")
    assert evidence.read(0, "", tmp_path).record.is_complete
    told.write_bytes(b"\1")
    assert not evidence.read(0, "", tmp_path).record.is_complete


@pytest.mark.parametrize(
    "event",
    [_call(1, 0), {"event": "inside", "site": 0, "cover": 1, "text": None}],
    ids=["call", "cover"],
)
def test_a_function_that_was_not_written_down(tmp_path: pathlib.Path, event: dict[str, Any]):
    (tmp_path / "lost").write_bytes(b"\0")
    record = _read(tmp_path, [_site(0, "pmap"), event, _call(0, 0)])

    assert not record.is_complete
    assert [site.count for site in record.sites] == [1]


def test_forks_come_after_their_parents(tmp_path: pathlib.Path):
    names = ("0", "0-2", "0-10", "0-2-1", "1")
    record = _read_named(tmp_path, {name: [_site(0, "pmap", function=name)] for name in names})

    found = [(site.process, site.function) for site in record.sites]
    assert found == [(0, "0"), (1, "0-2"), (2, "0-2-1"), (3, "0-10"), (4, "1")]


def test_what_a_fork_knows_of_its_parent(tmp_path: pathlib.Path):
    """The functions, their places and texts; what was traced there was not traced here."""
    text = {"event": "text", "site": 1, "number": 0, "why": "it takes an iterator"}
    inside = {"event": "inside", "text": 0}
    record = _read(
        tmp_path,
        [
            *(_site(0, "jit"), _site(1, "pmap"), text, {"event": "made", "site": 1, "what": "f"}),
            *({**inside, "site": 1, "cover": 0}, {**inside, "site": 1, "cover": None}),
            *(
                {"event": "around", "site": 0, "place": 9},
                {"event": "place", "site": 1, "place": 4},
            ),
            *({"event": "forked"}, _call(0, 0, text=0)),
        ],
    )
    whole, part = record.sites

    assert (whole.is_mapped, whole.around, whole.calls[0].text) == (True, set(), text)
    assert (part.covers, part.traced, part.hidden, part.inside) == ([], [], False, True)
    assert (part.places, part.made) == ({4}, {"f"})
    assert record.idle == ()


def test_a_record_that_ends_in_the_middle_of_a_line(tmp_path: pathlib.Path):
    (tmp_path / "process-0").mkdir()
    lines = [json.dumps(_site(0, "pmap")), json.dumps(_call(0, 0))[:30]]
    (tmp_path / "process-0" / "calls.jsonl").write_text("\n".join(lines))
    (site,) = evidence.read(-9, "", tmp_path).record.sites

    assert (site.function, site.count) == ("step", 0)


def test_the_last_lines_of_the_output():
    assert Run(0, "\n".join(map(str, range(20))), RunRecord()).tail == "\n".join(
        map(str, range(8, 20))
    )


def test_digests_in_the_place_of_values(tmp_path: pathlib.Path):
    archive = tmp_path / "a.npz"
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    np.savez(archive, x=values, y=np.float32(3))
    found = Array("", "float32", (2, 2), 8, 8, archive, "x").without_values()

    assert found.archive is None
    assert len(found.rows) == len({*found.rows}) == 2
    np.savez(archive, x=values[::-1])
    assert (
        Array("", "float32", (2, 2), 8, 8, archive, "x").without_values().rows == (found.rows[::-1])
    )
    number = Array("", "float32", (), 8, 8, archive, "y")
    assert number.without_values() is number
    assert found.without_values() is found


def test_sites_share_nothing():
    one, other = (SiteRecord(0, "a.py", 1, (), "f", is_mapped=True) for _ in range(2))
    for each in (one.calls, one.covers, one.traced):
        each.append(None)  # pyright: ignore[reportArgumentType]

    assert (other.calls, other.covers, other.traced) == ([], [], [])
