"""pmaps in a program, moved onto the caller's mesh: equal numbers, and nothing moved between steps.

The compiled program tells what is moved: no gather, permutation or exchange, and as many reductions
as the mapped functions have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import assert_same, compiled_collectives, line_of, mesh_of, numbers

import jax_dist
from jax_dist import explain, rewrite
from jax_dist._rewrite import remesh

_X = numbers(4, 3)
_FOUR, _WIDE = mesh_of(data=4), mesh_of(data=4, model=2)
_REVERSED = Mesh(np.array(jax.devices()[:4])[::-1], ("data",))
_PMAPS = pytest.mark.parametrize(
    "pmap", [jax.pmap, jax_dist.pmap], ids=["jax.pmap", "jax_dist.pmap"]
)
_ROWS = P("data")  # how the results of most cases are sharded


@jax.custom_vjp
def _summed(x):
    return lax.psum(x, "i") * 2


# Not the derivative, and with a collective that is traced only by a gradient.
_summed.defvjp(lambda x: (_summed(x), x), lambda x, g: (lax.psum(g * x, "i") * 3,))


@jax.custom_jvp
def _steep(x):
    return jnp.sin(x)


_steep.defjvp(lambda primals, tangents: (_steep(*primals), 5 * tangents[0]))


# What makes a function of `[4, 3]` from a pmap.


def _second_axes(pmap):
    mapped = pmap(lambda x: x + lax.psum(x, "i"), "i", in_axes=1, out_axes=1)
    return lambda x: mapped(x.T)


def _key_by_device(pmap):
    mapped = pmap(lambda x, key: x + jax.random.normal(key, (3,)) + lax.axis_index("i"), "i")
    return lambda x: mapped(x, jax.random.split(jax.random.key(0), 4))


def _gradient_outside(pmap):
    mapped = pmap(lambda v: jnp.sin(v) * lax.psum(v, "i"), "i")
    return jax.grad(lambda x: jnp.sum(mapped(x) ** 2))


def _static_and_donated(pmap):
    options = {"static_broadcasted_argnums": 1, "donate_argnums": 0}
    mapped = pmap(lambda v, n: v**n + lax.psum(v, "i"), "i", **options)
    return lambda x: mapped(x, 3)


def _with_rules(pmap):
    mapped = pmap(lambda x: _summed(x) + _steep(x), "i")
    return lambda x: _steep(mapped(x))


def _gradient_by_rules(pmap):
    return jax.grad(lambda x: _with_rules(pmap)(x).sum())


# ---- loops around pmaps


def _step(pmap):
    """`[4, 3] -> [4, 3]`, with one reduction."""
    return pmap(lambda x: jnp.sin(lax.pmean(x, "i") * 2 - x * lax.axis_index("i")), "i")


def _loop_in_a_loop(pmap):
    step = _step(pmap)
    inner = lambda c: lax.fori_loop(1, 4, lambda i, c: step(c) * i, c)
    return lambda x: lax.scan(lambda c, _: (inner(c), c), x, None, length=2)


def _while(pmap):
    step = _step(pmap)
    turn = lambda c: (step(c[0]) + c[1], c[1] + 1)
    return lambda x: lax.while_loop(lambda c: c[1] < 4, turn, (x, 0))


def _shared_state(pmap):
    body = lambda w, x: (lax.psum(x * w, "i").mean(), jnp.cos(x + w))
    both = pmap(body, "i", in_axes=(None, 0), out_axes=(None, 0))

    def turn(carry, _):
        weight, x = carry
        loss, x = both(weight, x)
        return (weight - 0.1 * loss, x), loss

    return lambda x: lax.scan(turn, (jnp.float32(1.0), x), None, length=3)


def _cond_and_two_pmaps(pmap):
    step, second = jax.jit(_step(pmap)), pmap(lambda x: x - lax.pmax(x, "i"), "i")
    turn = lambda c, i: (second(lax.cond(i > 2, step, lambda c: c * 2, c)), None)
    return lambda x: lax.scan(turn, x, jnp.arange(5))[0]


# By name: what makes the function from a pmap, how its results are sharded, and the reductions of
# one step if there are no other collectives.
_PROGRAMS = {
    "second axes": (_second_axes, [P(None, "data")], 0),
    "a key for each device": (_key_by_device, [_ROWS], 0),
    "gradient outside": (_gradient_outside, [_ROWS], 0),
    "static and donated": (_static_and_donated, [_ROWS], 0),
    "rules of its own": (_with_rules, [_ROWS], 0),
    "gradient by these rules": (_gradient_by_rules, [_ROWS], 0),
    "loop in a loop": (_loop_in_a_loop, [_ROWS, P(None, "data")], 1),
    "while": (_while, [_ROWS, P()], 1),
    "shared state": (_shared_state, [P(), _ROWS, P()], 1),
    "cond and two pmaps": (_cond_and_two_pmaps, [_ROWS], 2),
}


@pytest.mark.thorough
@_PMAPS
@pytest.mark.parametrize("name", _PROGRAMS)
def test_numbers_stay_and_nothing_is_moved(name, pmap):
    make, specs, reductions = _PROGRAMS[name]
    fun = make(pmap)
    # All meshes for jax.pmap; ours is the same shard_map, so one will do.
    for mesh in (_REVERSED, _WIDE, None) if pmap is jax.pmap else (_WIDE,):
        rewritten = rewrite(fun, mesh=mesh)
        results = rewritten(_X)
        assert_same(results, jax.jit(fun)(_X), rtol=2e-5)
        for leaf, spec in zip(jax.tree.leaves(results), specs, strict=True):
            place = NamedSharding(mesh or _FOUR, spec)
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim), leaf.sharding
        if reductions:  # XLA may merge two reductions; it must not need anything else
            counts = compiled_collectives(rewritten.lower(_X).compile())
            assert set(counts) == {"all-reduce"}
            assert counts["all-reduce"] <= reductions


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [None, _FOUR], ids=["no mesh", "4"])
def test_rules_are_used_by_later_derivatives(mesh):
    rewritten = rewrite(_with_rules(jax.pmap), mesh=mesh)
    loss = lambda x: rewritten(x).sum()

    for gradient in (jax.grad(loss), jax.grad(jax.jit(loss))):
        assert_same(gradient(_X), jax.jit(_gradient_by_rules(jax.pmap))(_X))


def test_rules_in_a_pmap_on_a_larger_mesh_have_no_later_derivatives():
    rewritten = rewrite(_with_rules(jax.pmap), mesh=_WIDE)

    with pytest.raises(NotImplementedError, match=r"remesh.py:\d+ is moved .* inside: rewrite"):
        jax.grad(lambda x: rewritten(x).sum())(_X)


# ---- other devices


@pytest.mark.parametrize("mesh", [_FOUR, _WIDE], ids=["4", "4x2"])
def test_pmaps_of_different_devices_meet_on_the_mesh(mesh):
    """Without a mesh, jit refuses a program over different devices."""
    first = jax.pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.devices()[:4])
    second = jax.pmap(lambda x: x + lax.axis_index("i"), "i", devices=jax.devices()[:4][::-1])
    fun = lambda x: second(first(x))

    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(fun)(jnp.arange(4.0))
    result = rewrite(fun, mesh=mesh)(jnp.arange(4.0))
    assert result.tolist() == [6.0, 7.0, 8.0, 9.0]
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, _ROWS), 1)


def test_pmaps_of_different_sizes_go_to_different_axes():
    four = jax.pmap(lambda x: x - lax.pmean(x, "i"), "i")
    two = jax.pmap(lambda x: x + 2 * lax.axis_index("i"), "i")
    step = lambda c, _: ((four(c[0]), two(c[1])), None)
    fun = lambda x: lax.scan(step, (x, x[:2]), None, length=3)[0]

    first, second = rewrite(fun, mesh=_WIDE)(_X)
    np.testing.assert_allclose(first, _X - np.mean(_X, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(second, _X[:2] + np.array([[0], [6]]), rtol=1e-4, atol=1e-6)
    # It does not compile as it is, and that is noted.
    report = explain(fun, _X, mesh=_WIDE)
    assert [f.outcome for f in report.findings] == ["rewritten", "rewritten", "noted"]
    assert report.findings[-1].what.startswith("the program does not compile as it is")


def _nested(x):
    """`[4, 2] -> [4, 2]`"""
    index = lambda: 10 * lax.axis_index("i") + lax.axis_index("j")
    inner = jax_dist.pmap(lambda v: lax.psum(v, ("i", "j")) + index(), "j")
    return jax_dist.pmap(lambda row: inner(row * lax.axis_size("i")), "i")(x)


@pytest.mark.parametrize("mesh", [_WIDE, None], ids=["4x2", "no mesh"])
def test_a_pmap_in_a_pmap_stays(mesh):
    x = jnp.arange(8.0).reshape(4, 2)
    wanted = 28 * 4 + 10 * np.arange(4)[:, None] + np.arange(2)[None]

    np.testing.assert_allclose(rewrite(_nested, mesh=mesh)(x), wanted)
    (finding,) = remesh.plan_remesh(jax.make_jaxpr(_nested)(x), mesh).findings
    assert finding.why == ("it has a pmap inside" if mesh else "")


# ---- refused, and left alone

_EXPLICIT = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
_NO_AXIS = "no axis of the mesh ('data': 4, 'model': 2) has the size 8 of 'i'"
_TYPED = "the mesh has axes that are not Auto, on which shardings are types"
_OUTSIDE = "it has devices that are not in the mesh"
_NOTED = "is a shard_map on a mesh of its own"
# By name: the size, options of the pmap, the mesh, and what is said, with the reason.
_STAYS = {
    "no axis of its size": (8, {}, _WIDE, ("refused", "stays", _NO_AXIS)),
    "devices outside": (4, {"devices": jax.devices()[4:]}, _FOUR, ("refused", "stays", _OUTSIDE)),
    "typed axes": (4, {}, _EXPLICIT, ("refused", "stays", _TYPED)),
    "no mesh": (4, {}, None, ("noted", _NOTED, "")),
}


@_PMAPS
@pytest.mark.parametrize("name", _STAYS)
def test_a_pmap_that_cannot_be_moved_stays(name, pmap):
    size, options, mesh, (outcome, what, why) = _STAYS[name]
    mapped = pmap(lambda x: lax.psum(x, "i"), "i", **options)
    fun, x = lambda x: mapped(x) * 2, numbers(size, 3)

    assert_same(rewrite(fun, mesh=mesh)(x), jax.jit(fun)(x))
    (finding,) = remesh.plan_remesh(jax.make_jaxpr(fun)(x), mesh).findings
    assert (finding.code, finding.outcome, finding.why) == ("JXD002", outcome, why)
    assert finding.what == f"the pmap over 'i' of size {size} {what}"
    assert finding.where.endswith(f"test_remesh.py:{line_of(fun)}")


def test_a_shard_map_of_the_user_stays_on_its_mesh():
    body = lambda block: jnp.mean(lax.all_gather(block, "i"), 0) + block
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
    fun = jax.shard_map(body, mesh=mesh_of(i=4), **specs)

    again = rewrite(fun)  # also after a pass that evaluates it anew
    for call in (fun, lambda x: again(x)):
        assert remesh.plan_remesh(jax.make_jaxpr(call)(_X), _REVERSED).findings == ()
    assert_same(rewrite(fun, mesh=mesh_of(i=4))(_X), fun(_X))
