"""pmaps inside a program, moved onto the caller's mesh: equal numbers, lying on that mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import assert_same, line_of, mesh_of, numbers, told_of_pmaps

import jax_dist
from jax_dist import explain, rewrite

pytestmark = pytest.mark.rewriting

_X = numbers(4, 3)
_CUBE = numbers(5, 4, 3, seed=1)
_REVERSED = Mesh(np.array(jax.devices()[:4])[::-1], ("data",))
_WIDE = mesh_of(data=4, model=2)
_MESHES = {"reversed": _REVERSED, "4x2": _WIDE, "no mesh": None}


def _meshes_for(pmap):
    """All for jax.pmap; ours is the same shard_map, so one will do."""
    return [(name, mesh) for name, mesh in _MESHES.items() if pmap is jax.pmap or name == "4x2"]


_ROWS = P("data")  # how the results of most cases lie


@jax.custom_vjp
def _summed(x):
    return lax.psum(x, "i") * 2


# Not the derivative, and with a collective that is traced only when it is wanted.
_summed.defvjp(lambda x: (_summed(x), x), lambda x, g: (lax.psum(g * x, "i") * 3,))


@jax.custom_jvp
def _steep(x):
    return jnp.sin(x)


_steep.defjvp(lambda primals, tangents: (_steep(*primals), 5 * lax.pmean(tangents[0], "i")))


# By name: what makes the function from a pmap, its arguments, and how its results lie on a mesh.
_CASES = {
    "psum": (lambda pmap: pmap(lambda x: lax.psum(x, "i"), "i"), (_X,), [_ROWS]),
    "index and pmean": (
        lambda pmap: pmap(lambda x: lax.pmean(x, "i") * lax.axis_index("i") - x, "i"),
        (_X,),
        [_ROWS],
    ),
    "second axes": (
        lambda pmap: pmap(lambda x: x + lax.psum(x, "i"), "i", in_axes=1, out_axes=1),
        (_CUBE,),
        [P(None, "data")],
    ),
    "shared in, shared out": (
        lambda pmap: pmap(
            lambda w, x: (lax.psum(x * w, "i"), w + x), "i", in_axes=(None, 0), out_axes=(None, 0)
        ),
        (numbers(3, seed=2), _X),
        [P(), _ROWS],
    ),
    "trees": (
        lambda pmap: pmap(
            lambda a, b: {"out": (a["x"] * b[0], None), "sum": lax.psum(b[1], "i")},
            "i",
            in_axes=({"x": 0}, 1),
            out_axes={"out": 0, "sum": None},
        ),
        ({"x": _X}, (_CUBE[:3, :, 0], _CUBE[:, :, 1])),
        [_ROWS, P()],
    ),
    "scan inside": (
        lambda pmap: pmap(
            lambda x: lax.scan(lambda c, w: (lax.pmean(c, "i") + x, c * w), x, jnp.arange(3.0)), "i"
        ),
        (_X,),
        [_ROWS, _ROWS],
    ),
    "ppermute": (
        lambda pmap: pmap(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 3), (3, 2)]) + x, "i"),
        (_X,),
        [_ROWS],
    ),
    "all_to_all": (
        lambda pmap: pmap(lambda x: lax.all_to_all(x, "i", 0, 0) * 2, "i"),
        (numbers(4, 4, 3, seed=3),),
        [_ROWS],
    ),
    "a key for each device": (
        lambda pmap: pmap(lambda key: jax.random.normal(key, (3,)) + lax.axis_index("i"), "i"),
        (jax.random.split(jax.random.key(0), 4),),
        [_ROWS],
    ),
    "unnamed": (lambda pmap: pmap(lambda x: jax.nn.softmax(x)), (_X,), [_ROWS]),
    "gathered and averaged": (
        lambda pmap: pmap(lambda x: jnp.mean(lax.all_gather(x, "i"), 0) - x, "i"),
        (_X,),
        [_ROWS],
    ),
    "gradient inside": (
        lambda pmap: pmap(
            lambda x: jax.grad(lambda v: jnp.sum(jnp.sin(v) * lax.psum(v, "i")))(x), "i"
        ),
        (_X,),
        [_ROWS],
    ),
    "gradient outside": (
        lambda pmap: jax.grad(
            lambda x: jnp.sum(pmap(lambda v: jnp.sin(v) * lax.psum(v, "i"), "i")(x) ** 2)
        ),
        (_X,),
        [_ROWS],
    ),
    "two, and glue between": (
        lambda pmap: (
            lambda x: pmap(lambda v: v / lax.pmax(v, "i"), "i")(
                jnp.cumsum(pmap(lambda v: v * lax.psum(v, "i"), "i")(x), 1) + 1
            )
        ),
        (_X,),
        [_ROWS],
    ),
    "under vmap": (
        lambda pmap: jax.vmap(pmap(lambda v: v - lax.pmean(v, "i"), "i"), in_axes=2, out_axes=2),
        (_CUBE.swapaxes(0, 1),),
        [_ROWS],
    ),
    "pmap of vmap": (
        lambda pmap: pmap(jax.vmap(lambda v: v / lax.psum(v, ("i", "j")), axis_name="j"), "i"),
        (_X,),
        [_ROWS],
    ),
    "in a jit in a cond": (
        lambda pmap: (
            lambda x: lax.cond(
                x[0, 0] < 100, jax.jit(pmap(lambda v: v + lax.psum(v, "i"), "i")), jnp.sin, x
            )
        ),
        (_X,),
        [_ROWS],
    ),
    "static and donated": (
        lambda pmap: (
            lambda x: pmap(
                lambda v, n: v**n + lax.psum(v, "i"),
                "i",
                static_broadcasted_argnums=1,
                donate_argnums=0,
            )(x, 3)
        ),
        (_X,),
        [_ROWS],
    ),
    "low precision and integers": (
        lambda pmap: pmap(lambda a, b: (lax.psum(a, "i"), b + lax.pmax(b, "i")), "i"),
        (_X.astype(jnp.bfloat16), jnp.arange(4)),
        [_ROWS, _ROWS],
    ),
    "rules of its own": (
        lambda pmap: pmap(lambda x: _summed(x) + _steep(x), "i"),
        (_X,),
        [_ROWS],
    ),
}
_PMAPS = pytest.mark.parametrize(
    "pmap", [jax.pmap, jax_dist.pmap], ids=["jax.pmap", "jax_dist.pmap"]
)


@pytest.mark.thorough
@_PMAPS
@pytest.mark.parametrize("name", _CASES)
def test_numbers_stay_and_results_lie_on_the_mesh(name, pmap):
    make, args, specs = _CASES[name]
    fun = make(pmap)
    wanted = jax.jit(fun)(*args)

    for mesh_name, mesh in _meshes_for(pmap):
        found = rewrite(fun, mesh=mesh)(*args)
        assert_same(found, wanted, rtol=2e-5, name=mesh_name)
        if mesh is None:
            continue
        for leaf, spec in zip(jax.tree.leaves(found), specs, strict=True):
            there = NamedSharding(mesh, spec)
            assert leaf.sharding.is_equivalent_to(there, leaf.ndim), (mesh_name, leaf.sharding)


@pytest.mark.thorough
@_PMAPS
@pytest.mark.parametrize("mesh", _MESHES.values(), ids=_MESHES)
def test_rules_of_its_own_are_used_after_the_move(mesh, pmap):
    make, (x,), _ = _CASES["rules of its own"]
    fun = make(pmap)
    rewritten = rewrite(fun, mesh=mesh)
    # Of _summed: 3 * sum over devices of x; of _steep, transposed: 5.
    wanted = 3 * np.broadcast_to(np.sum(x, 0), (4, 3)) + 5

    for call in (
        jax.grad(lambda x: rewritten(x).sum()),
        jax.jit(jax.grad(lambda x: rewritten(x).sum())),
        rewrite(jax.grad(lambda x: fun(x).sum()), mesh=mesh),
    ):
        np.testing.assert_allclose(call(x), wanted, rtol=1e-5, atol=1e-5)


@_PMAPS
def test_gradients_before_and_after(pmap):
    """Of a function that keeps values for its gradient: blocks of another shape than the slices."""
    table = numbers(6, 3, seed=5)
    mapped = pmap(lambda v: jnp.sum(jnp.sin(table * v) * lax.psum(v, "i"), 1) ** 2, "i")
    loss = lambda x: jnp.sum(jnp.cos(mapped(x)))
    wanted = jax.jit(jax.grad(loss))(_X)

    for _, mesh in _meshes_for(pmap):
        for call in (jax.grad(rewrite(loss, mesh=mesh)), rewrite(jax.grad(loss), mesh=mesh)):
            np.testing.assert_allclose(call(_X), wanted, rtol=1e-4, atol=1e-4)


# ---- other devices


@_PMAPS
def test_devices_in_another_order(pmap):
    devices = jax.devices()[:4][::-1]
    fun = pmap(lambda x: lax.axis_index("i") * 10 + x, "i", devices=devices)
    x = jnp.arange(4)
    mesh = mesh_of(data=4)

    found = rewrite(lambda x: fun(x), mesh=mesh)(x)
    assert found.tolist() == [0, 11, 22, 33]
    assert [shard.device for shard in found.addressable_shards] == jax.devices()[:4]
    text = "the pmap over 'i' of size 4: a shard_map over 'data' of the mesh"
    assert told_of_pmaps(lambda x: fun(x), x, mesh=mesh) == [("rewritten", text, "")]


def test_pmaps_of_different_devices_meet_on_the_mesh():
    """Without a mesh, jit refuses a program over different devices."""
    first = jax.pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.devices()[:4])
    second = jax.pmap(lambda x: x * 2, "i", devices=jax.devices()[:4][::-1])
    fun = lambda x: second(first(x))

    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(fun)(jnp.arange(4.0))
    assert rewrite(fun, mesh=_WIDE)(jnp.arange(4.0)).tolist() == [12.0] * 4


def test_pmaps_of_different_sizes_go_to_different_axes():
    four = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    two = jax.pmap(lambda x: lax.pmean(x, "i") + lax.axis_index("i"), "i", out_axes=1)
    fun = lambda x: two(four(x)[:2])
    x = numbers(4, 3)

    found = rewrite(fun, mesh=_WIDE)(x)
    total = np.sum(x, 0)
    np.testing.assert_allclose(found, np.stack([total, total + 1], 1), rtol=1e-5, atol=1e-5)
    assert found.sharding.is_equivalent_to(NamedSharding(_WIDE, P(None, "model")), 2)


# ---- nested


def _nested(x):
    """`[4, 2] -> [4, 2]`"""

    def outer(row):
        def inner(v):
            return lax.psum(v, ("i", "j")) + 10 * lax.axis_index("i") + lax.axis_index("j")

        return jax_dist.pmap(inner, "j")(row * lax.axis_size("i"))

    return jax_dist.pmap(outer, "i")(x)


@pytest.mark.parametrize("mesh", [_WIDE, None], ids=["4x2", "no mesh"])
def test_a_pmap_in_a_pmap(mesh):
    x = jnp.arange(8.0).reshape(4, 2)
    found = rewrite(_nested, mesh=mesh)(x)

    wanted = 28 * 4 + 10 * np.arange(4)[:, None] + np.arange(2)[None]
    np.testing.assert_allclose(found, wanted)
    # The loss weighs the slices; a sum over all gives all of them the same gradient.
    slope = jax.grad(lambda x: jnp.sum(rewrite(_nested, mesh=mesh)(x) * x))(x)
    np.testing.assert_allclose(slope, wanted + 4 * 28)


def test_a_pmap_in_a_pmap_needs_an_axis_for_each():
    x = jnp.arange(8.0).reshape(4, 2)

    assert told_of_pmaps(_nested, x, mesh=mesh_of(data=8)) == [
        (
            "refused",
            "the pmap over 'i' of size 4 stays",
            "no axis of the mesh ('data': 8) has the size 4 of 'i'",
        )
    ]


# ---- refused


def _refused(fun, *args, mesh):
    """The reason, and the line, of the one refusal; the program must run all the same."""
    wanted = jax.jit(fun)(*args)
    assert_same(rewrite(fun, mesh=mesh)(*args), wanted)
    (found,) = [f for f in explain(fun, *args, mesh=mesh).findings if f.outcome == "refused"]
    assert found.code == "JXD002"
    return found.what, found.why, int(found.where.rpartition(":")[2])


@_PMAPS
def test_refused_without_an_axis_of_its_size(pmap):
    eight = pmap(lambda x: lax.psum(x, "i"), "i")
    fun = lambda x: eight(x) * 2

    assert _refused(fun, numbers(8, 3), mesh=_WIDE) == (
        "the pmap over 'i' of size 8 stays",
        "no axis of the mesh ('data': 4, 'model': 2) has the size 8 of 'i'",
        line_of(fun),
    )


@_PMAPS
def test_refused_on_devices_outside_of_the_mesh(pmap):
    others = pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.devices()[4:])
    fun = lambda x: others(x) * 2

    assert _refused(fun, _X, mesh=mesh_of(data=4)) == (
        "the pmap over 'i' of size 4 stays",
        "it has devices that are not in the mesh",
        line_of(fun),
    )


def test_refused_on_a_mesh_whose_axes_are_types():
    four = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    fun = lambda x: four(x) * 2
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    assert _refused(fun, _X, mesh=mesh) == (
        "the pmap over 'i' of size 4 stays",
        "the mesh has axes that are not Auto, on which shardings are types",
        line_of(fun),
    )


def test_a_shard_map_of_the_user_stays_on_its_mesh():
    own = mesh_of(i=4)

    @functools.partial(jax.shard_map, mesh=own, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    def fun(block):
        return jnp.mean(lax.all_gather(block, "i"), 0) + block

    assert told_of_pmaps(fun, _X, mesh=_REVERSED) == []
    # Also after a pass that evaluates it anew.
    again = rewrite(fun)
    assert told_of_pmaps(lambda x: again(x), _X, mesh=_REVERSED) == []
    assert_same(rewrite(fun, mesh=own)(_X), fun(_X))


def test_without_a_mesh_it_is_noted():
    fun = jax.pmap(lambda x: lax.psum(x, "i"), "i")

    assert told_of_pmaps(lambda x: fun(x), _X) == [
        ("noted", "the pmap over 'i' of size 4 is a shard_map on a mesh of its own", "")
    ]
