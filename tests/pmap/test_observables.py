"""A mapped function is as with jax.pmap, but for the rows of docs/reference/mapping.md."""

import pathlib
import re

import jax
import observables
import pytest

import jax_dist

pytestmark = pytest.mark.mapping

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "mapping.md"
_HEAD = "| what is seen | `jax.pmap` | `jax_dist.pmap` |"

# jax 0.7.2 has another jax.pmap. In its words, and in these, it differs from ours:
_IS_OLD = jax.__version_info__ < (0, 8)
_DIFFERS_ON_OLD = {
    "a compiled program, called with another type, names it",
    "the name of a result's axis",
    "under `jit` and `scan`",
    "ordered callbacks: what each device says, in order",
    "`jax.export` of `jit` of it",
    "`debug_nans`",
    "`debug_nans` on a steady call",
    "frames between the call and the error in its body",
    "keys that are used twice, under `debug_key_reuse`",
}
_OURS_IS_OTHER_ON_OLD = {  # where nothing is rewritten
    "a captured array of 1 kB",
    "whether a captured array goes with the function",
    "collectives of an `all_gather` that is only summed",
}


def _rows() -> dict[str, list[str]]:
    """The table in the docs: the two cells for each title."""
    lines = _PAGE.read_text().split(_HEAD)[1].strip().splitlines()[1:]
    table = lines[: lines.index("")]
    cells = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in table]
    assert all(len(row) == 3 for row in cells)
    return {title: both for title, *both in cells}


@pytest.mark.thorough
@pytest.mark.parametrize("title", observables.titles())
def test_what_differs_from_jax_is_in_the_docs(title):
    documented = _rows().get(title)
    ours = observables.observed(title, jax_dist.pmap)
    if documented is not None:
        assert (ours == documented[1]) != (_IS_OLD and title in _OURS_IS_OTHER_ON_OLD)
    if documented is not None and _IS_OLD:
        return
    theirs = observables.observed(title, jax.pmap)
    if documented is not None:
        assert theirs == documented[0]
    assert (theirs != ours) == (documented is not None or _IS_OLD and title in _DIFFERS_ON_OLD)


def test_each_row_of_the_docs_is_seen():
    rows = list(_rows())

    assert rows == [title for title in observables.titles() if title in rows]
    assert len(rows) > 20
