"""`jax_dist.filter_pmap` beside `equinox.filter_pmap`: the same trees, types and bits."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist.errors import ArgumentTypeError, AxesError, MappedAxisError

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.mapping

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
        {
            "out_axes": {
                "sum": 1,
                "name": None,
                "count": None,
                "none": None,
                "both": eqx.if_array(1),
            }
        },
        (X, 3),
    ),
    "static argument": lambda: (mixed, {}, (X, 3)),
    "axes by name": lambda: (mixed, {"in_axes": {"y": None}}, (X, jnp.ones(2))),
    "second dimension": lambda: (mixed, {"in_axes": (1, None)}, (X.T, np.float32(2))),
    "no mapped argument": lambda: (
        lambda: lax.axis_index("i"),
        {"axis_name": "i", "axis_size": 8},
        (),
    ),
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


def test_negative_axes():
    """As under vmap; jax.pmap on 0.10 joins the slices instead, and equinox with it."""
    options = {"in_axes": -1, "out_axes": -1}

    assert_same(
        jax_dist.filter_pmap(jnp.sin, **options)(X.T), eqx.filter_vmap(jnp.sin, **options)(X.T)
    )


def test_one_function_per_kind_of_call():
    traced = []

    @jax_dist.filter_pmap
    def double(x, how):
        traced.append(how)
        return x * how

    for how in (2, 2, 3, 2):
        np.testing.assert_array_equal(double(X, how), X * how)

    assert traced == [2, 3]


def test_equal_numbers_of_other_types_or_bits_are_other_constants():
    class Tagged(float):
        pass

    numbers = [1, True, 1.0, 0.0, -0.0, 0.0 + 0.0j, Tagged(0.0), Tagged(0.0)]
    place = lambda number, x: x * 0 + next(n for n, each in enumerate(numbers) if each is number)
    call = jax_dist.filter_pmap(place)

    assert [int(call(number, X).max()) for number in numbers] == list(range(8))


def test_what_a_captured_state_is_does_not_leak_from_one_module_to_another():
    models = [make(jax.random.PRNGKey(seed)) for seed in range(2)]
    call = jax_dist.filter_pmap(lambda model, x: model(x), in_axes=(None, 0))

    for model in (*models, *models):
        np.testing.assert_array_equal(call(model, X), eqx.filter_pmap(model)(X))


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


def test_equal_functions_are_traced_once():
    traced, decorate = [], jax_dist.filter_pmap

    def double(x):
        traced.append(x)
        return 2 * x

    for _ in range(2):
        decorate(double)(X[:1])
        decorate(eqx.filter_vmap(double))(X[:1])
        decorate(double, axis_name="i")(X[:1])

    assert len(traced) == 3


def test_a_function_goes_with_its_programs():
    def double(x):
        return 2 * x

    jax_dist.filter_pmap(double)(X)
    watched = weakref.ref(double)
    del double
    gc.collect()

    assert watched() is None


def test_lower():
    lowered = jax_dist.filter_pmap(mixed).lower(X, 3)

    assert "sdy.manual_computation" in lowered.as_text()
    assert_same(lowered.compile()(X, 3), eqx.filter_pmap(mixed)(X, 3))


def test_a_compiled_call_takes_its_own_kind_of_arguments():
    compiled = jax_dist.filter_pmap(mixed).lower(X, 3).compile()

    with pytest.raises(TypeError, match="pytree"):
        compiled(X, 4)
    with pytest.raises(TypeError, match="float32"):
        compiled(X[:, :1], 3)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "error", "words"),
    [
        ({"donate": "some"}, (), {}, ValueError, "donate='some'"),
        ({"donate_argnums": 0}, (), {}, ArgumentTypeError, "takes no donate_argnums"),
        ({}, (X,), {"y": 3}, ArgumentTypeError, "y is one"),
        ({}, (X, [{1}]), {}, ArgumentTypeError, r"\{1\}, of type set"),
        ({"in_axes": {"z": 0}}, (X, 3), {}, AxesError, "'z': 0"),
        ({"in_axes": (0, 0, 0)}, (X, 3), {}, AxesError, "prefix"),
        ({"in_axes": (2, None)}, (X, 3), {}, MappedAxisError, "axis 2|in_axes"),
        ({"out_axes": {**dict.fromkeys(MIXED), "sum": 99}}, (X, 3), {}, ValueError, "out_axes"),
        ({}, (X, X[:4]), {}, ValueError, "size"),
        ({"in_axes": "0"}, (X, 3), {}, ArgumentTypeError, "'0'"),
        ({"out_axes": (0, 0)}, (X, 3), {}, AxesError, "out_axes of filter_pmap do not fit"),
    ],
)
def test_refused(options, args, kwargs, error, words):
    with pytest.raises(error, match=words):
        jax_dist.filter_pmap(mixed, **options)(*args, **kwargs)
