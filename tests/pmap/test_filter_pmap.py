"""`jax_dist.filter_pmap` beside `equinox.filter_pmap`: the same trees, types and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist.errors import ArgumentTypeError, MappedAxisError

eqx = pytest.importorskip("equinox")

X = jnp.arange(16.0).reshape(8, 2)
KEYS = jax.random.split(jax.random.PRNGKey(0), 8)


def make(key):
    return eqx.nn.MLP(2, 2, 4, 1, key=key)


def mean(model, x):
    return lax.pmean(model(x), "i")


def mixed(x, y):
    return {"sum": x + y, "name": "relu", "count": 3, "none": None, "both": (x * 2, jnp.tanh)}


MIXED = ("sum", "name", "count", "none", "both")


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(other):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)
        else:
            assert one is other or one == other


@functools.cache
def mlp():
    return make(jax.random.PRNGKey(1))


CASES = {  # made when they are asked for: every worker of the tests reads this file
    "module out": lambda: (make, {}, (KEYS,)),
    "module in": lambda: (mean, {"axis_name": "i"}, (eqx.filter_vmap(make)(KEYS), X)),
    "module shared": lambda: (mean, {"axis_name": "i", "in_axes": (None, 0)}, (mlp(), X)),
    "module as function": lambda: (mlp(), {}, (X,)),
    "result shared": lambda: (
        mean,
        {"axis_name": "i", "out_axes": None, "in_axes": (None, eqx.if_array(0))},
        (mlp(), X),
    ),
    "result moved": lambda: (
        mixed,
        {"out_axes": {**dict.fromkeys(MIXED), "sum": 1, "both": eqx.if_array(1)}},
        (X, 3),
    ),
    "static argument": lambda: (mixed, {}, (X, 3)),
    "second dimension": lambda: (mixed, {"in_axes": (1, None)}, (X.T, np.float32(2))),
    "unnamed axis": lambda: (lambda x: x + 1, {"axis_size": 8}, (X,)),
    "donated": lambda: (lambda x: x * 2, {"donate": "all"}, (X,)),
    "number for an axis": lambda: (lambda x: (x, 2.0), {"out_axes": 0}, (X,)),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # equinox, on jax 0.12
@pytest.mark.parametrize("name", CASES)
def test_as_equinox_has_it(name):
    fun, options, args = CASES[name]()
    copies = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, args)

    assert_same(
        jax_dist.filter_pmap(fun, **options)(*args), eqx.filter_pmap(fun, **options)(*copies)
    )


def test_each_constant_has_one_program():
    traced = []

    @jax_dist.filter_pmap
    def times(x, how):
        traced.append(how)
        return x * how

    numbers = [2, 1, True, 1.0, 0.0, -0.0]
    for how in (*numbers, *numbers):
        assert_same(times(X, how), X * how)
    assert [str(how) for how in traced] == [str(how) for how in numbers]


def test_as_a_method_and_as_a_decorator():
    class Trainer(eqx.Module):
        scale: jax.Array

        @functools.partial(jax_dist.filter_pmap, in_axes=(None, 0))
        def step(self, x):
            return x * self.scale

    np.testing.assert_array_equal(Trainer(jnp.float32(3)).step(X), X * 3)


def test_under_jit_and_grad():
    def loss(model, x):
        return jax_dist.filter_pmap(mean, axis_name="i", in_axes=(None, 0))(model, x).sum()

    plain = eqx.filter_grad(lambda model, x: jax.vmap(model)(x).mean(0).sum() * 8)(mlp(), X)
    mapped = eqx.filter_jit(eqx.filter_grad(loss))(mlp(), X)

    for one, other in zip(jax.tree.leaves(mapped), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_functions_are_traced_once_and_lowered():
    traced = []

    def double(x):
        traced.append(x)
        return 2 * x

    for _ in range(2):
        jax_dist.filter_pmap(double)(X)
    lowered = jax_dist.filter_pmap(double).lower(jax.ShapeDtypeStruct(X.shape, X.dtype))

    assert len(traced) == 1
    assert "sdy.manual_computation" in lowered.as_text()


class Configured(eqx.Module):
    cfg: object


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "error", "words"),
    [
        ({"donate": "some"}, (), {}, ValueError, "donate must be"),
        ({"donate_argnums": 0}, (), {}, ArgumentTypeError, "takes no donate_argnums"),
        ({}, (X,), {"y": 3}, ArgumentTypeError, "got keyword arguments: y"),
        ({}, (X, [{1}]), {}, ArgumentTypeError, "must be hashable: unhashable type: 'set'"),
        ({}, (Configured({1}), X), {}, ArgumentTypeError, "unhashable type: 'set'"),
        ({"in_axes": {"y": 0}}, (X, 3), {}, MappedAxisError, "in_axes .* is not a tree prefix"),
        ({"in_axes": (0, 0, 0)}, (X, 3), {}, MappedAxisError, "in_axes .* is not a tree prefix"),
        ({"in_axes": (2, None)}, (X, 3), {}, ValueError, "axis 2|in_axes"),
        ({"out_axes": {**dict.fromkeys(MIXED), "sum": 99}}, (X, 3), {}, ValueError, "axis 99"),
        ({}, (X, X[:4]), {}, ValueError, "size"),
        ({"in_axes": "0"}, (X, 3), {}, ArgumentTypeError, "holds '0'"),
        ({"out_axes": (0, 0)}, (X, 3), {}, MappedAxisError, "out_axes .* is not a tree prefix"),
    ],
)
def test_misuse_is_an_error(options, args, kwargs, error, words):
    with pytest.raises(error, match=words):
        jax_dist.filter_pmap(mixed, **options)(*args, **kwargs)
