"""Captured arrays that lie anywhere, and what becomes of them later: as with jax.pmap."""

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

pytestmark = pytest.mark.mapping

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
    "of weak type, on another device": lambda: jax.device_put(
        jnp.full((3000,), 2.5), jax.devices()[3]
    ),
    "a replicated number of weak type": lambda: jax_dist.replicate(jnp.asarray(2.5) * 1),
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

    found = mapped(_X)
    np.testing.assert_array_equal(found, expected)
    assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
    np.testing.assert_array_equal(jax.jit(mapped)(_X), expected)
    np.testing.assert_array_equal(jax.grad(lambda x: mapped(x).sum())(_X), np.ones(8))

    jax.block_until_ready(found)
    array.delete()
    np.testing.assert_array_equal(mapped(_X), expected)
    np.testing.assert_array_equal(mapped(_X + 1), expected + 1)


_AHEAD = {
    "lower": lambda mapped, x: mapped.lower(x).compile()(x),
    "trace": lambda mapped, x: mapped.trace(x).lower().compile()(x),
    "jit": lambda mapped, x: jax.jit(mapped).lower(x).compile()(x),
    "jaxpr": lambda mapped, x: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(mapped)(x))(x)[0],
    "export": lambda mapped, x: jax.export.export(jax.jit(mapped))(x).call(_everywhere(x)),
}


def _everywhere(x):
    return jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), ("q",)), P()))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("kind", ["NumPy", "on one device", "of weak type", "a key"])
@pytest.mark.parametrize("use", _AHEAD)
def test_ahead_of_time_it_takes_what_the_function_takes(use, kind):
    """A captured array that is lifted is no argument of the user's."""
    array = _ARRAYS.get(kind, lambda: np.ones(3000, np.float32))()
    body = _body(array)

    found = _AHEAD[use](jax_dist.pmap(body, "i", captures="lift"), _X)

    np.testing.assert_array_equal(found, jax.pmap(body, "i")(_X))
