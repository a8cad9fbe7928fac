"""The verdict on the key of a program; `test_captured_keys.py` looks at keys in two processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.report import find_key_causes

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
_MESH = Mesh(np.array(jax.devices()[:4]), ("i",), axis_types=(AxisType.Auto,))


@custom_partitioning
def _centre(x):
    return x - x.mean(-1, keepdims=True)


_centre.def_partition(
    lambda mesh, args, result: (mesh, _centre.fun, result.sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)
_total = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=_MESH, in_specs=P("i"), out_specs=P())
_STABLE = {
    "plain": lambda x: {"a": x * 2, "b": x + 1},
    "shard_map": _total,
    "partitioned by one device": lambda x: _centre(x),
    "numbers in the program": lambda x: x * 123456789.0 + 0x7F3A12,
}


@pytest.mark.parametrize("name", _STABLE)
def test_a_stable_program_has_no_causes(name):
    assert find_key_causes(jax.jit(_STABLE[name]).lower(_X), ()) == ()


def test_an_address_in_the_program_is_a_cause():
    spread = jax.device_put(_X, NamedSharding(_MESH, P("i")))
    (cause,) = find_key_causes(jax.jit(lambda x: _centre(x)).lower(spread), ())
    assert cause.name == "custom-partitioning"


_SHAPE = jax.ShapeDtypeStruct((4, 3), jnp.float32)
_CALLBACKS = {
    "pure_callback": lambda x: jax.pure_callback(np.asarray, _SHAPE, x),
    "io_callback": lambda x: io_callback(np.asarray, _SHAPE, x, ordered=True),
    "debug.print": lambda x: (jax.debug.print("{}", x[0, 0]), x)[1],
}


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="jax writes them to the cache")
@pytest.mark.parametrize("name", _CALLBACKS)
def test_callbacks_are_never_written(name):
    (cause,) = find_key_causes(jax.jit(_CALLBACKS[name]).lower(_X), ())
    assert cause.name == "host-callback"
