"""Captured arrays that lie anywhere, and what becomes of them later: as with jax.pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

_X = np.arange(8.0, dtype=np.float32)


def _cut(size):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("q", "r"))
    return jax.device_put(np.arange(size, dtype=np.float32), NamedSharding(mesh, P("q")))


_ARRAYS = {
    "on one device": lambda: jnp.ones(3000),
    "on another device": lambda: jax.device_put(np.ones(3000, np.float32), jax.devices()[3]),
    "replicated": lambda: jax_dist.replicate(jnp.ones(3000)),
    "a key": lambda: jax.random.key(0),
    "a raw key": lambda: jax.random.PRNGKey(0),
    "a replicated key": lambda: jax_dist.replicate(jax.random.key(3)),
    "a mean over devices": lambda: jax_dist.pmap(lambda a: a * 2, "q")(_X).mean(),
    "a result of the same name": lambda: jax_dist.pmap(lambda a: a * 2, "i")(_X),
    "a replicated number": lambda: jax_dist.replicate(jnp.float32(2.5)),
    "of weak type": lambda: jnp.full((3000,), 2.5),
    "cut, small": lambda: _cut(8),
    "cut, large": lambda: _cut(800),
}


def _body(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or array.dtype == np.uint32

    def body(x):
        if is_key:
            return x + jax.random.uniform(array)
        return x - jax.jit(lambda m: m.sum())(array) - array.ravel()[0]

    return body


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("captures", ["lift", "allow"])
@pytest.mark.parametrize("name", _ARRAYS)
def test_a_captured_array_keeps_its_value(name, captures):
    """Wherever it lies, and when it is donated to something else and gone."""
    array = _ARRAYS[name]()
    body = _body(array)
    expected = jax.pmap(body, "i")(_X)
    mapped = jax_dist.pmap(body, "i", captures=captures)

    result = mapped(_X)
    np.testing.assert_array_equal(result, expected)
    assert (result.dtype, result.weak_type) == (expected.dtype, expected.weak_type)
    np.testing.assert_array_equal(jax.jit(mapped)(_X), expected)
    np.testing.assert_array_equal(mapped.lower(_X).compile()(_X), expected)
    np.testing.assert_array_equal(mapped.trace(_X).lower().compile()(_X), expected)
    np.testing.assert_array_equal(jax.grad(lambda x: mapped(x).sum())(_X), np.ones(8))

    jax.block_until_ready(result)
    array.delete()
    np.testing.assert_array_equal(mapped(_X), expected)
    np.testing.assert_array_equal(mapped(_X + 1), expected + 1)
