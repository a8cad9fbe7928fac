"""`jax_dist.nnx_pmap` beside `flax.nnx.pmap`: the same modules, results and bits."""

import functools

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


def _step(net, optimizer, x):
    value, gradients = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, jax.lax.pmean(gradients, "i"))
    return jax.lax.pmean(value, "i")


def _same(ours, theirs):
    ours, theirs = (jax.tree.leaves_with_path(nnx.state(tree)) for tree in (ours, theirs))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def _trained(make):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    step = make(_step, axis_name="i", in_axes=(SAME, SAME, 0), out_axes=None)
    losses = [step(net, optimizer, X) for _ in range(3)]
    assert net.calls[...] == 3  # what is no parameter comes back, too
    return (net, optimizer), losses


def _ensemble(make):
    keys = jax.random.split(jax.random.key(0), N)
    nets = make(lambda key: nnx.Linear(2, 5, rngs=nnx.Rngs(key)))(keys)
    assert nets.kernel.shape == (N, 2, 5)
    return nets, make(lambda net, x: net(x))(nets, X)


def _axes_by_kind(make):
    axes = nnx.StateAxes({nnx.BatchStat: 0, ...: None})
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    norm.mean = nnx.BatchStat(jnp.zeros((N, 2)))
    norm.var = nnx.BatchStat(jnp.ones((N, 2)))
    rows = make(in_axes=(axes, 0), axis_name="i")(lambda norm, x: norm(x))(norm, X)
    assert len(np.unique(norm.mean[...], axis=0)) == N  # each device has its own
    return norm, rows


def _shared_variable(make):
    one, two = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    two.kernel = one.kernel

    def add(one, two, x):
        one.kernel[...] += 1.0
        return two(x)

    rows = make(add, in_axes=(None, None, 0))(one, two, X)
    assert two.kernel is one.kernel
    return (one, two), rows


def _added_variable(make):
    def sow(net, x):
        net.seen = nnx.Intermediate(x.sum())
        return net.kernel.sum()

    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    axes = nnx.StateAxes({nnx.Intermediate: 0, ...: None})
    return net, make(sow, in_axes=(axes, 0))(net, X)


@pytest.mark.parametrize(
    "run", [_trained, _ensemble, _axes_by_kind, _shared_variable, _added_variable]
)
def test_as_flax_has_it(run):
    (ours, results), (theirs, old_results) = run(jax_dist.nnx_pmap), run(nnx.pmap)

    _same(ours, theirs)
    np.testing.assert_array_equal(results, old_results)


def test_static_arguments_and_compilations():
    traced = []

    @functools.partial(jax_dist.nnx_pmap, in_axes=(None, 0, None), static_broadcasted_argnums=2)
    def call(net, x, scale):
        traced.append(scale)
        return scale * net(x)

    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    old = nnx.pmap(
        lambda net, x, scale: scale * net(x),
        in_axes=(None, 0, None),
        static_broadcasted_argnums=2,
    )
    for _ in range(2):
        np.testing.assert_array_equal(call(net, X, 2), old(net, X, 2))
    once = len(traced)
    call(net, X, 2)
    assert len(traced) == once
    call(net, X, 3)
    assert len(traced) > once


def test_methods_and_axes_that_do_not_fit():
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    call = jax_dist.nnx_pmap(nnx.Linear.__call__, in_axes=(None, 0))
    np.testing.assert_allclose(call(net, X), net(X), rtol=1e-6)

    with pytest.raises(ValueError, match="does not support bound methods"):
        jax_dist.nnx_pmap(net.__call__)
    call = jax_dist.nnx_pmap(lambda one, two, x: one(x), in_axes=(None, 0, 0))
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        call(net, net, X)
