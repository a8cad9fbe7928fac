"""What the tests of the gathers share: meshes, planning a function, counting, comparing."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_dist._passes import PassPlan
from jax_dist._passes.gathers import plan_gathers
from jax_dist._passes.interpreter import equations, evaluate

_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin")


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices: `mesh_of(i=4, j=2)`."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return jax.sharding.Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def blocks(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers of f32; the shape is that of the whole array."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def planned(function: Callable[..., Any], *args: Any, exact: bool = False) -> PassPlan:
    return plan_gathers(jax.make_jaxpr(function)(*args), exact=exact)


def rewritten_leaves(function: Callable[..., Any], *, exact: bool = False) -> Callable[..., Any]:
    """Return the function after the pass, planned anew in every call; it gives leaves."""

    def call(*args: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(function)(*args)
        return evaluate(plan_gathers(jaxpr, exact=exact).jaxpr or jaxpr, jax.tree.leaves(args))

    return call


def count(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Return the numbers of gathers and of reductions that a function traces."""
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args))]
    return names.count("all_gather"), sum(map(names.count, _REDUCTIONS))


def assert_close(actual: Any, wanted: Any, tolerance: float, name: str = "") -> None:
    """Compare relative to the largest of the finite values, for a mean may be near 0."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype), name
    actual, wanted = (x.astype(np.float64) if tolerance else x for x in (actual, wanted))
    largest = np.max(np.abs(wanted), initial=0.0) if tolerance else 0
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * largest, err_msg=name)
