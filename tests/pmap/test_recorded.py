"""The results of jax 0.7.2, on every version of JAX: see recorded_cases."""

import json

import numpy as np
import pytest
from recorded_cases import CASES, FILE, describe

import jax_dist

pytestmark = pytest.mark.mapping

_RECORDED = json.loads(FILE.read_text())


def test_every_case_is_recorded():
    assert set(CASES) == set(_RECORDED)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_result_of_jax_0_7_2(name):
    ours, recorded = describe(CASES[name](jax_dist.pmap)), _RECORDED[name]

    assert ours["structure"] == recorded["structure"]
    for mine, theirs in zip(ours["leaves"], recorded["leaves"], strict=True):
        for key in ("shape", "dtype", "weak"):
            assert mine[key] == theirs[key], key
        np.testing.assert_allclose(mine["values"], theirs["values"], rtol=1e-6, atol=1e-6)
        if name.startswith("nested"):  # the old pmap gathered the inner axis on each device
            assert _outer(mine["places"]) == _outer(theirs["places"])
        elif 0 in mine["shape"]:  # XLA reports what has no elements as replicated, before 0.11
            assert len(mine["places"]) == 8
        elif len(theirs["places"]) > 1:
            assert mine["places"] == theirs["places"]
        else:  # out_axes=None, of which the old pmap kept one copy
            assert theirs["places"][0] in mine["places"]


def _outer(places: list) -> list:
    """Which device holds which slices along the outermost mapped axis."""
    return [[device, start[:1]] for device, start in places]
