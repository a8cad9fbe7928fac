"""Helpers of the tests of rewriting: meshes, planning, comparing, counting."""

import collections
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_dist._passes import PassPlan
from jax_dist._passes.gathers import plan_gathers
from jax_dist._passes.interpreter import equations, evaluate


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """On the first devices: `mesh_of(i=4, j=2)`."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return jax.sharding.Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    """Return normal numbers of f32."""
    return jax.numpy.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def assert_same(actual: Any, wanted: Any, rtol: float = 2e-6, name: str = "") -> None:
    """Structure, types and values; sums over devices may come in another order."""
    assert jax.tree.structure(actual) == jax.tree.structure(wanted), name
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert _type(ours) == _type(theirs), name
        if jax.numpy.issubdtype(jax.typeof(ours).dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6, err_msg=name)


def _type(value: Any) -> tuple:
    aval = jax.typeof(value)
    return aval.shape, aval.dtype, aval.weak_type


def assert_close(actual: Any, wanted: Any, tolerance: float, name: str = "") -> None:
    """Compare relative to the largest of the finite values, for a mean may be near 0."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype), name
    actual, wanted = (x.astype(np.float64) if tolerance else x for x in (actual, wanted))
    largest = np.max(np.abs(wanted), initial=0.0) if tolerance else 0
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * largest, err_msg=name)


def plan_for(function: Callable[..., Any], *args: Any, exact: bool = False) -> PassPlan:
    """Plan which gathers of a function give way to reductions."""
    return plan_gathers(jax.make_jaxpr(function)(*args), exact=exact)


def rewrite_gathers(function: Callable[..., Any], *, exact: bool = False) -> Callable[..., Any]:
    """Return the function after the pass, planned anew in every call; it gives leaves."""

    def call(*args: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(function)(*args)
        return evaluate(plan_gathers(jaxpr, exact=exact).jaxpr or jaxpr, jax.tree.leaves(args))

    return call


def traced_names(jitted: Any, *args: Any, **kwargs: Any) -> collections.Counter[str]:
    """Count the equations of each primitive in the program, at any depth."""
    jaxpr = jitted.trace(*args, **kwargs).jaxpr
    return collections.Counter(eqn.primitive.name for eqn in equations(jaxpr))


def traced_collectives(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Count the gathers and the reductions that a function traces."""
    names = traced_names(jax.jit(function), *args)
    return names["all_gather"], sum(names[kind] for kind in _REDUCTIONS)


def compiled_collectives(compiled: Any) -> dict[str, int]:
    """Count the collectives of each kind in a compiled program."""
    return dict(collections.Counter(re.findall(_COMPILED, compiled.as_text())))


_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin")
_COMPILED = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def line_of(function: Callable, after: int = 0) -> int:
    """Return the line where a function begins, or one `after` it."""
    return function.__code__.co_firstlineno + after


@contextlib.contextmanager
def no_compiles() -> Iterator[None]:
    """Assert that no program is compiled inside."""
    events: list[str] = []
    heard = lambda event, *_, **__: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert "/jax/core/compile/backend_compile_duration" not in events
