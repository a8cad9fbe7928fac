"""What the tests of `rewrite` share: meshes, comparing, counting."""

import collections
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_dist._passes.interpreter import equations


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """On the first devices: `mesh_of(i=4, j=2)`."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return jax.sharding.Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    """Return normal numbers of f32."""
    return jax.numpy.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def assert_same(found: Any, wanted: Any, rtol: float = 2e-6, name: str = "") -> None:
    """Structure, types and values; sums over devices may come in another order."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted), name
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert _type(ours) == _type(theirs), name
        if jax.numpy.issubdtype(jax.typeof(ours).dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6, err_msg=name)


def _type(value: Any) -> tuple:
    aval = jax.typeof(value)
    return aval.shape, aval.dtype, aval.weak_type


def traced_names(rewritten: Any, *args: Any, **kwargs: Any) -> collections.Counter[str]:
    """How many equations of each primitive the rewritten program has, at any depth."""
    jaxpr = rewritten.trace(*args, **kwargs).jaxpr
    return collections.Counter(eqn.primitive.name for eqn in equations(jaxpr))


def compiled_collectives(call: Any, *args: Any) -> dict[str, int]:
    """How many collectives of each kind the compiled program has."""
    text = call.lower(*args).compile().as_text()
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in _KINDS}
    return {kind: count for kind, count in counts.items() if count}


_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


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
