"""pmap in real processes: what jax.pmap gets wrong there, equal to one process with 8 devices.

The children run `rows`, which reports the slices that each process holds; the parent joins them in
the order of processes. Expected is what the same function gives in this process, on 8 simulated
devices; for some rows the numbers stand here as they are known.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pmap_jobs
import pytest

from jax_dist.testing import run_processes

_KNOWN = {  # jax.pmap inside jit, scan and cond sums over one process: 6 and 22 of these 28
    "alone": [28.0] * 8,
    "jit": [28.0] * 8,
    "cond": [28.0] * 8,
    "grad": [448.0] * 8,
    "jit(grad)": [7840.0 + 1568.0 * k for k in range(8)],
    "nested": [[28.0, 29.0]] * 4,
    "index": [float(k) for k in range(8)],
    "ppermute": [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "another mesh set": [28.0] * 8,
    "misplaced": [28.0] * 8,
    "integers under jit": [28] * 8,
}


@functools.cache
def _parts() -> list[dict[str, Any]]:
    return _values_of(pmap_jobs.parts, processes=2, cpu_devices=4)


def _of_each_process(part: Callable) -> list[Any]:
    return [values[part.__name__] for values in _parts()]


def _values_of(work: Callable, *, processes: int, cpu_devices: int) -> list[Any]:
    outcomes = run_processes(work, processes=processes, cpu_devices=cpu_devices, timeout=240)
    assert [outcome.error for outcome in outcomes] == [None] * processes
    return [outcome.value for outcome in outcomes]


def _joined(values: list[dict[str, list]]) -> dict[str, list]:
    """Return the rows of all processes."""
    return {name: [slice_ for value in values for slice_ in value[name]] for name in values[0]}


@functools.cache
def _in_one_process() -> dict[str, list]:
    return pmap_jobs.rows()


@pytest.mark.parametrize("row", sorted(_KNOWN))
def test_the_numbers_as_they_are_known(row):
    several = _joined(_of_each_process(pmap_jobs.rows))

    np.testing.assert_allclose(several[row], _KNOWN[row], rtol=1e-6)


def test_all_rows_equal_one_process_with_eight_devices():
    several, one = _joined(_of_each_process(pmap_jobs.rows)), dict(_in_one_process())

    assert set(several) == set(one)
    # Each process splits the key for its own devices: the keys repeat, the indices do not.
    assert len(set(several.pop("keys"))) == len(set(one.pop("keys"))) == 8
    _assert_equal(several, one)


def test_rows_of_four_processes_equal_one_with_eight_devices():
    several = _joined(_values_of(pmap_jobs.rows_in_four, processes=4, cpu_devices=2))
    one = _in_one_process()

    assert set(several) == {*pmap_jobs.IN_FOUR}
    _assert_equal(several, {row: one[row] for row in pmap_jobs.IN_FOUR})


def _assert_equal(several: dict[str, list], one: dict[str, list]) -> None:
    for row, expected in one.items():
        np.testing.assert_allclose(several[row], expected, rtol=1e-5, err_msg=row)


def test_results_are_the_view_of_each_process():
    for rank, value in enumerate(_of_each_process(pmap_jobs.local_view)):
        assert value == {
            "same as jax.pmap": True,
            "fully addressable": True,
            "on own devices": True,
            "fed back": True,
            "state": [3.0] * 4,
            "donated": [False, True, True],  # of the first, a copy on its devices
            "own devices only": [[6.0] * 4, [22.0] * 4][rank],
            "donated, but left to its default": [2.0] * 4,
            "weak types as with jax.pmap": True,
        }


def test_captured_values_are_those_of_each_process():
    first, second = _of_each_process(pmap_jobs.own_values)

    summed = {"summed": [28.0 + 4 * 900] * 4, "as with jax.pmap": True}
    assert first == {**summed, "alone": [300.0 + k for k in range(4)]}
    assert second == {**summed, "alone": None}


def test_global_arrays_are_never_halved():
    # A NumPy array of one process taken as the global one gives 6 or 22, or 428 for 856.
    for value in _of_each_process(pmap_jobs.global_arrays):
        assert value == {
            "whole": ((8,), False),
            "state": [84.0] * 4,
            "from shard": [28.0] * 4,
            "in jit": [28.0] * 4,
        }


_MISTAKES = (
    "MappedAxisError: pmap of '<lambda>' got arguments of different sizes along the mapped axis",
    "MappedAxisError: pmap of '<lambda>' got arguments of different sizes along the mapped axis",
    "MappedAxisError: pmap of '<lambda>' got arguments of different sizes along the mapped axis",
    "DeviceCountError: pmap of '_psum' needs 6 devices, but there are 4",
    *["DeviceCountError: pmap of '_psum' needs 8 devices, but there are 4"] * 2,
    "ArgumentError: pmap of '_psum' got an array of this process only, while traced",
    "DeviceCountError: pmap of '_psum' cannot spread an axis of size 7 evenly over 2 processes",
    "DeviceCountError: pmap of '_psum' cannot be traced over these devices",
    "MappedAxisError: pmap of '_psum': axis_size=4 does not match the mapped axis",
    "ArgumentError: device_put_replicated got devices of other processes. Pass jax.local_devices()",
)


def test_mistakes_are_the_same_error_in_every_process():
    first, second = _of_each_process(pmap_jobs.mistakes)

    assert first == second
    for text, words in zip(first, _MISTAKES, strict=True):
        assert text.startswith(words)
