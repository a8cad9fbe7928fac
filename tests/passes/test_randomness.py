"""Draws that repeat on every device, or make copies drift; and draws that are meant to be equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._rewrite.hazards import find_hazards

pytestmark = pytest.mark.rewriting

_KEY = random.key(0)
_W = jnp.ones(3)
_ROWS = P("i")
_X = jnp.arange(24.0).reshape(8, 3)


def _codes(body, *args, specs, out_specs=_ROWS, check_vma=False):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma
    )
    return [finding.code for finding in find_hazards(jax.make_jaxpr(mapped)(*args))]


def _added(key, x):
    return x + random.normal(key, x.shape)


def _scaled(key, x):
    return x * 2 + 0.1 * jnp.exp(random.normal(key, x.shape)) - 1


def _by_feature(key, x):
    """Scaled along the features, by what all devices share."""
    return x + jnp.arange(3.0) * random.normal(key, x.shape)


def _dropped(key, x):
    return jnp.where(random.bernoulli(key, 0.5, x.shape), x, 0.0)


def _reshaped(key, x):
    return x + random.normal(key, (x.size,)).reshape(x.shape)


def _of_bits(key, x):
    words = random.key_data(key)
    _, bits = lax.rng_bit_generator(jnp.concatenate([words, words]), x.shape)
    return x + bits.astype(x.dtype)


def _in_a_jit(key, x):
    return jax.jit(_added)(key, x)


def _in_a_scan(key, x):
    def step(at, number):
        return at + random.normal(random.fold_in(key, number), at.shape), None

    return lax.scan(step, x, jnp.arange(3))[0]


def _key_of_the_body(key, x):
    del key
    return x + random.uniform(random.key(7), x.shape)


def _turned(key, x):
    return x + random.normal(key, x.shape[::-1]).T


def _squeezed(key, x):
    return x + lax.squeeze(random.normal(key, (*x.shape, 1)), [2])


def _reshaped_beside_one(key, x):
    """A dimension of one element has nothing that could be equal."""
    noise = lax.broadcast_in_dim(random.normal(key, x.shape), (2, 1, 3), (0, 2))
    return x + noise.reshape(6).reshape(x.shape)


def _of_each_row(key, x):
    """One number for a row, on both sides."""
    spread = lambda column: lax.broadcast_in_dim(column, x.shape, (0, 1))
    return spread(x[:, :1]) + spread(random.normal(key, (2, 1)))


def _scaled_by_a_draw(key, x):
    return x + random.normal(key, ()) * random.normal(key, x.shape)


def _beside_noise_of_its_own(key, x):
    own = random.normal(random.fold_in(key, lax.axis_index("i")), x.shape)
    return own + random.normal(key, x.shape)


def _beside_noise_of_another_sign(key, x):
    sign = 1.0 - 2.0 * (lax.axis_index("i") % 2)
    return sign * random.normal(key, x.shape) + random.uniform(key, x.shape)


def _with_a_callback(key, x):
    jax.debug.callback(lambda _: None, x)
    return _added(key, x)


def _gamma(key, x):
    return x * random.gamma(key, 2.0, x.shape)


@pytest.mark.parametrize(
    "body",
    [_added, _scaled, _by_feature, _dropped, _reshaped, _of_bits, _in_a_jit, _in_a_scan,
     _key_of_the_body, _turned, _squeezed, _reshaped_beside_one, _of_each_row, _scaled_by_a_draw,
     _beside_noise_of_its_own, _beside_noise_of_another_sign, _with_a_callback,
     _gamma],
)  # fmt: skip
@pytest.mark.parametrize("vma", [False, True])
def test_noise_that_repeats(body, vma):
    if body is _gamma and vma:
        pytest.skip("JAX wants the key cast there")
    assert _codes(body, _KEY, _X, specs=(P(), P("i")), check_vma=vma) == ["JXD501"]


def _folded(key, x):
    return _added(random.fold_in(key, lax.axis_index("i")), x)


def _split(key, x):
    return _added(random.split(key, 4)[lax.axis_index("i")], x)


def _mask_of_features(key, x):
    """Shared on purpose: one mask for all rows, on every device."""
    return jnp.where(random.bernoulli(key, 0.5, x.shape[1:]), x, 0.0) * 2


def _weights(key, x):
    w = jnp.ones((3, 2))
    return x @ (w + random.normal(key, w.shape))


def _common_seeds(key, x):
    """Every device draws the population and takes its share."""
    population = random.normal(key, (8, 3))
    own = lax.dynamic_slice_in_dim(population, lax.axis_index("i") * 2, 2)
    return x + own


def _mirrored(key, x):
    """The same direction everywhere, forwards and backwards."""
    sign = 1.0 - 2.0 * (lax.axis_index("i") % 2)
    noise = sign * random.normal(key, (3,))
    return x * jnp.sum(noise)


def _of_all_rows(key, x):
    """Of gathered rows, which all devices have."""
    everything = lax.all_gather(x, "i", tiled=True)
    everything = everything + random.normal(key, everything.shape)
    return lax.dynamic_slice_in_dim(everything, lax.axis_index("i") * 2, 2)


def _mask_of_features_turned(key, x):
    mask = random.bernoulli(key, 0.5, x.shape[1:])
    return jnp.where(lax.broadcast_in_dim(mask, x.shape[::-1], (0,)).T, x, 0.0)


def _mask_of_features_in_a_row(key, x):
    """No element of the row is drawn by itself."""
    mask = lax.broadcast_in_dim(random.normal(key, x.shape[1:]), x.shape, (1,))
    return mask.reshape(6) * x.reshape(6)


def _sign_of_the_device(key, x):
    sign = 1.0 - 2.0 * (lax.axis_index("i") % 2)
    return x + sign * random.normal(key, x.shape)


def _number_of_the_device(key, x):
    number = lax.broadcast_in_dim(lax.broadcast_in_dim(x[0, 0], (2, 1), ()), x.shape, (0, 1))
    return number * random.normal(key, x.shape)


def _number_of_a_row_of_one(key, x):
    return x[:1, :1] * random.normal(key, (1, 3))


def _directions(key, x):
    """Of all that is drawn, each device takes other multiples."""
    return x + jnp.arange(6.0).reshape(2, 3) * random.normal(key, x.shape)


def _without_a_key(key, x):
    """Of numbers from a state of the device's own, nothing is known."""
    return lax.add(x, lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape))


