"""`jax_dist.filter_pmap` beside `equinox.filter_pmap`: the same trees, types and bits."""

import functools

import chex
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

make = lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key)
mean = lambda model, x: lax.pmean(model(x), "i")
OVER_I = {"axis_name": "i", "in_axes": (None, eqx.if_array(0))}


def mixed(x, y):
    return {"sum": x + y, "name": "relu", "count": 3, "none": None, "both": (x * 2, jnp.tanh)}


UNMAPPED = dict.fromkeys(("sum", "name", "count", "none", "both"))  # out_axes of `mixed`
MOVED = {**UNMAPPED, "sum": 1, "both": eqx.if_array(1)}

CASES = {  # made when they are asked for: every worker of the tests reads this file
    "module out": lambda: (make, {}, (KEYS,)),
    "module in": lambda: (mean, {"axis_name": "i"}, (eqx.filter_vmap(make)(KEYS), X)),
    "module shared": lambda: (mean, {"axis_name": "i", "in_axes": (None, 0)}, (make(KEYS[0]), X)),
    "module as function": lambda: (make(KEYS[0]), {}, (X,)),
    "result shared": lambda: (mean, {"out_axes": None, **OVER_I}, (make(KEYS[0]), X)),
    "result moved": lambda: (mixed, {"out_axes": MOVED}, (X, 3)),
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
    ours, theirs = (pmap(fun, **options) for pmap in (jax_dist.filter_pmap, eqx.filter_pmap))

    assert eqx.tree_equal(ours(*args), theirs(*copies))


def test_each_constant_has_one_program_even_if_mapped_again():
    traced, numbers = [], [2, 1, True, 1.0, 0.0, -0.0]

    def times(x, how):
        traced.append(how)
        return x * how

    for how in (*numbers, *numbers):
        assert eqx.tree_equal(jax_dist.filter_pmap(times)(X, how), X * how)
    lowered = jax_dist.filter_pmap(times).lower(jax.ShapeDtypeStruct(X.shape, X.dtype), 2)

    assert "sdy.manual_computation" in lowered.as_text()
    assert [str(how) for how in traced] == [str(how) for how in numbers]


def test_as_a_method_and_as_a_decorator():
    class Trainer(eqx.Module):
        scale: jax.Array

        @functools.partial(jax_dist.filter_pmap, in_axes=(None, 0))
        def step(self, x):
            return x * self.scale

    np.testing.assert_array_equal(Trainer(jnp.float32(3)).step(X), X * 3)


def test_under_jit_and_grad():
    def gradient(map_over):
        mapped = map_over(mean, **OVER_I)
        loss = lambda model, x: mapped(model, x).sum()
        return eqx.filter_jit(eqx.filter_grad(loss))(make(KEYS[0]), X)

    ours, theirs = gradient(jax_dist.filter_pmap), gradient(eqx.filter_vmap)

    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


MISTAKES = {  # words of the error: its class, and the call
    "donate must be": (ValueError, lambda f: f(mixed, donate="some")),
    "takes no donate_argnums": (ArgumentTypeError, lambda f: f(mixed, donate_argnums=0)),
    "got keyword arguments: y": (ArgumentTypeError, lambda f: f(mixed)(X, y=3)),
    "unhashable type: 'set'": (TypeError, lambda f: f(mixed)(X, [{1}])),
    "type: 'set'": (TypeError, lambda f: f(mixed)(eqx.nn.Lambda({1}), X)),
    "in_axes {.* is not a tree": (MappedAxisError, lambda f: f(mixed, in_axes={"y": 0})(X, 3)),
    "in_axes .* is not a tree": (MappedAxisError, lambda f: f(mixed, in_axes=(0, 0, 0))(X, 3)),
    "out_axes .* is not a tree": (MappedAxisError, lambda f: f(mixed, out_axes=(0, 0))(X, 3)),
    "axis 2|in_axes": (ValueError, lambda f: f(mixed, in_axes=(2, None))(X, 3)),
    "axis 99": (ValueError, lambda f: f(mixed, out_axes={**UNMAPPED, "sum": 99})(X, 3)),
    "size": (ValueError, lambda f: f(mixed)(X, X[:4])),
    "holds '0'": (ArgumentTypeError, lambda f: f(mixed, in_axes="0")(X, 3)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_misuse_is_an_error(words):
    kind, call = MISTAKES[words]

    with pytest.raises(kind, match=words):
        call(jax_dist.filter_pmap)
