"""What is compiled from shapes is what the real call finds."""

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
def test_the_call_hits_what_was_warmed(name):
    fun, specs, _ = _case(name)
    warmed = cache.warm(fun, *specs)
    fun, _, args = _case(name)  # anew, as in another process
    with cache.stats() as seen:
        fun(*args)

    assert (warmed.hit, warmed.written) == (False, True)
    assert seen.functions[warmed.function].hits == 1
    assert seen.functions[warmed.function].misses == 0


def test_a_second_time_it_is_there():
    def step(x):
        return x * 2.375

    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    first, second = cache.warm(step, spec), cache.warm(step, spec)

    assert (first.function, first.written) == ("jit_step", True)
    assert (second.hit, second.written) == (True, False)
    assert str(second) == "jit_step: in the cache"


def test_what_an_earlier_run_wrote_is_there():
    def step():
        def step(x):
            return x * 2.40625

        return step

    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    first, second = cache.warm(step(), spec), cache.warm(step(), spec)

    assert (first.hit, first.written) == (False, True)
    assert (second.hit, second.written) == (True, False)


def test_what_cannot_be_written_says_why():
    cache.enable(None)
    warmed = cache.warm(lambda x: x * 2.4375, jax.ShapeDtypeStruct((3,), jnp.float32))

    assert (warmed.hit, warmed.written) == (False, False)
    assert warmed.unwritten == "there is no cache directory"
    assert str(warmed).endswith("s, not written: there is no cache directory")
