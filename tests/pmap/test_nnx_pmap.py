"""`jax_dist.nnx_pmap` beside `flax.nnx.pmap`: the same modules, results and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

pytestmark = pytest.mark.mapping
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


def _make():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)


def _step(net, optimizer, x):
    value, gradients = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, jax.lax.pmean(gradients, "i"))
    return jax.lax.pmean(value, "i")


def _each(make, x):
    """Ensembles: another model on each device, made and called there."""
    nets = make(lambda key: nnx.Linear(2, 5, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), N)
    )
    return nets, make(lambda net, x: net(x))(nets, x)


def _same(ours, theirs):
    ours, theirs = (jax.tree.leaves_with_path(nnx.state(each)) for each in (ours, theirs))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def _trained(make, steps=3):
    net, optimizer = _make()
    step = make(_step, axis_name="i", in_axes=(SAME, SAME, 0), out_axes=None)
    losses = [step(net, optimizer, X) for _ in range(steps)]
    return net, optimizer, losses


def test_training_changes_the_objects_of_the_caller():
    net, optimizer, losses = _trained(jax_dist.nnx_pmap)
    old_net, old_optimizer, old_losses = _trained(nnx.pmap)

    assert losses == old_losses
    assert net.calls[...] == 3  # what is no parameter comes back, too
    assert optimizer.step[...] == 3
    _same((net, optimizer), (old_net, old_optimizer))


def test_modules_of_results_and_mapped_modules():
    nets, rows = _each(jax_dist.nnx_pmap, X)
    old_nets, old_rows = _each(nnx.pmap, X)

    assert nets.kernel.shape == (N, 2, 5)
    _same(nets, old_nets)
    np.testing.assert_array_equal(rows, old_rows)


def test_axes_by_kind_of_variable():
    axes = nnx.StateAxes({nnx.BatchStat: 0, ...: None})

    def run(make):
        @make(in_axes=(axes, 0), axis_name="i")
        def call(norm, x):
            return norm(x)

        norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        norm.mean = nnx.BatchStat(jnp.zeros((N, 2)))
        norm.var = nnx.BatchStat(jnp.ones((N, 2)))
        return norm, call(norm, X)

    (norm, rows), (old_norm, old_rows) = run(jax_dist.nnx_pmap), run(nnx.pmap)

    assert len(np.unique(norm.mean[...], axis=0)) == N  # each device has its own
    _same(norm, old_norm)
    np.testing.assert_array_equal(rows, old_rows)


def test_a_shared_variable_stays_shared():
    def run(make):
        one, two = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        two.kernel = one.kernel

        def add(one, two, x):
            one.kernel[...] += 1.0
            return two(x)

        rows = make(add, in_axes=(None, None, 0))(one, two, X)
        assert two.kernel is one.kernel
        return (one, two), rows

    (ours, rows), (theirs, old_rows) = run(jax_dist.nnx_pmap), run(nnx.pmap)

    _same(ours, theirs)
    np.testing.assert_array_equal(rows, old_rows)


def test_a_variable_that_the_function_adds():
    def run(make):
        def sow(net, x):
            net.seen = nnx.Intermediate(x.sum())
            return net.kernel.sum()

        net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        make(sow, in_axes=(nnx.StateAxes({nnx.Intermediate: 0, ...: None}), 0))(net, X)
        return net

    _same(run(jax_dist.nnx_pmap), run(nnx.pmap))


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


def test_a_bound_method_is_refused():
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    for bound in (net.__call__, functools.partial(net.__call__)):
        with pytest.raises(ValueError, match="does not support bound methods"):
            jax_dist.nnx_pmap(bound)


def test_a_method_of_its_class_takes_the_module_as_an_argument():
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    call = jax_dist.nnx_pmap(nnx.Linear.__call__, in_axes=(None, 0))

    np.testing.assert_allclose(call(net, X), net(X), rtol=1e-6)


def test_one_module_with_two_axes():
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    call = jax_dist.nnx_pmap(lambda one, two, x: one(x), in_axes=(None, 0, 0))

    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        call(net, net, X)
