"""pmap inside pmap, on one mesh. Expected numbers were made with jax 0.7.2, which could do it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import jax_dist

pytestmark = pytest.mark.mapping

_X = np.arange(8.0, dtype=np.float32).reshape(2, 4)


def _lies_in_order(array, depth):
    """One shard a device, row by row over the first `depth` dimensions."""
    shards = sorted(
        array.addressable_shards, key=lambda s: [part.start or 0 for part in s.index[:depth]]
    )
    assert [shard.device for shard in shards] == jax.devices()[: len(shards)]
    assert all(shard.data.shape[:depth] == (1,) * depth for shard in shards)
    assert len(shards) == np.prod(array.shape[:depth])


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ("i", [[4, 6, 8, 10], [4, 6, 8, 10]]),
        ("j", [[6, 6, 6, 6], [22, 22, 22, 22]]),
        (("i", "j"), [[28] * 4, [28] * 4]),
    ],
)
def test_collectives_over_either_axis_and_both(axes, expected):
    inner = jax_dist.pmap(lambda y: lax.psum(y, axes), "j")

    result = jax_dist.pmap(lambda x: inner(x), "i")(_X)

    assert result.tolist() == expected
    _lies_in_order(result, 2)


@pytest.mark.parametrize("outer_name", ["i", None])
@pytest.mark.parametrize("inner_name", ["j", None])
def test_either_axis_may_have_no_name(outer_name, inner_name):
    inner = jax_dist.pmap(lambda y: y * 2, inner_name)

    result = jax_dist.pmap(lambda x: inner(x) + 1, outer_name)(_X)

    np.testing.assert_array_equal(result, _X * 2 + 1)
    _lies_in_order(result, 2)


_CLOSED_OVER = {  # what the inner body reads of the outer one's slice `[4]`
    "a slice": (lambda row: row, [[0, 2, 4, 6], [8, 10, 12, 14]]),
    "a sum of it": (lambda row: row.sum(), [[6, 7, 8, 9], [26, 27, 28, 29]]),
    "a sum over the outer axis": (
        lambda row: lax.psum(row.sum(), "i"),
        [[28, 29, 30, 31], [32, 33, 34, 35]],
    ),
    "the index": (lambda row: lax.axis_index("i"), [[0, 1, 2, 3], [5, 6, 7, 8]]),
    "a key": (lambda row: jax.random.bits(jax.random.key(3)) * 0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
}


@pytest.mark.parametrize("name", _CLOSED_OVER)
def test_an_inner_body_may_close_over_values_of_the_outer(name):
    outside, expected = _CLOSED_OVER[name]

    def outer(row):
        value = outside(row)
        part = (lambda v: v[lax.axis_index("j")]) if jnp.ndim(value) else (lambda v: v)
        return jax_dist.pmap(lambda x: x + part(value), "j")(row)

    result = jax_dist.pmap(outer, "i")(_X)

    np.testing.assert_array_equal(result, expected)


def test_gradients_of_what_an_inner_body_closes_over():
    def outer(row, weight):
        return jax_dist.pmap(lambda x: x * weight * lax.psum(weight, "i"), "j")(row)

    mapped = jax_dist.pmap(outer, "i", in_axes=(0, None))

    # weight * 2 * weight * x summed: 56 * weight ** 2
    assert jax.grad(lambda weight: mapped(_X, weight).sum())(3.0) == 2 * 56 * 3.0


def test_indices_and_permutations():
    def body(y):
        turned = lax.ppermute(y, "j", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return turned, 10 * lax.axis_index("i") + lax.axis_index("j")

    turned, index = jax_dist.pmap(lambda x: jax_dist.pmap(body, "j")(x), "i")(_X)

    assert turned.tolist() == [[3, 0, 1, 2], [7, 4, 5, 6]]
    assert index.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_three_deep():
    x = np.arange(8.0, dtype=np.float32).reshape(2, 2, 2)

    @jax_dist.pmap(axis_name="i")
    def outer(x):
        @jax_dist.pmap(axis_name="j")
        def middle(y):
            return jax_dist.pmap(lambda z: z - lax.pmean(z, ("i", "k")), "k")(y) + lax.psum(1, "j")

        return middle(x)

    # The mean over i and k leaves j: 2.5 and 4.5. Then 2 is added.
    expected = x - x.mean(axis=(0, 2), keepdims=True) + 2
    np.testing.assert_allclose(outer(x), expected)
    assert len(outer(x).sharding.device_set) == 8


def test_two_inner_pmaps_of_one_size_and_name_share_the_axis():
    def outer(x):
        a = jax_dist.pmap(lambda y: lax.psum(y, "j"), "j")(x)
        return jax_dist.pmap(lambda y: y + lax.axis_index("j"), "j")(a)

    result = jax_dist.pmap(outer, "i")(_X)

    assert result.tolist() == [[6, 7, 8, 9], [22, 23, 24, 25]]
    assert len(result.sharding.device_set) == 8


@pytest.mark.parametrize("size", [2, 4])
def test_inner_pmaps_of_another_name_or_size(size):
    def outer(x):
        a = jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")), "j")(x)
        b = jax_dist.pmap(lambda y: lax.psum(y, "k") + lax.axis_index("k"), "k")(x[:size])
        return a.sum() + b

    result = jax_dist.pmap(outer, "i")(_X)

    np.testing.assert_array_equal(
        result, 112 + _X[:, :size].sum(1, keepdims=True) + np.arange(size)
    )


def test_an_inner_pmap_may_shadow_the_name_of_the_outer():
    inner = jax_dist.pmap(lambda y: lax.psum(y, "i"), "i")

    result = jax_dist.pmap(lambda x: inner(x), "i")(_X)

    assert result.tolist() == [[6] * 4, [22] * 4]


def test_a_kernel_in_an_inner_body():
    def kernel(source, target):
        target[...] = jnp.cos(source[...])

    def inner(y):
        shape = jax.ShapeDtypeStruct((1,), y.dtype)
        return lax.psum(pallas.pallas_call(kernel, shape, interpret=True)(y[None])[0], "j")

    x = np.ones((2, 4), np.float32)

    result = jax_dist.pmap(lambda row: jax_dist.pmap(inner, "j")(row), "i")(x)

    np.testing.assert_allclose(result, 4 * np.cos(x), rtol=1e-6)


def test_under_jit_scan_and_grad():
    def nested(pmap):
        inner = pmap(lambda y: jnp.sin(y) + lax.pmean(y, ("i", "j")), axis_name="j")
        return pmap(lambda x: inner(x), axis_name="i")

    ours, oracle = nested(jax_dist.pmap), nested(jax.vmap)

    for way in (
        jax.jit,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)),
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    ):
        chex.assert_trees_all_close(way(ours)(_X), way(oracle)(_X), rtol=1e-5)


def test_donated_and_misplaced_arguments_go_to_the_mesh_of_both_axes():
    inner = jax_dist.pmap(lambda y: y + 1, "j")
    step = jax_dist.pmap(lambda s, x: inner(s) + x, "i", donate_argnums=0)
    state = jax.device_put(_X, jax.devices()[5])
    other = jax.device_put(_X, jax.devices()[6])

    for _ in range(3):
        state = step(state, other)

    np.testing.assert_array_equal(state, 4 * _X + 3)
    _lies_in_order(state, 2)
