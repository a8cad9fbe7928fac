"""pmap inside pmap, on one mesh, beside vmap inside vmap."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from watching import lies_on

import jax_dist

_X = np.arange(8.0, dtype=np.float32).reshape(2, 4)


def _vmap(fun, axis_name=None, **options):
    return jax.vmap(fun, axis_name=axis_name or "unnamed", **options)


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
    summed = pmap(lambda y: lax.psum(y, "j"), "j")
    indexed = pmap(lambda y: y + lax.axis_index("j"), "j")
    return pmap(lambda row: indexed(summed(row)), "i")


def _over_columns(pmap):
    def outer(row):
        inner = pmap(lambda column: column @ row[:2] + lax.psum(row[1], "i"), "j", in_axes=1)
        return inner(jnp.stack([row, row + 1]))  # [2, 4]

    return pmap(outer, "i")


def _kernel(y):
    def run(source, target):
        target[...] = jnp.cos(source[...])

    shape = jax.ShapeDtypeStruct((1,), y.dtype)
    return lax.psum(pallas.pallas_call(run, shape, interpret=True)(y[None])[0], "j")


def _three_deep(pmap):
    innermost = lambda z: z - lax.pmean(z, ("i", "k")) + lax.psum(1, "j")
    return lambda x: _twice("i", "j", lambda y: pmap(innermost, "k")(y))(pmap)(x.reshape(2, 2, 2))


_CASES = {  # on `[2, 4]`
    "over the outer axis": _twice("i", "j", lambda y: lax.psum(y, "i")),
    "over the inner axis": _twice("i", "j", lambda y: lax.psum(y, "j")),
    "over both": _twice("i", "j", lambda y: lax.psum(y, ("i", "j"))),
    "no outer name": _twice(None, "j", lambda y: y * 2),
    "no inner name": _twice("i", None, lambda y: y * 2),
    "indices and permutations": _twice("i", "j", _turned_and_indexed),
    "one after the other": _one_after_the_other,
    "over columns": _over_columns,
    "a kernel": _twice("i", "j", _kernel),
    "three deep": _three_deep,
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
        lies_on(array, jax.devices(), depth=3 if case == "three deep" else 2)


def _and_another(name, size):
    """Map over "j", and then over another axis."""

    summed = lambda y: lax.psum(y, ("i", "j"))
    indexed = lambda y: lax.psum(y, name) + lax.axis_index(name)
    outer = lambda pmap, x: pmap(summed, "j")(x).sum() + pmap(indexed, name)(x[:size])
    return lambda pmap: pmap(lambda x: outer(pmap, x), "i")


_VMAPPED = {  # the inner one, or one of two
    "another name": _and_another("k", 4),
    "another size": _and_another("j", 2),
    "another name and size": _and_another("k", 2),
    "the name of the outer": _twice("i", "i", lambda y: lax.psum(y, "i")),
}


@pytest.mark.parametrize("case", _VMAPPED)
def test_a_pmap_without_a_mesh_axis_is_a_vmap(case):
    np.testing.assert_array_equal(_VMAPPED[case](jax_dist.pmap)(_X), _VMAPPED[case](_vmap)(_X))


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


def test_gradients_of_what_an_inner_body_closes_over():
    def outer(row, weight):
        return jax_dist.pmap(lambda x: x * weight * lax.psum(weight, "i"), "j")(row)

    mapped = jax_dist.pmap(outer, "i", in_axes=(0, None))

    # weight * 2 * weight * x summed: 56 * weight ** 2
    assert jax.grad(lambda weight: mapped(_X, weight).sum())(3.0) == 2 * 56 * 3.0


def test_donated_and_misplaced_arguments_go_to_the_mesh_of_both_axes():
    inner = jax_dist.pmap(lambda y: y + 1, "j")
    step = jax_dist.pmap(lambda s, x: inner(s) + x, "i", donate_argnums=0)
    state, other = (jax.device_put(_X, device) for device in jax.devices()[5:7])

    for _ in range(3):
        state = step(state, other)

    np.testing.assert_array_equal(state, 4 * _X + 3)
    lies_on(state, jax.devices(), depth=2)
