"""Whatever happened to the cache, programs run on, and the next run but one finds all again."""

import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import cache_runs
import pytest
from cache_runs import DAMAGES, ForkingPython, ended, finish, run, start

from jax_dist.cache import entries

ALL = {"functions": list(DAMAGES)}
NONE_HIT, ALL_HIT = dict.fromkeys(DAMAGES, False), dict.fromkeys(DAMAGES, True)


def test_damaged_entries_are_compiled_once_and_replaced(tmp_path):
    first = run(tmp_path, **ALL)
    cache_runs.damage_all(tmp_path)
    after = run(tmp_path, **ALL)
    last = run(tmp_path, **ALL)

    assert [each["hits"] for each in (first, after, last)] == [NONE_HIT, NONE_HIT, ALL_HIT]
    assert after["values"] == last["values"] == first["values"]
    assert not any("warning" in line for line in after["said"])  # an error under -W error
    assert [
        line for line in after["said"] if "damaged, so" in line and "jit_truncated" in line
    ] == [
        "WARNING: jit_truncated: its cache entry is damaged, so it is compiled again "
        "(Error -5 while decompressing data: incomplete or truncated stream)"
    ]


def test_two_entries_that_were_swapped_do_not_run_as_each_other(tmp_path):
    both = {"functions": ["one", "two"]}
    first = run(tmp_path, **both)
    one, two = (cache_runs.entry_of(tmp_path, name) for name in both["functions"])
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)
    after, last = run(tmp_path, **both), run(tmp_path, **both)

    assert first["values"] == after["values"] == last["values"] == {"one": 0.0, "two": 1.0}
    assert list(after["hits"].values()) == [False, False]
    assert list(last["hits"].values()) == [True, True]


def test_what_jax_alone_wrote_is_found_and_what_we_wrote_is_found_by_jax_alone(tmp_path):
    ours = pathlib.Path(run(tmp_path / "ours")["folder"])
    other = cache_runs.run(ours, stock=True)
    path = cache_runs.entry_of(ours, "step")
    path.write_bytes(entries.opened(path.read_bytes()).content)  # as JAX writes it
    again = run(tmp_path / "ours")

    assert other["hits"] == {"step": True}
    assert again["hits"] == {"step": True}


def test_a_damaged_entry_does_not_end_a_program_for_which_warnings_are_errors(tmp_path):
    run(tmp_path)
    path = cache_runs.entry_of(tmp_path, "step")
    path.write_bytes(b"not a program")
    strict = finish(start(tmp_path, variables={"PYTHONWARNINGS": "error"}))

    assert strict["hits"] == {"step": False}
    assert run(tmp_path)["hits"] == {"step": True}


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path):
    moments = {"before the bytes": -9, "between the bytes": -25, "after the bytes": -9}
    left = set()
    for moment, code in moments.items():
        killed = ended(tmp_path, die=moment)
        unfinished = {*tmp_path.rglob("*.unfinished")} - left

        assert killed.code == code
        assert list(tmp_path.rglob("*-cache")) == []
        assert len(unfinished) == 1
        if moment == "between the bytes":
            assert unfinished.pop().stat().st_size == 1000
        left = {*tmp_path.rglob("*.unfinished")}

    assert run(tmp_path)["hits"] == {"step": False}
    assert run(tmp_path)["hits"] == {"step": True}


@pytest.fixture
def mounting(tmp_path) -> Iterator[ForkingPython]:
    """Mounts file systems as root does, and sees them alone."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount without being root")
    own = ("unshare", "-rm")
    probe = [*own, "sh", "-c", f"mount -t tmpfs -o size=1m none {tmp_path}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs user namespaces, to mount without being root")
    with ForkingPython(*own) as python:
        yield python


def test_a_full_disk_stops_writing_and_nothing_else(tmp_path, mounting):
    filled = mounting.shell(f"""
        mount -t tmpfs -o size=64k,mode=700 none {tmp_path}
        dd if=/dev/zero of={tmp_path}/filler bs=1k count=62
    """)
    full = run(tmp_path, mounting)
    emptied = mounting.shell(f"""
        test -z "$(find {tmp_path} -name '*-cache')"
        test -z "$(find {tmp_path} -name '*.unfinished')"
        rm {tmp_path}/filler
    """)
    freed, last = run(tmp_path, mounting), run(tmp_path, mounting)

    assert (filled.code, emptied.code) == (0, 0)
    assert [each["hits"]["step"] for each in (full, freed, last)] == [False, False, True]
    part = full["folder"]
    assert [re.sub(r"in \d+\.\d s", "in T s", line) for line in full["said"]] == [
        f"WARNING: cannot write into {part}: No space left on device; the program goes on",
        "INFO: jit_step: compiled in T s, not written: it could not be written: "
        "No space left on device",
    ]


def test_a_read_only_cache_is_read(tmp_path, mounting):
    first = run(tmp_path, mounting)
    mounted = mounting.shell(f"mount --bind -o ro {tmp_path} {tmp_path}")
    warm, missed = run(tmp_path, mounting), run(tmp_path, mounting, functions=["other"])

    assert mounted.code == 0, mounted.err
    assert (first["hits"], warm["hits"]) == ({"step": False}, {"step": True})
    assert missed["hits"] == {"other": False}
    assert "Read-only file system; the program goes on" in missed["said"][0]


def test_a_cache_that_is_a_file_is_off(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    ran = run(file)

    assert (ran["folder"], ran["hits"]) == (None, {"step": False})
    assert ran["said"] == [
        "warning: The compilation cache is off:\n"
        f"  * {file}: it is a file\n"
        "Because no folder can be made there.\n"
        "Name another folder, in enable(...) or in JAX_DIST_CACHE_DIR."
    ]
    assert file.read_text() == "mine"


def test_two_writers_at_once(tmp_path):
    both = [start(tmp_path, **ALL), start(tmp_path, **ALL)]
    values = [finish(process)["values"] for process in both]

    assert values[0] == values[1]
    assert run(tmp_path, **ALL)["hits"] == ALL_HIT


def test_an_entry_that_jax_did_not_finish_does_not_stop_a_cache_with_a_limit(tmp_path):
    # JAX with a limit writes a second file, -atime; without it, 0.10.2 writes nothing any more.
    folder = tmp_path / "cache"
    part = run(folder)["folder"]
    (tmp_path / "cache" / part / f"jit_orphan-{64 * 'a'}-cache").write_bytes(b"old")
    limited = {"functions": ["other"], "enable": {"max_size": "1MB"}}

    assert run(folder, **limited)["hits"] == {"other": False}
    assert run(folder, **limited)["hits"] == {"other": True}
