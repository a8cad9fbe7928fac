"""What goes when a cache is made smaller."""

import os
import time

import pytest

from jax_dist.cache import entries, store

HASHES = {name: name * 64 for name in "abc"}
_HOUR = 3600


@pytest.fixture
def folder(tmp_path):
    """Three entries of 10 bytes: `a` was used an hour ago, `b` two, `c` three."""
    part = tmp_path / "x86_64-0-jaxlib-0.10.2"
    part.mkdir()
    for hours, name in enumerate("abc", start=1):
        path = part / f"jit_{name}-{HASHES[name]}-cache"
        path.write_bytes(10 * b"x")
        used = time.time() - hours * _HOUR
        os.utime(path, (used, used - 100 * _HOUR))
        path.with_name(path.name.replace("-cache", "-atime")).write_bytes(bytes(8))
    (part / "other").write_text("mine")
    return tmp_path


def _left(folder):
    return [entry.function for entry in entries.all_of(folder)]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_size": 30}, ["jit_a", "jit_b", "jit_c"]),
        ({"max_size": 29}, ["jit_a", "jit_b"]),
        ({"max_size": 0}, []),
        ({"older_than": 2.5 * _HOUR}, ["jit_a", "jit_b"]),
        ({"older_than": 90 * 60, "max_size": 30}, ["jit_a"]),
        ({"older_than": 9 * _HOUR, "max_size": 15}, ["jit_a"]),
    ],
)
def test_what_was_used_last_stays(folder, limits, left):
    pruned = store.prune(folder, **limits)

    assert _left(folder) == left
    assert pruned.kept == len(left)
    assert pruned.bytes == 30 - pruned.kept_bytes == 10 * len(pruned.removed)
    notes = [path.name[:5] for path in sorted(folder.rglob("*-atime"))]
    assert notes == left
    assert next(folder.rglob("other")).read_text() == "mine"


def test_a_dry_run_removes_nothing(folder):
    pruned = store.prune(folder, max_size=0, dry_run=True)

    assert [entry.function for entry in pruned.removed] == ["jit_a", "jit_b", "jit_c"]
    assert _left(folder) == ["jit_a", "jit_b", "jit_c"]


def test_no_folder(tmp_path):
    assert store.prune(tmp_path / "none", max_size=0).removed == ()
