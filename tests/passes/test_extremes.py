"""Maximum and minimum over devices: special values, types, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_checks import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.reductions import extreme, has_extremes

pytestmark = pytest.mark.rewriting

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


def over_devices(kind, x, axes=(0,)):
    """Of `[4, *s]`, a row a device: `[4, *r]`, what each device gets."""
    function = jax.shard_map(
        lambda row: extreme(kind, row, axes, ("i",))[None],
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
    for device in range(4):
        np.testing.assert_array_equal(over_devices("max", x)[device].astype(np.float32), largest)
        np.testing.assert_array_equal(over_devices("min", x)[device].astype(np.float32), smallest)


def test_pmax_itself_drops_a_nan():
    """If this fails, jax keeps it now, and `extreme` has a reason less."""
    function = jax.shard_map(
        lambda row: lax.pmax(row, "i"), mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i")
    )
    found = jax.jit(function)(jnp.array([1.0, NAN, 4.0, 2.0]))
    assert found.tolist() == [4.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest"),
    [(jnp.int8, 100, -120), (jnp.int32, 100, -120), (jnp.uint8, 250, 3), (jnp.bool_, True, False)],
)
def test_whole_numbers_and_booleans(dtype, largest, smallest):
    x = jnp.asarray([[largest], [smallest], [smallest], [smallest]], dtype)
    assert over_devices("max", x).dtype == dtype
    assert over_devices("max", x).ravel().tolist() == [largest] * 4
    assert over_devices("min", x).ravel().tolist() == [smallest] * 4


def test_double_precision():
    with jax.enable_x64(True):  # noqa: FBT003
        x = jnp.asarray([[1.0], [1.0 + 1e-15], [NAN], [0.0]])
        assert np.isnan(over_devices("max", x)).all()
        assert over_devices("max", x[:, 0:1].at[2].set(0)).ravel().tolist() == [1.0 + 1e-15] * 4


def test_types_without_an_order():
    assert not has_extremes(jnp.complex64)
    assert not has_extremes(jnp.float8_e4m3fn)


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
SHARES = np.array(
    [
        [[1 / 4, 0, 1 / 6, 0], [1 / 4, 0, 1 / 6, 0]],
        [[1 / 4, 1 / 3, 1 / 6, 0], [0, 0, 0, 0]],
        [[0, 1 / 3, 1 / 6, 0], [0, 1 / 3, 0, 0]],
        [[0, 0, 1 / 6, 0], [1 / 4, 0, 1 / 6, 1]],
    ],
    np.float32,
)


def total(x):
    """Of the largest of `[4, 2, 4]` over devices and rows, cubed."""
    function = jax.shard_map(
        lambda block: extreme("max", block[0], (0,), ("i",)),
        mesh=mesh_of(i=4),
        in_specs=P("i"),
        out_specs=P(),
    )
    return jnp.sum(function(x) ** 3)


def test_ties_share_the_gradient_on_whichever_device_they_are():
    wanted = SHARES * 3 * np.max(TIES, (0, 1)) ** 2
    np.testing.assert_allclose(jax.jit(jax.grad(total))(TIES), wanted, rtol=1e-6)
    plain = jax.grad(lambda x: jnp.sum(x.max((0, 1)) ** 3))(TIES)
    np.testing.assert_allclose(plain, wanted, rtol=1e-6)


def test_second_derivative():
    direction = np.zeros_like(TIES)
    direction[1, 1, 3] = direction[3, 1, 3] = 2.0  # only the second is the largest

    def slope(x):
        return jnp.vdot(jax.grad(total)(x), direction)

    wanted = np.zeros_like(TIES)
    wanted[3, 1, 3] = 2.0 * 6 * 7  # 6 x, at x = 7
    np.testing.assert_allclose(jax.jit(jax.grad(slope))(TIES), wanted, rtol=1e-6, atol=1e-6)
