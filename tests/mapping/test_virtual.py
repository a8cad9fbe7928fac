"""virtual=True: more slices than devices."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist import _errors

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


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.psum(x, "i", axis_index_groups=_GROUPS),
        lambda x: lax.all_gather(x, "i", axis_index_groups=_GROUPS),
        lambda x: lax.all_to_all(x[:8], "i", 0, 0, axis_index_groups=_GROUPS),
    ],
)
def test_groups_are_refused(collective):
    with pytest.raises(_errors.UnsupportedError) as caught:
        jax_dist.pmap(collective, "i", virtual=True)(_X)

    assert str(caught.value) == textwrap.dedent("""\
        pmap of '<lambda>' has a collective with axis_index_groups:
          * it goes over axis 'i' of size 16
        Because this axis is mapped by vmap, which has no rule for groups.
        Drop virtual=True; inside another pmap, map axes of one depth alike.""")


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

    with pytest.raises(_errors.DeviceCountError, match="cannot share 16 slices evenly"):
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
    state = given = jnp.arange(float(_N))

    for _ in range(3):
        state = step(state)

    assert given.is_deleted()
    np.testing.assert_allclose(state, np.arange(_N) + 7.5 * 7)
    assert step.jitted.lower(state).compile().as_text().count("all-gather") == 0


def test_a_pmap_inside():
    x = np.arange(32.0, dtype=np.float32).reshape(16, 2)
    inner = jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")), "j")

    result = jax_dist.pmap(lambda x: inner(x), "i", virtual=True)(x)

    assert np.unique(result).tolist() == [496.0]


def test_keys_whose_bits_depend_on_the_batch_are_refused():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), _N)

    with pytest.raises(_errors.PlacementError, match="x holds keys of implementation 'rbg'"):
        jax_dist.pmap(lambda x: jax.random.normal(x), virtual=True)(keys)
