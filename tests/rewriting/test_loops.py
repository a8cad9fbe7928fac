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
    line_of,
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


def _columns(pmap):
    """`[3, 4] -> [3, 4]`, with one reduction."""
    return pmap(lambda x: jnp.tanh(x - lax.pmean(x, "i")), "i", in_axes=1, out_axes=1)


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


def _while_of_a_sum(pmap):
    step = _step(pmap)
    return lambda x: lax.while_loop(lambda c: jnp.sum(c) < 40.0, lambda c: c + step(c) + 1.5, x)


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


def _second_axis(pmap):
    step = _columns(pmap)
    return lambda x: lax.scan(lambda c, _: (step(c) + 1, c), x.T, None, length=3)


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
    "while of a sum": (_while_of_a_sum, 2, [P("data")]),
    "shared state": (_shared_state, 1, [P(), P("data"), P()]),
    "cond inside": (_cond_inside, 1, [P("data")]),
    "loop in a loop": (_loop_in_a_loop, 1, [P("data")]),
    "second axis": (_second_axis, 1, [P(None, "data"), P(None, None, "data")]),
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


def test_effects_in_a_mapped_function_happen_in_each_step():
    heard = []

    def body(x):
        jax.debug.callback(lambda i, x: heard.append((int(i), float(x))), lax.axis_index("i"), x[0])
        return x + 1

    step = jax.pmap(body, "i")
    fun = lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]
    rewrite(fun)(jnp.zeros((4, 3)))
    jax.effects_barrier()

    assert sorted(heard) == [(i, float(x)) for i in range(4) for x in range(2)]


def test_arguments_that_are_cut_stay_where_they_are():
    mesh = _MESHES["4x2"]
    x = jax.device_put(_X, NamedSharding(mesh, P("data")))
    rewritten = rewrite(_fori(jax.pmap), mesh=mesh)

    with jax.transfer_guard("disallow"):
        found = rewritten(x)
    assert found.sharding == NamedSharding(mesh, P("data"))
    assert compiled_collectives(rewritten, x) == {"all-reduce": 1}


def test_the_report_tells_of_the_pmap_in_the_loop():
    fun = _scan(jax.pmap)
    (found,) = explain(fun, _X, mesh=mesh_of(data=4)).findings

    assert found.outcome == "rewritten"
    assert found.what == "the pmap over 'i' of size 4: a shard_map over 'data' of the mesh"
    assert int(found.where.rpartition(":")[2]) == line_of(fun)


# ---- loops that use the state as a whole, too


def _with_slices(pmap):
    step = _step(pmap)
    return lambda x: lax.scan(lambda c, _: (step(c), c[0]), x, None, length=3)


def _with_maxima(pmap):
    step = _step(pmap)
    return lambda x: lax.scan(lambda c, _: (step(c), c.max()), x, None, length=3)


def _with_turns(pmap):
    step = _columns(pmap)
    return lambda x: lax.scan(lambda c, _: (step(c.T).T, None), x, None, length=3)[0]


def _with_effects(pmap):
    step = _step(pmap)

    def body(carry, _):
        jax.debug.callback(lambda: None)
        return step(carry), None

    return lambda x: lax.scan(body, x, None, length=3)[0]


def _with_rules(pmap):
    step = _step(pmap)
    return lambda x: lax.scan(lambda c, _: (jax.nn.relu(step(c)), None), x, None, length=3)[0]


def _with_choices(pmap):
    step = _step(pmap)
    unfinished = lambda c: (c[1] < 3) & jnp.any(c[0] > -9.0)
    return lambda x: lax.while_loop(unfinished, lambda c: (step(c[0]), c[1] + 1), (x, 0))


_OTHER_STATE = {
    "a slice is read": _with_slices,
    "a maximum": _with_maxima,
    "turned": _with_turns,
    "an effect": _with_effects,
    "a rule": _with_rules,
    "a choice": _with_choices,
}


@pytest.mark.parametrize("name", _OTHER_STATE)
def test_what_is_between_the_pmaps_may_be_anything(name):
    fun = _OTHER_STATE[name](jax.pmap)

    assert_same(rewrite(fun, mesh=_MESHES["4x2"])(_X), jax.jit(fun)(_X), rtol=2e-5)


def test_a_scan_along_the_mapped_dimension():
    step = jax.pmap(lambda x: x - lax.pmean(x, "i"), "i")

    def fun(x):
        def body(carry, row):
            mapped = step(carry)
            return mapped, lax.scan(lambda c, r: (c + r, None), row, mapped)[0]

        return lax.scan(body, x, x)

    assert_same(rewrite(fun, mesh=_MESHES["4x2"])(_X), jax.jit(fun)(_X), rtol=1e-5)


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
