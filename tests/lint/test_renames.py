"""The table of renames is true of the jax that is installed."""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator

import jax
import pytest

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.rules import (
    _old_names,
    experimental_shard_map,
    pjit_to_jit,
    removed_device_put,
)
from jax_dist.lint.rules._renames import Rename

_TABLES = (
    _old_names.NAMES,
    removed_device_put._NAMES,
    pjit_to_jit._OLD_NAMES,
    (experimental_shard_map._OLD,),
)
_ENTRIES = [entry for table in _TABLES for entry in table]


def _is_there(name: str) -> bool:
    """Whether a dotted name can be reached, by attributes or by importing modules."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for length in range(2, len(parts) + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a deprecated name is there
                found = getattr(found, parts[length - 1])
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:length]))
            except ImportError:
                return False
    return True


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.old)
def test_the_new_name_is_there_and_the_old_one_is_not(entry):
    if jax.__version_info__ >= entry.needs:
        assert all(_is_there(name) for name in (entry.new, entry.imported) if name)
    library, _, version = entry.gone.rpartition(" ")
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    has = importlib.import_module(library).__version__ if library else jax.__version__
    if version and _version(has) >= _version(version):
        assert not _is_there(entry.old)


def test_each_name_stands_once_and_says_what_to_do():
    assert len({entry.old for entry in _ENTRIES}) == len(_ENTRIES)
    assert [entry.old for entry in _ENTRIES if not entry.new and not entry.hint] == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Rename("a.b", "c", "0.6.0"), "a.b was removed in jax 0.6.0: use c"),
        (
            Rename("a.b", "c", deprecated="0.8.0"),
            "a.b is deprecated since jax 0.8.0: use c",
        ),
        (Rename("a.b", "", "flax 0.6.0", "use c"), "a.b was removed in flax 0.6.0: use c"),
        (Rename("a.b", "", hint="it was internal"), "a.b is gone: it was internal"),
    ],
)
def test_messages(entry, message):
    assert entry.message == message


def _forms(old: str) -> Iterator[str]:
    """Programs that name it: in full, imported, by its module, and by another name."""
    above, _, last = old.rpartition(".")
    yield f"import jax\nx = {old}\n"
    yield f"from {above} import {last}\nx = {last}\n"
    yield f"from {above} import {last} as other\nx = other\n"
    further, _, module = above.rpartition(".")
    if further:
        yield f"from {further} import {module}\nx = {module}.{last}\n"
        yield f"from {further} import {module} as other\nx = other.{last}\n"


_CODES = {
    _codes.REMOVED_NAME: _old_names.NAMES,
    _codes.PJIT_TO_JIT: pjit_to_jit._OLD_NAMES,
}


@pytest.mark.parametrize(
    ("code", "old"), [(code, each.old) for code, table in _CODES.items() for each in table]
)
def test_files_that_name_it_are_not_skipped(code: str, old: str):
    """Most files are skipped for their words; those that hold an old name may not be."""
    skipped = [text for text in _forms(old) if not linter.likely(text.encode(), frozenset({code}))]

    assert skipped == []
