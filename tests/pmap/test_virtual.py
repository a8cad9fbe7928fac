"""virtual=True: more slices than devices."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.interpreters import mlir

import jax_dist
from jax_dist import errors

pytestmark = pytest.mark.mapping

_N = 16
_X = np.arange(_N * _N, dtype=np.float32).reshape(_N, _N)
_TURN = [(k, (k + 1) % _N) for k in range(_N)]
_GROUPS = [list(range(8)), list(range(8, 16))]

_COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather tiled": lambda x: lax.all_gather(x, "i", tiled=True),
    "axis_index": lambda x: x + lax.axis_index("i"),
    "axis_size": lambda x: x + lax.axis_size("i"),
    "ppermute": lambda x: lax.ppermute(x, "i", _TURN),
    "pshuffle": lambda x: lax.pshuffle(x, "i", list(range(_N))[::-1]),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
    "scan": lambda x: lax.scan(lambda c, _: (lax.pmean(c, "i") + c, None), x, None, 3)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 900, lambda c: c * 2 + 1, x),
    "grad": lambda x: jax.grad(lambda x: jnp.sum(lax.psum(jnp.sin(x), "i") ** 2))(x),
    "random": lambda x: (
        x + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("i")), (_N,))
    ),
}


@pytest.mark.parametrize("name", _COLLECTIVES)
def test_collectives_span_the_whole_axis(name):
    body = _COLLECTIVES[name]

    result = jax_dist.pmap(body, "i", virtual=True)(_X)

    # On 16 devices of their own, the slices would give what vmap gives under the same axis name.
    np.testing.assert_allclose(result, jax.vmap(body, axis_name="i")(_X), rtol=1e-5, atol=1e-4)
    assert [shard.data.shape[0] for shard in result.addressable_shards] == [2] * 8
    starts = [shard.index[0].start for shard in result.addressable_shards]
    assert starts == [0, 2, 4, 6, 8, 10, 12, 14]


def test_the_numbers_of_real_devices():
    body = _COLLECTIVES["scan"]

    few = jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2])(_X[:8])
    many = jax_dist.pmap(body, "i")(_X[:8])

    np.testing.assert_allclose(few, many, rtol=1e-6)
    assert len(few.sharding.device_set) == 2


_HALVES = [[0, 2, 4, 6], [5, 7, 1, 3]]
_UNEVEN = [(0, 3), (3, 4), (5, 0)]
_UNLIKE = [[0, 3, 5], [1], [2, 4, 6, 7]]
_TABLE = np.arange(8.0, dtype=np.float32)


def _scaled(x):
    return lax.composite(lambda x: lax.psum(x * 2, "i"), "tests.scaled")(x)


def _kernel(source, target):
    target[...] = source[...] * 2


def _finished_apart(x):
    """A while whose callbacks count the turns of each slice."""

    def turn(carry):
        jax.debug.callback(lambda: _TURNS.append(1))
        return carry[0] + 1, carry[1] + 1

    end = lax.axis_index("i")
    return lax.while_loop(lambda carry: carry[0] < end, turn, (0, x))[1]


_TURNS: list[int] = []
_EXACT = {  # all that vmap has no rule for, or a wrong one
    "psum of groups": lambda x: lax.psum(x, "i", axis_index_groups=_HALVES),
    "pmax of groups": lambda x: lax.pmax(x, "i", axis_index_groups=_HALVES),
    "all_gather of groups": lambda x: lax.all_gather(x, "i", axis=1, axis_index_groups=_HALVES),
    "all_gather of groups, tiled": lambda x: lax.all_gather(
        x, "i", axis_index_groups=_HALVES, tiled=True
    ),
    "psum_scatter of groups": lambda x: lax.psum_scatter(x[:4], "i", axis_index_groups=_HALVES),
    "psum_scatter, tiled": lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
    "all_to_all of groups": lambda x: lax.all_to_all(x[:4], "i", 0, 1, axis_index_groups=_HALVES),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 1),
    "all_to_all, tiled": lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True),
    "all_to_all of what all share": lambda x: lax.all_to_all(jnp.ones((8, 3)), "i", 0, 0),
    "psum of unlike groups": lambda x: lax.psum(x, "i", axis_index_groups=_UNLIKE),
    "pmax of unlike groups": lambda x: lax.pmax(-x, "i", axis_index_groups=_UNLIKE),
    "pmin of unlike groups": lambda x: lax.pmin(x, "i", axis_index_groups=_UNLIKE[::-1]),
    "grad of unlike groups": lambda x: jax.grad(
        lambda x: jnp.sum(lax.psum(x * x, "i", axis_index_groups=_UNLIKE))
    )(x),
    "numbers": lambda x: (
        x
        + lax.pmax(2.0, "i")
        + lax.pmin(3, "i")
        + lax.all_gather(1.0, "i").sum()
        + lax.psum(2, "i")
    ),
    "numbers to some": lambda x: x + lax.ppermute(2.0, "i", _UNEVEN),
    "checkpoint with constants": lambda x: jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.square(x) * lax.pmax(_TABLE, "i")[:1])(x))
    )(x),
    "composite": _scaled,
    "pallas": lambda x: pallas.pallas_call(
        _kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x),
    "custom_vmap": lambda x: jax.custom_batching.sequential_vmap(
        lambda x: x * lax.axis_size("i") + lax.psum(x, "i")
    )(x),
    "ppermute to some": lambda x: lax.ppermute(x, "i", _UNEVEN),
    "all but NaN": lambda x: jnp.isnan(lax.all_gather(jnp.log(x - 9), "i").max()),
    "max with NaN": lambda x: lax.all_gather(jnp.log(x - 9), "i").max(),
    "psum in scan": lambda x: lax.scan(lambda c, r: (c + lax.psum(r, "i"), c), x[0], x)[1],
    "a rule of custom_vjp": lambda x: jax.grad(lambda x: _doubled(x).sum())(x),
    "cond": lambda x: lax.cond(lax.axis_index("i") > 2, jnp.sin, jnp.cos, x),
    "callback": lambda x: jax.pure_callback(np.negative, x, x),
}


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * lax.psum(x, "i"),))


def _both(body, x, **options):
    """On 8 devices, and on 2 that have 4 slices each."""
    few = jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2], **options)
    return jax_dist.pmap(body, "i", **options)(x), few(x)


_OVER_BOTH = {  # with a vmap in the body, whose axis j is named beside the mapped one
    "psum": lambda x: lax.psum(x, ("i", "j")),
    "psum, the other way round": lambda x: lax.psum(x, ("j", "i")),
    "psum of a number": lambda x: x + lax.psum(1, ("i", "j")),
    "pmax": lambda x: lax.pmax(x, ("i", "j")),
    "pmin": lambda x: lax.pmin(x, ("j", "i")),
    "pmax of integers": lambda x: lax.pmax(x.astype(jnp.int32), ("i", "j")),
    "one inside the other": lambda x: lax.psum(lax.psum(x, "j") - x, ("i", "j")),
    "index": lambda x: x + lax.axis_index(("i", "j")),
    "all_to_all": lambda x: lax.all_to_all(jnp.stack([x] * 64), ("i", "j"), 0, 0),
}


@pytest.mark.parametrize("name", _OVER_BOTH)
def test_over_the_axis_of_a_vmap_in_the_body_too(name):
    x = np.arange(8 * 8 * 16, dtype=np.float32).reshape(8, 8, 16)

    def body(x):
        return jax.vmap(_OVER_BOTH[name], in_axes=1, out_axes=1, axis_name="j")(x.T)

    many, few = _both(body, x)

    np.testing.assert_array_equal(many, jax.pmap(body, "i")(x))
    np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 8)], [(8, 0)]])
def test_pairs_that_are_no_permutation_are_refused(pairs):
    mapped = jax_dist.pmap(
        lambda x: lax.ppermute(x, "i", pairs), "i", virtual=True, devices=jax.devices()[:2]
    )

    with pytest.raises(errors.AxesError, match=r"must be unique[^@]*test_virtual.py:\d+"):
        mapped(np.arange(8.0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", _EXACT)
def test_the_same_as_on_as_many_devices(name):
    x = np.arange(8 * 8 * 16, dtype=np.float32).reshape(8, 8, 16)  # whose sums are exact

    many, few = _both(_EXACT[name], x)

    np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.all_gather(x, "i", axis_index_groups=_UNLIKE),
        lambda x: lax.psum_scatter(x[:3], "i", axis_index_groups=_UNLIKE),
        lambda x: lax.all_to_all(x[:3], "i", 0, 0, axis_index_groups=_UNLIKE),
    ],
)
def test_unlike_groups_are_refused_where_they_make_shapes(collective):
    mapped = jax_dist.pmap(collective, "i", virtual=True, devices=jax.devices()[:2])

    with pytest.raises(errors.AxesError, match=r"groups of unlike sizes[^@]*test_virtual.py:\d+"):
        mapped(np.ones((8, 8)))


def test_a_callback_in_a_while_runs_for_slices_that_are_not_finished():
    _TURNS.clear()
    jax_dist.pmap(_finished_apart, "i", virtual=True, devices=jax.devices()[:2])(np.zeros(8))
    jax.effects_barrier()

    assert len(_TURNS) == sum(range(8))


_unbatched = jax.extend.core.Primitive("tests_unbatched")
_unbatched.def_abstract_eval(lambda x: x)
mlir.register_lowering(_unbatched, mlir.lower_fun(lambda x: x * 3, multiple_results=False))


def test_what_has_no_rule_for_vmap_runs_slice_by_slice():
    once, repeated = (
        jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2])
        for body in (
            _unbatched.bind,
            lambda x: lax.scan(lambda c, _: (_unbatched.bind(c), None), x, None, 2)[0],
        )
    )

    assert once(np.arange(8.0)).tolist() == [3.0 * k for k in range(8)]
    assert repeated(np.arange(8.0)).tolist() == [9.0 * k for k in range(8)]


def test_what_has_no_rule_for_vmap_and_meets_others_is_refused():
    def body(x):
        turn = lambda c, _: (_unbatched.bind(c) + lax.psum(c, "i"), None)
        return lax.scan(turn, x, None, 2)[0]

    mapped = jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2])

    with pytest.raises(errors.UnsupportedError, match=r"scan at \S*test_virtual.py:\d+"):
        mapped(np.arange(8.0))


def test_gradients_from_outside_pass_through():
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8) / 9
    bodies = [
        lambda x: _doubled(x).sum(),
        lambda x: lax.all_to_all(x**2, "i", 0, 0)[3],
        lambda x: lax.ppermute(x**2, "i", _UNEVEN).sum(),
        lambda x: lax.psum_scatter(x**2, "i") ** 2,
    ]

    for body in bodies:
        many, few = (
            jax.grad(lambda x, m=mapped: jnp.sum(m(x)))(x)
            for mapped in (
                jax_dist.pmap(body, "i"),
                jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2]),
            )
        )
        np.testing.assert_allclose(few, many, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_bits_are_those_of_each_slice(implementation):
    captured = jax.random.key(5, impl=implementation)
    keys = jax.random.split(jax.random.key(0, impl=implementation), 8)

    def draw(key):
        made = jax.random.key(lax.axis_index("i"), impl=implementation)
        folded = jax.random.fold_in(captured, lax.axis_index("i"))
        parts = [key, captured, made, folded, *jax.random.split(key)]
        return jnp.stack([jax.random.normal(part, (3,)) for part in parts])

    np.testing.assert_array_equal(*_both(draw, keys))


def test_raw_keys_of_another_default():
    with jax.default_prng_impl("rbg"):
        keys = jax.random.split(jax.random.PRNGKey(0), 8)
        np.testing.assert_array_equal(*_both(lambda key: jax.random.normal(key, (3,)), keys))


def test_effects_happen_once_for_each_slice(capsys):
    def body(x):
        def shout(x):
            jax.debug.print("high {x}", x=x)
            return x

        return lax.cond(x > 5, shout, lambda x: x, x)

    jax_dist.pmap(body, "i", virtual=True, devices=jax.devices()[:2])(np.arange(8))
    jax.effects_barrier()

    assert sorted(capsys.readouterr().out.splitlines()) == ["high 6", "high 7"]


def test_what_the_body_does_not_implement_comes_through():
    def body(x):
        raise NotImplementedError("mine")

    with pytest.raises(NotImplementedError, match="mine"):
        jax_dist.pmap(body, "i", virtual=True)(_X)


@pytest.mark.parametrize(("size", "devices"), [(4, 4), (8, 8), (12, 6), (20, 5), (64, 8)])
def test_as_many_devices_as_can_share_evenly(size, devices):
    result = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i", virtual=True)(np.ones(size))

    assert result.tolist() == [float(size)] * size
    assert len(result.sharding.device_set) == devices


def test_devices_that_cannot_share_evenly_are_refused():
    mapped = jax_dist.pmap(lambda x: x, virtual=True, devices=jax.devices()[:3])

    with pytest.raises(errors.DeviceCountError, match="cannot share 16 slices evenly"):
        mapped(_X)


def test_axes_and_out_axes_none():
    mapped = jax_dist.pmap(
        lambda x, y: (x + y, lax.psum(x, "i"), x),
        "i",
        in_axes=(1, None),
        out_axes=(1, None, -1),
        virtual=True,
    )

    a, b, c = mapped(_X[:3], 2.0)

    np.testing.assert_array_equal(a, _X[:3] + 2)
    np.testing.assert_array_equal(b, _X[:3].sum(1))
    np.testing.assert_array_equal(c, _X[:3])


def test_donated_state_compiles_once_and_stays_in_place():
    step = jax_dist.pmap(lambda s: s + lax.pmean(s, "i"), "i", virtual=True, donate_argnums=0)
    state = jnp.arange(float(_N))

    for _ in range(3):
        state = step(state)

    np.testing.assert_allclose(state, np.arange(_N) + 7.5 * 7)
    assert step.jitted.lower(state).compile().as_text().count("all-gather") == 0


def test_a_pmap_inside():
    x = np.arange(32.0, dtype=np.float32).reshape(16, 2)
    inner = jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")), "j")

    result = jax_dist.pmap(lambda x: inner(x), "i", virtual=True)(x)

    assert np.unique(result).tolist() == [496.0]


def test_places_along_both_axes_of_a_pmap_inside():
    x = np.arange(32.0, dtype=np.float32).reshape(16, 2)
    turn = [(k, (k + 1) % 32) for k in range(32)]
    inner = jax_dist.pmap(
        lambda y: (lax.axis_index(("i", "j")), lax.ppermute(y, ("i", "j"), turn)), "j"
    )

    index, turned = jax_dist.pmap(lambda x: inner(x), "i", virtual=True)(x)

    np.testing.assert_array_equal(np.ravel(index), np.arange(32))
    np.testing.assert_array_equal(np.ravel(turned), np.roll(np.arange(32.0), 1))