@pytest.mark.parametrize(
    "body",
    [_folded, _split, _without_a_key, _mask_of_features, _weights, _common_seeds, _mirrored,
     _of_all_rows, _mask_of_features_turned, _mask_of_features_in_a_row, _sign_of_the_device,
     _number_of_the_device, _number_of_a_row_of_one, _directions],
)  # fmt: skip
def test_noise_that_is_meant(body):
    assert _codes(body, _KEY, _X, specs=(P(), P("i"))) == []


def test_one_key_a_device_is_no_repetition():
    def body(keys, x):
        return _added(keys[0], x)

    assert _codes(body, random.split(_KEY, 4), _X, specs=(P("i"), P("i"))) == []


def _on_two_axes(body, *args):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"))
    specs = (P(), P("i", "j"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    return [(each.code, each.what) for each in find_hazards(jax.make_jaxpr(mapped)(*args))]


def test_two_axes():
    x = jnp.ones((8, 6))

    def by_columns(key, x):
        return random.normal(random.fold_in(key, lax.axis_index("j")), x.shape)

    said = "all devices along {} draw the same numbers, and each meets data of its own"
    assert _on_two_axes(_added, _KEY, x) == [("JXD501", said.format("'i', 'j'"))]
    assert _on_two_axes(lambda key, x: x + by_columns(key, x), _KEY, x) == [
        ("JXD501", said.format("'i'"))
    ]
    # Of two draws that are added, one may differ where the other does not.
    draws = lambda key, x: by_columns(key, x) + random.normal(key, x.shape)
    assert _on_two_axes(draws, _KEY, x) == []
    scale = jnp.arange(6.0).reshape(2, 3)
    draws = lambda key, x: by_columns(key, x) * scale + random.normal(key, x.shape)
    assert _on_two_axes(draws, _KEY, x) == [("JXD501", said.format("'j'"))]


def test_what_goes_into_and_comes_out_of_a_shard_map():
    def around(key, x):
        mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
        in_parts = lambda body, *specs: jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=_ROWS, check_vma=False
        )
        zeros = in_parts(_added, P(), _ROWS)(key, jnp.zeros((8, 3)))  # no data of its own
        return zeros, x + in_parts(lambda key: random.normal(key, (2, 3)), P())(key)

    assert find_hazards(jax.make_jaxpr(around)(_KEY, _X)) == ()


def _in_a_loop(key, w):
    """Beside a value that has no noise, and comes first."""
    own = random.fold_in(key, lax.axis_index("i"))
    turn = lambda c, _: ((c[0] + 1, c[1] + random.normal(own, w.shape)), None)
    return lax.scan(turn, (w, w), None, length=2)[0][1]


def _into_a_loop(key, w):
    rows = random.normal(random.fold_in(key, lax.axis_index("i")), (2, *w.shape))
    return lax.scan(lambda c, row: (c + row, None), w, rows)[0]


def _in_one_branch(key, w):
    own = random.fold_in(key, lax.axis_index("i"))
    return lax.cond(w[0] > 0, lambda: w + random.normal(own, w.shape), lambda: w)


def _in_the_other_branch(key, w):
    own = random.fold_in(key, lax.axis_index("i"))
    return lax.cond(w[0] > 0, lambda: jnp.zeros(3), lambda: w + random.normal(own, w.shape))


@pytest.mark.parametrize("body", [_in_a_loop, _into_a_loop, _in_one_branch, _in_the_other_branch])
def test_copies_that_drift_in_bodies(body):
    assert _codes(body, _KEY, _W, specs=(P(), P()), out_specs=P()) == ["JXD502"]


def test_copies_that_differ_without_noise_of_their_own_do_not_drift():
    body = lambda key, x: x.sum(0) * random.normal(key, (3,))
    assert _codes(body, _KEY, _X, specs=(P(), _ROWS), out_specs=P()) == ["JXD501"]


def test_copies_that_drift():
    def drifting(key, w):
        return w + random.normal(random.fold_in(key, lax.axis_index("i")), w.shape)

    def averaged(key, w):
        return lax.pmean(drifting(key, w), "i")

    specs = (P(), P())
    assert _codes(drifting, _KEY, _W, specs=specs, out_specs=P()) == ["JXD502"]
    assert _codes(averaged, _KEY, _W, specs=specs, out_specs=P()) == []
    assert _codes(drifting, _KEY, _W, specs=specs, out_specs=P("i")) == []


@pytest.mark.parametrize("pmap", [jax.pmap, jax_dist.pmap])
def test_explain_says_it_with_the_line(pmap):
    noisy = pmap(_added, axis_name="i", in_axes=(None, 0))
    report = jax_dist.explain(lambda key, x: noisy(key, x), _KEY, _X)

    found = [finding for finding in report.findings if finding.code == "JXD501"]
    assert [finding.outcome for finding in found] == ["noted"]
    line = _added.__code__.co_firstlineno + 1
    assert found[0].where.endswith(f"test_randomness.py:{line}")
    assert "JXD501" in str(report)
