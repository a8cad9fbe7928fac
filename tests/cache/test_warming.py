"""What JAX compiles from shapes is what the real call finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import cache


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    cache.enable(tmp_path)
    yield
    cache.enable(None)


def _mesh():
    return Mesh(np.array(jax.devices()), ("i",))


def _mapped(x):
    return jax.lax.psum(x * 2, "i")


def _case(name):
    """A fresh function, its specs, and real arguments."""
    spec, ones = jax.ShapeDtypeStruct((8, 3), jnp.float32), np.ones((8, 3), np.float32)
    sharding = NamedSharding(_mesh(), P("i"))
    if name == "plain":
        return jax.jit(lambda x: x + 1), (spec,), (ones,)
    if name == "tree and static":
        fun = jax.jit(lambda tree, n: tree["a"] * n, static_argnums=1)
        return fun, ({"a": spec}, 3), ({"a": ones}, 3)
    if name == "donated":
        return jax.jit(lambda x: x + 2, donate_argnums=0), (spec,), (jnp.asarray(ones),)
    if name == "sharded":
        placed = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)
        return jax.jit(lambda x: x + 3), (placed,), (jax.device_put(ones, sharding),)
    if name == "shard_map":
        fun = jax.jit(jax.shard_map(_mapped, mesh=_mesh(), in_specs=P("i"), out_specs=P()))
        return fun, (spec,), (ones,)
    # A function of its own: pmap of the same one twice compiles once.
    return jax_dist.pmap(lambda x: _mapped(x), "i"), (spec,), (ones,)


@pytest.mark.parametrize(
    "name", ["plain", "tree and static", "donated", "sharded", "shard_map", "pmap"]
)
def test_the_call_hits_what_was_compiled_from_shapes(name):
    fun, specs, _ = _case(name)
    with cache.stats() as warmed:
        fun.lower(*specs).compile()
    fun, _, args = _case(name)  # anew, as in another process
    with cache.stats() as seen:
        fun(*args)
    (function,) = warmed.functions

    assert (warmed.hits, warmed.written) == (0, 1)
    assert seen.functions[function].hits == 1
    assert seen.functions[function].misses == 0
