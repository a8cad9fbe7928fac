"""Maximum and minimum over devices: special values, types, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_checks import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist._passes.gather_rules import extreme

NAN, INF = np.nan, np.inf
# One row a device, one column a case.
SPECIAL = np.array(
    [
        [1.0, NAN, -INF, INF, -0.0, -1.5, 6e4, 6e-8],
        [2.0, 1.0, -INF, 1.0, 0.0, -2.5, -6e4, -6e-8],
        [0.5, -INF, -INF, -INF, -0.0, -0.5, 0.0, 0.0],
        [2.0, INF, -INF, 7.0, 0.0, -9.5, 1.0, 0.0],
    ]
)


def over_devices(kind, x):
    """Return what each device gets, of `[4, *s]` with a row a device."""
    function = jax.shard_map(
        lambda row: extreme(kind, row, (0,), ("i",))[None],
        mesh=mesh_of(i=4),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=False,
    )
    return np.asarray(jax.jit(function)(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_special_values(dtype):
    """The largest number and the smallest of float16 are 6e4 and 6e-8, as far as it can say."""
    x = jnp.asarray(SPECIAL, dtype)
    large, small = jnp.asarray([6e4, 6e-8], dtype).astype(jnp.float32)
    largest = [2.0, NAN, -INF, INF, 0.0, -0.5, large, small]
    smallest = [0.5, NAN, -INF, -INF, 0.0, -9.5, -large, -small]
    for kind, wanted in (("max", largest), ("min", smallest)):
        for row in over_devices(kind, x).astype(np.float32):
            np.testing.assert_array_equal(row, wanted)


def test_pmax_itself_drops_a_nan():
    """If this fails, jax keeps it now, and `extreme` has a reason less."""
    largest = lambda row: lax.pmax(row, "i")
    function = jax.shard_map(largest, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"))
    assert jax.jit(function)(jnp.array([1.0, NAN, 4.0, 2.0])).tolist() == [4.0] * 4


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest"),
    [
        (jnp.int8, 100, -120),
        (jnp.uint8, 250, 3),
        (jnp.bool_, True, False),
        (jnp.float64, 1 + 1e-15, 1),
    ],
)
def test_types(dtype, largest, smallest):
    with jax.enable_x64(dtype == jnp.float64):
        x = jnp.asarray([[largest], [smallest], [smallest], [smallest]], dtype)
        assert over_devices("max", x).dtype == dtype
        assert over_devices("max", x).ravel().tolist() == [largest] * 4
        assert over_devices("min", x).ravel().tolist() == [smallest] * 4


# Ties within a device, between devices, and both at once; a NaN takes all.
TIES = np.array(
    [
        [[5.0, 1.0, 7.0, 0.0], [5.0, 2.0, 7.0, 1.0]],
        [[5.0, 3.0, 7.0, 2.0], [1.0, 0.0, 0.0, 3.0]],
        [[2.0, 3.0, 7.0, 4.0], [0.0, 3.0, 1.0, 5.0]],
        [[0.0, 0.0, 7.0, 6.0], [5.0, 1.0, 7.0, 7.0]],
    ],
    np.float32,
)


def cubed(x):
    """Return the sum of the largest of `[4, 2, 4]` over devices and rows, cubed."""
    largest = lambda block: extreme("max", block[0], (0,), ("i",))
    function = jax.shard_map(largest, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P())
    return jnp.sum(function(x) ** 3)


def cubed_on_one_device(x):
    return jnp.sum(x.max((0, 1)) ** 3)


def test_ties_share_the_gradient_on_whichever_device_they_are():
    wanted = jax.grad(cubed_on_one_device)(TIES)
    assert wanted[0, 0, 0] == 3 * 5**2 / 4
    np.testing.assert_allclose(jax.jit(jax.grad(cubed))(TIES), wanted, rtol=1e-6)


def test_second_derivative():
    direction = np.zeros_like(TIES)
    direction[1, 1, 3] = direction[3, 1, 3] = 2.0  # only the second is the largest

    wanted = np.zeros_like(TIES)
    wanted[3, 1, 3] = 2.0 * 6 * 7  # 6 x, at x = 7
    slope = jax.grad(lambda x: jnp.vdot(jax.grad(cubed)(x), direction))
    np.testing.assert_allclose(jax.jit(slope)(TIES), wanted, rtol=1e-6, atol=1e-6)
