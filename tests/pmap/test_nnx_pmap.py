"""`jax_dist.nnx_pmap` beside `flax.nnx.pmap`: the same modules, results and bits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
N = 4
SAME = nnx.StateAxes({...: None})
X = np.random.default_rng(0).normal(size=(N, 3, 2)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name="i", rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def _linear(seed=0):
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def _trained(pmap):
    @pmap(axis_name="i", in_axes=(SAME, SAME, 0), out_axes=None)
    def step(net, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, jax.lax.pmean(gradients, "i"))
        return jax.lax.pmean(value, "i")

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    losses = [step(net, optimizer, X) for _ in range(3)]
    assert net.calls[...] == 3  # what is no parameter comes back, too
    return (net, optimizer), losses


def _ensemble(pmap):
    nets = pmap(_linear)(jax.random.split(jax.random.key(0), N))
    assert nets.kernel.shape == (N, 2, 2)
    return nets, pmap(lambda net, x: net(x))(nets, X)


def _axes_by_kind(pmap):
    axes = nnx.StateAxes({nnx.BatchStat: 0, ...: None})
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    norm.mean, norm.var = nnx.BatchStat(jnp.zeros((N, 2))), nnx.BatchStat(jnp.ones((N, 2)))
    rows = pmap(in_axes=(axes, 0), axis_name="i")(lambda norm, x: norm(x))(norm, X)
    assert len(np.unique(norm.mean[...], axis=0)) == N  # each device has its own
    return norm, rows


def _shared(pmap):
    def add(one, two, x):
        one.kernel[...] += 1.0
        return two(x)

    one, two = _linear(), _linear(1)
    two.kernel = one.kernel
    rows = pmap(add, in_axes=(None, None, 0))(one, two, X)
    assert two.kernel is one.kernel
    return (one, two), rows


def _added(pmap):
    def sow(net, x):
        net.seen = nnx.Intermediate(x.sum())
        return net.kernel.sum()

    net, axes = _linear(), nnx.StateAxes({nnx.Intermediate: 0, ...: None})
    return net, pmap(sow, in_axes=(axes, 0))(net, X)


def _arrays(modules, results):
    """Return their state and the results, with the data of random keys in their place."""
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(data, (nnx.state(modules), results))


@pytest.mark.parametrize("run", [_trained, _ensemble, _axes_by_kind, _shared, _added])
def test_as_flax_has_it(run):
    ours, theirs = run(jax_dist.nnx_pmap), run(nnx.pmap)

    chex.assert_trees_all_equal(_arrays(*ours), _arrays(*theirs), strict=True)


def test_static_arguments_and_compilations():
    net, traced, counts = _linear(), [], []

    def scaled(net, x, scale):
        traced.append(scale)
        return scale * net(x)

    call = jax_dist.nnx_pmap(scaled, in_axes=(None, 0, None), static_broadcasted_argnums=2)
    for scale in (2, 2, 2, 3):
        np.testing.assert_allclose(call(net, X, scale), scale * net(X), rtol=1e-6)
        counts.append(len(traced))
    assert counts[1] == counts[2] < counts[3]


def test_methods_and_axes_that_do_not_fit():
    net = _linear()
    call = jax_dist.nnx_pmap(nnx.Linear.__call__, in_axes=(None, 0))
    np.testing.assert_allclose(call(net, X), net(X), rtol=1e-6)

    with pytest.raises(ValueError, match="does not support bound methods"):
        jax_dist.nnx_pmap(net.__call__)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        jax_dist.nnx_pmap(lambda one, two, x: one(x), in_axes=(None, 0, 0))(net, net, X)
