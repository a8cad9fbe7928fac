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


def over_devices(reduce, x, *, each=False):
    """Return what a function gives of `[4, *s]`, with a row a device: on all, or of each device."""
    specs = {"in_specs": P("i"), "out_specs": P("i") if each else P(), "check_vma": not each}
    return jax.jit(jax.shard_map(reduce, mesh=mesh_of(i=4), **specs))(x)


def extremes(kind, x):
    """Return the extreme of the rows, as each device has it."""
    reduce = lambda row: extreme(kind, row, (0,), ("i",))[None]
    return np.asarray(over_devices(reduce, x, each=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_special_values(dtype):
    """The largest number and the smallest of float16 are 6e4 and 6e-8, as far as it can say."""
    x = jnp.asarray(SPECIAL, dtype)
    large, small = jnp.asarray([6e4, 6e-8], dtype).astype(jnp.float32)
    largest = [2.0, NAN, -INF, INF, 0.0, -0.5, large, small]
    smallest = [0.5, NAN, -INF, -INF, 0.0, -9.5, -large, -small]
    for kind, wanted in (("max", largest), ("min", smallest)):
        for row in extremes(kind, x).astype(np.float32):
            np.testing.assert_array_equal(row, wanted)


def test_pmax_itself_drops_a_nan():
    """If this fails, jax keeps it now, and `extreme` has a reason less."""
    x = jnp.array([1.0, NAN, 4.0, 2.0])
    assert over_devices(lambda row: lax.pmax(row, "i"), x).tolist() == [4.0]


TYPES = {"int8": (100, -120), "uint8": (250, 3), "bool": (True, False), "float64": (1 + 1e-15, 1)}


@pytest.mark.parametrize("name", TYPES)
def test_types(name):
    dtype, (largest, smallest) = jnp.dtype(name), TYPES[name]
    with jax.enable_x64(dtype == jnp.float64):
        x = jnp.asarray([[largest], [smallest], [smallest], [smallest]], dtype)
        for kind, wanted in (("max", largest), ("min", smallest)):
            assert extremes(kind, x).dtype == dtype
            assert extremes(kind, x).ravel().tolist() == [wanted] * 4


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
    return jnp.sum(over_devices(lambda block: extreme("max", block[0], (0,), ("i",)), x) ** 3)


def test_ties_share_the_gradient_on_whichever_device_they_are():
    wanted = jax.grad(lambda x: jnp.sum(x.max((0, 1)) ** 3))(TIES)
    assert wanted[0, 0, 0] == 3 * 5**2 / 4
    np.testing.assert_allclose(jax.jit(jax.grad(cubed))(TIES), wanted, rtol=1e-6)


def test_second_derivative():
    direction = np.zeros_like(TIES)
    direction[1, 1, 3] = direction[3, 1, 3] = 2.0  # only the second is the largest

    wanted = np.zeros_like(TIES)
    wanted[3, 1, 3] = 2.0 * 6 * 7  # 6 x, at x = 7
    slope = jax.grad(lambda x: jnp.vdot(jax.grad(cubed)(x), direction))
    np.testing.assert_allclose(jax.jit(slope)(TIES), wanted, rtol=1e-6, atol=1e-6)
