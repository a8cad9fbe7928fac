"""Programs as people write them with pmap: rewritten, they give the same numbers on all devices."""

import functools
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from pmap_programs import PROGRAMS

import jax_dist
from jax_dist import rewrite
from jax_dist.errors import CapturedArrayWarning

_DEVICES = np.array(jax.devices())
_TARGETS = {
    "jax.pmap, 4x2": (jax.pmap, Mesh(_DEVICES.reshape(4, 2), ("data", "model"))),
    "jax_dist.pmap, no mesh": (jax_dist.pmap, None),
}


@functools.cache
def _as_given(name):
    return PROGRAMS[name](jax.pmap, jax.jit)


def _rewritten(mesh):
    """Return the rewritten function, for `compiled` of the program."""
    return lambda fun, **options: rewrite(jax.jit(fun, **options), mesh=mesh)


def _cases():
    for name in PROGRAMS:
        for target in _TARGETS:
            yield pytest.param(name, target, id=f"{name}, {target}")


@pytest.mark.parametrize(("name", "target"), list(_cases()))
def test_numbers_stay_and_results_lie_on_all_devices(name, target):
    pmap, mesh = _TARGETS[target]
    wanted = _as_given(name)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = PROGRAMS[name](pmap, _rewritten(mesh))

    captures = name == "model_that_captures_its_table"
    assert {warning.category for warning in heard} == (
        {CapturedArrayWarning} if captures else set()
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    devices = set(_DEVICES[:4]) if mesh is None else set(mesh.devices.flat)
    assert jax.tree.leaves(found)[0].sharding.device_set == devices


def test_numbers_are_numbers():
    """Nothing is compared where all is 0 or NaN."""
    for name in PROGRAMS:
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(_as_given(name))]
        assert all(np.isfinite(leaf).all() for leaf in leaves), name
        assert max(np.std(leaf) + abs(np.mean(leaf)) for leaf in leaves) > 1e-3, name
