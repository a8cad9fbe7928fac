"""What the tests of the gathers share: meshes, planning a function, counting, comparing."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gather_cases import Count

from jax_dist._rewrite.gathers import plan_gathers
from jax_dist._rewrite.interpreter import equations, run
from jax_dist._rewrite.pipeline import PassPlan

_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin")


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """On the first devices: `mesh_of(i=4, j=2)`."""
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes))


def blocks(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of f32; the shape is that of the whole array."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def planned(function: Callable[..., Any], *args: Any, exact: bool = False) -> PassPlan:
    return plan_gathers(jax.make_jaxpr(function)(*args), exact=exact)


def rewritten_leaves(
    function: Callable[..., Any], *, exact: bool = False
) -> Callable[..., list[Any]]:
    """The function after the pass, planned anew in every call; gives leaves."""

    def call(*args: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(function)(*args)
        plan = plan_gathers(jaxpr, exact=exact)
        leaves = jax.tree.leaves(args)
        return plan.evaluate(*leaves) if plan.evaluate else run(jaxpr, leaves, {})

    return call


def count(function: Callable[..., Any], *args: Any) -> Count:
    """The collectives that a function traces."""
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args))]
    return Count(
        gathers=names.count("all_gather"),
        reductions=sum(map(names.count, _REDUCTIONS)),
        scatters=names.count("reduce_scatter"),
    )


def assert_close(found: Any, wanted: Any, tolerance: float, name: str = "") -> None:
    """Relative to the largest of the finite values, for a mean may be near 0."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if tolerance == 0:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        return
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    largest = np.max(np.abs(wanted), initial=0.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * largest, err_msg=name)


def lines(plan: PassPlan) -> list[str]:
    """The findings, one a line, without their lines."""
    return [f"{each.outcome}: {each.what}{each.why and '; '}{each.why}" for each in plan.findings]
