"""Loops around pmaps: nothing is moved between steps.

The compiled program tells: no gather, permutation or exchange, and as many reductions as the mapped
functions have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import (
    assert_same,
    compiled_collectives,
    mesh_of,
    numbers,
)

import jax_dist
from jax_dist import explain, rewrite

pytestmark = pytest.mark.rewriting

_X = numbers(4, 3)
_XS = numbers(6, 4, 3, seed=1)
_MESHES = {
    "reversed": Mesh(np.array(jax.devices()[:4])[::-1], ("data",)),
    "4x2": mesh_of(data=4, model=2),
    "no mesh": None,
}
_PMAPS = pytest.mark.parametrize(
    "pmap", [jax.pmap, jax_dist.pmap], ids=["jax.pmap", "jax_dist.pmap"]
)


def _meshes_for(pmap):
    """All for jax.pmap; ours is the same shard_map, so one will do."""
    return [(name, mesh) for name, mesh in _MESHES.items() if pmap is jax.pmap or name == "4x2"]


def _step(pmap):
    """`[4, 3] -> [4, 3]`, with one reduction."""
    return pmap(lambda x: jnp.sin(lax.pmean(x, "i") * 2 - x * lax.axis_index("i")), "i")


def _weighted(pmap):
    """`[], [4, 3] -> [], [4, 3]`, with one reduction."""
    return pmap(
        lambda w, x: (lax.psum(x * w, "i").mean(), jnp.cos(x + w)),
        "i",
        in_axes=(None, 0),
        out_axes=(None, 0),
    )


def _scan(pmap):
    step = _step(pmap)
    return lambda x: lax.scan(lambda c, _: (jnp.cos(step(c)) + 1, c.sum()), x, None, length=5)


def _scan_over_batches(pmap):
    step = _step(pmap)
    return lambda x: lax.scan(lambda c, batch: (step(c) * batch, step(batch)), x, jnp.asarray(_XS))


def _fori(pmap):
    step = _step(pmap)
    return lambda x: lax.fori_loop(1, 5, lambda i, c: step(c) * i, x)


def _while(pmap):
    step = _step(pmap)
    return lambda x: lax.while_loop(
        lambda c: c[1] < 4, lambda c: (step(c[0]) + c[1], c[1] + 1), (x, 0)
    )


def _shared_state(pmap):
    both = _weighted(pmap)

    def body(carry, _):
        weight, x = carry
        loss, x = both(weight, x)
        return (weight - 0.1 * loss, x), loss

    return lambda x: lax.scan(body, (jnp.float32(1.0), x), None, length=3)


def _cond_inside(pmap):
    step = _step(pmap)
    body = lambda c, i: (lax.cond(i > 2, step, lambda c: c * 2, c), None)
    return lambda x: lax.scan(body, x, jnp.arange(5))[0]


def _loop_in_a_loop(pmap):
    step = _step(pmap)
    inner = lambda c: lax.fori_loop(0, 2, lambda _, c: step(c), c)
    return lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=3)[0]


def _two_pmaps(pmap):
    first, second = _step(pmap), pmap(lambda x: x - lax.pmax(x, "i"), "i")
    return lambda x: lax.scan(lambda c, _: (second(first(c) * 2), None), x, None, length=3)[0]


def _jit_in_the_loop(pmap):
    step = jax.jit(lambda c, w: jax.jit(_step(pmap))(c * 2) + w)
    return lambda x: lax.scan(lambda c, w: (step(c, w), None), x, jnp.arange(3.0))[0]


def _keys(pmap):
    noisy = pmap(lambda x, key: x + jax.random.normal(key, x.shape) * lax.pmean(x, "i"), "i")

    def body(carry, _):
        x, key = carry
        key, now = jax.random.split(key)
        return (noisy(x, jax.random.split(now, 4)), key), None

    return lambda x: lax.scan(body, (x, jax.random.key(1)), None, length=3)[0][0]


# By name: what makes the function from a pmap, the reductions of its mapped functions and of its
# glue in one step, and how the results lie.
_MAPPED_STATE = {
    "scan": (_scan, 2, [P("data"), P()]),
    "scan over batches": (_scan_over_batches, 2, [P("data"), P(None, "data")]),
    "fori": (_fori, 1, [P("data")]),
    "while": (_while, 1, [P("data"), P()]),
    "shared state": (_shared_state, 1, [P(), P("data"), P()]),
    "cond inside": (_cond_inside, 1, [P("data")]),
    "loop in a loop": (_loop_in_a_loop, 1, [P("data")]),
    "two pmaps": (_two_pmaps, 2, [P("data")]),
    "jit in the loop": (_jit_in_the_loop, 1, [P("data")]),
    "keys": (_keys, 1, [P("data")]),
}


@pytest.mark.thorough
@_PMAPS
@pytest.mark.parametrize("name", _MAPPED_STATE)
def test_nothing_is_moved_between_steps(name, pmap):
    make, reductions, specs = _MAPPED_STATE[name]
    fun = make(pmap)
    wanted = jax.jit(fun)(_X)

    for mesh_name, mesh in _meshes_for(pmap):
        rewritten = rewrite(fun, mesh=mesh)
        found = rewritten(_X)
        assert_same(found, wanted, rtol=2e-5, name=mesh_name)
        counts = compiled_collectives(rewritten, _X)
        # XLA may merge two reductions; it must not need anything else.
        assert set(counts) == {"all-reduce"}, mesh_name
        assert counts["all-reduce"] <= reductions, mesh_name
        if mesh is not None:
            for leaf, spec in zip(jax.tree.leaves(found), specs, strict=True):
                there = NamedSharding(mesh, spec)
                assert leaf.sharding.is_equivalent_to(there, leaf.ndim), (mesh_name, leaf.sharding)


@pytest.mark.parametrize(
    ("name", "pmap"),
    [
        ("scan", jax.pmap),
        ("scan over batches", jax_dist.pmap),
        ("shared state", jax.pmap),
        ("loop in a loop", jax_dist.pmap),
    ],
)
def test_gradients_through_a_loop(name, pmap):
    fun = _MAPPED_STATE[name][0](pmap)
    loss = lambda f: lambda x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(x)))
    wanted = jax.jit(jax.grad(loss(fun)))(_X)

    before = jax.jit(jax.grad(loss(rewrite(fun, mesh=_MESHES["4x2"]))))
    after = rewrite(jax.grad(loss(fun)), mesh=_MESHES["reversed"])
    for call in (before, after):
        np.testing.assert_allclose(call(_X), wanted, rtol=1e-4, atol=2e-5)


@_PMAPS
def test_the_backward_loop_moves_nothing_either(pmap):
    table = numbers(6, 3, seed=4)
    step = pmap(lambda v: jnp.sum(jnp.sin(table * v), 0) * lax.pmean(v, "i"), "i")
    loss = lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0].sum()
    rewritten = rewrite(jax.grad(loss), mesh=_MESHES["4x2"])

    np.testing.assert_allclose(rewritten(_X), jax.jit(jax.grad(loss))(_X), rtol=1e-4, atol=1e-5)
    assert set(compiled_collectives(rewritten, _X)) == {"all-reduce"}


def test_arguments_that_are_cut_stay_where_they_are():
    mesh = _MESHES["4x2"]
    x = jax.device_put(_X, NamedSharding(mesh, P("data")))
    rewritten = rewrite(_fori(jax.pmap), mesh=mesh)

    with jax.transfer_guard("disallow"):
        found = rewritten(x)
    assert found.sharding == NamedSharding(mesh, P("data"))
    assert compiled_collectives(rewritten, x) == {"all-reduce": 1}


def _of_two_sizes(x):
    four = jax.pmap(lambda x: x - lax.pmean(x, "i"), "i")
    two = jax.pmap(lambda x: x * lax.pmean(x, "i"), "i")
    step = lambda c, _: ((four(c[0]), two(c[1])), None)
    return lax.scan(step, (x, x[:2]), None, length=3)[0]


def test_a_loop_around_pmaps_of_two_sizes():
    mesh = _MESHES["4x2"]
    centred = np.asarray(_X) - np.mean(_X, 0)
    second = np.asarray(_X[:2])
    for _ in range(3):
        second = second * np.mean(second, 0)
    found = rewrite(_of_two_sizes, mesh=mesh)(_X)
    np.testing.assert_allclose(found[0], centred, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], second, rtol=1e-4, atol=1e-6)


def test_a_program_that_only_works_when_rewritten_is_explained():
    report = explain(_of_two_sizes, _X, mesh=_MESHES["4x2"])

    assert [f.outcome for f in report.findings] == ["rewritten", "rewritten", "noted"]
    assert report.findings[-1].what.startswith("the program as it is does not compile")
