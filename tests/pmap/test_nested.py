"""pmap inside pmap, on one mesh, beside vmap inside vmap."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import jax_dist

_X = np.arange(8.0, dtype=np.float32).reshape(2, 4)


def _vmap(fun, axis_name=None, **options):
    return jax.vmap(fun, axis_name=axis_name or "unnamed", **options)


def _lies_in_order(array, depth):
    """One shard a device, row by row over the first `depth` dimensions."""
    shards = sorted(
        array.addressable_shards, key=lambda s: [part.start or 0 for part in s.index[:depth]]
    )
    assert [shard.device for shard in shards] == jax.devices()[: len(shards)]
    assert all(shard.data.shape[:depth] == (1,) * depth for shard in shards)
    assert len(shards) == np.prod(array.shape[:depth])


def _twice(outer_name, inner_name, body):
    return lambda pmap: pmap(lambda row: pmap(body, inner_name)(row), outer_name)


def _closing_over(outside, inside=lambda value: value):
    """Read in the inner body what `outside` makes of the outer one's slice `[4]`."""

    def outer(pmap, row):
        value = outside(row)
        return pmap(lambda x: x + inside(value), "j")(row)

    return lambda pmap: pmap(lambda row: outer(pmap, row), "i")


def _turned_and_indexed(y):
    turned = lax.ppermute(y, "j", [(0, 1), (1, 2), (2, 3), (3, 0)])
    return turned, 10 * lax.axis_index("i") + lax.axis_index("j")


def _one_after_the_other(pmap):
    def outer(x):
        a = pmap(lambda y: lax.psum(y, "j"), "j")(x)
        return pmap(lambda y: y + lax.axis_index("j"), "j")(a)

    return pmap(outer, "i")


def _kernel(y):
    def run(source, target):
        target[...] = jnp.cos(source[...])

    shape = jax.ShapeDtypeStruct((1,), y.dtype)
    return lax.psum(pallas.pallas_call(run, shape, interpret=True)(y[None])[0], "j")


_CASES = {  # on `[2, 4]`
    "over the outer axis": _twice("i", "j", lambda y: lax.psum(y, "i")),
    "over the inner axis": _twice("i", "j", lambda y: lax.psum(y, "j")),
    "over both": _twice("i", "j", lambda y: lax.psum(y, ("i", "j"))),
    "no outer name": _twice(None, "j", lambda y: y * 2),
    "no inner name": _twice("i", None, lambda y: y * 2),
    "indices and permutations": _twice("i", "j", _turned_and_indexed),
    "one after the other": _one_after_the_other,
    "a kernel": _twice("i", "j", _kernel),
    "a gather": _twice("i", "j", lambda y: lax.all_gather(lax.all_gather(y, "j").sum(), "i").sum()),
    "a slice": _closing_over(lambda row: row, lambda row: row[lax.axis_index("j")]),
    "a sum": _closing_over(jnp.sum),
    "a sum over the outer axis": _closing_over(lambda row: lax.psum(row.sum(), "i")),
    "the outer index": _closing_over(lambda row: lax.axis_index("i")),
    "a key": _closing_over(lambda row: jax.random.uniform(jax.random.key(3))),
}


@pytest.mark.parametrize("case", _CASES)
def test_the_numbers_of_vmap_on_one_mesh(case):
    result = _CASES[case](jax_dist.pmap)(_X)

    chex.assert_trees_all_close(result, _CASES[case](_vmap)(_X), rtol=1e-6)
    for array in jax.tree.leaves(result):
        _lies_in_order(array, 2)


def test_gradients_of_what_an_inner_body_closes_over():
    def outer(row, weight):
        return jax_dist.pmap(lambda x: x * weight * lax.psum(weight, "i"), "j")(row)

    mapped = jax_dist.pmap(outer, "i", in_axes=(0, None))

    # weight * 2 * weight * x summed: 56 * weight ** 2
    assert jax.grad(lambda weight: mapped(_X, weight).sum())(3.0) == 2 * 56 * 3.0


def test_three_deep():
    x = np.arange(8.0, dtype=np.float32).reshape(2, 2, 2)

    def nested(pmap):
        innermost = lambda z: z - lax.pmean(z, ("i", "k"))
        middle = lambda y: pmap(innermost, "k")(y) + lax.psum(1, "j")
        return pmap(lambda x: pmap(middle, "j")(x), "i")

    result = nested(jax_dist.pmap)(x)

    np.testing.assert_allclose(result, nested(_vmap)(x))
    _lies_in_order(result, 3)


@pytest.mark.parametrize("size", [2, 4])
def test_inner_pmaps_of_another_name_or_size(size):
    def nested(pmap):
        def outer(x):
            a = pmap(lambda y: lax.psum(y, ("i", "j")), "j")(x)
            b = pmap(lambda y: lax.psum(y, "k") + lax.axis_index("k"), "k")(x[:size])
            return a.sum() + b

        return pmap(outer, "i")

    np.testing.assert_array_equal(nested(jax_dist.pmap)(_X), nested(_vmap)(_X))


def test_an_inner_pmap_may_shadow_the_name_of_the_outer():
    result = _twice("i", "i", lambda y: lax.psum(y, "i"))(jax_dist.pmap)(_X)

    assert result.tolist() == [[6] * 4, [22] * 4]


_AROUND = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
}


@pytest.mark.parametrize("around", _AROUND)
def test_under_a_transformation(around):
    nested = _twice("i", "j", lambda y: jnp.sin(y) + lax.pmean(y, ("i", "j")))
    ours, theirs = (_AROUND[around](nested(pmap))(_X) for pmap in (jax_dist.pmap, _vmap))

    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_donated_and_misplaced_arguments_go_to_the_mesh_of_both_axes():
    inner = jax_dist.pmap(lambda y: y + 1, "j")
    step = jax_dist.pmap(lambda s, x: inner(s) + x, "i", donate_argnums=0)
    state = jax.device_put(_X, jax.devices()[5])
    other = jax.device_put(_X, jax.devices()[6])

    for _ in range(3):
        state = step(state, other)

    np.testing.assert_array_equal(state, 4 * _X + 3)
    _lies_in_order(state, 2)
