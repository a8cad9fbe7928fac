"""Results of what is made of a mapped function, in every way to run or describe it, beside vmap."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import mesh, put

import jax_dist

_X = np.arange(8, dtype=np.float32)
_TWO = np.stack([_X, _X + 1])


def _share(x):
    """Sum over devices, so that a gradient is none of a single slice."""
    return x * x + lax.psum(x, "i")


_VMAPPED = jax.vmap(_share, axis_name="i")  # the same numbers, on one device


def _loss(fun):
    """With the attributes of the mapped function, if it has any to copy."""
    return functools.wraps(fun)(lambda x: fun(x).sum())


def _doubled(fun):
    return functools.wraps(fun)(lambda x: 2 * fun(x))


_TRANSFORMS = {
    "itself": lambda f: f,
    "grad": lambda f: jax.grad(_loss(f)),
    "value_and_grad": lambda f: jax.value_and_grad(_loss(f)),
    "vmap": jax.vmap,
    "jit": jax.jit,
    "jit that donates": lambda f: jax.jit(f, donate_argnums=0, keep_unused=True),
    "wraps": _doubled,
    "partial": functools.partial,
    "jit of grad of wraps": lambda f: jax.jit(jax.grad(_loss(_doubled(f)))),
    "checkpoint": jax.checkpoint,
    "vmap of grad": lambda f: jax.vmap(jax.grad(_loss(f))),
}


def _staged(made):
    """With `trace` and `lower`: its own, else those of a jit around it."""
    return made if hasattr(made, "trace") and hasattr(made, "lower") else jax.jit(made)


def _by_jaxpr(made, x):
    jaxpr, types = jax.make_jaxpr(made, return_shape=True)(x)
    results = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(x)
    return jax.tree.unflatten(jax.tree.structure(types), results)


_USES = {
    "call": lambda made, x: made(x),
    "trace": lambda made, x: _staged(made).trace(x).lower().compile()(x),
    "lower": lambda made, x: _staged(made).lower(x).compile()(x),
    "lower of a type": lambda made, x: (
        _staged(made).lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()(x)
    ),
    "jit of it": lambda made, x: jax.jit(made)(x),
    "jaxpr": _by_jaxpr,
    # An exported program is called on its 8 devices.
    "export": lambda made, x: jax.export.export(jax.jit(made))(x).call(put(x, mesh("any"))),
}


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_it_is_the_transform_of_the_function(transform, use):
    make, x = _TRANSFORMS[transform], _TWO if "vmap" in transform else _X
    expected = make(_VMAPPED)(jnp.asarray(x))

    results = _USES[use](make(jax_dist.pmap(_share, "i")), jnp.asarray(x))

    chex.assert_trees_all_close(results, expected, rtol=1e-6)


def _custom_vjp(fun):
    clipped = jax.custom_vjp(fun)
    clipped.defvjp(lambda x: (fun(x), x), lambda x, ct: (jnp.clip(ct * x, 0, 3),))
    return jax.grad(lambda x: jnp.sum(clipped(x)))


_AROUND = {  # other functions around it, which are called and jitted only
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c) / 9, c.sum()), x, None, length=3),
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 3, lambda _, c: f(c) / 9, x),
    "while_loop": lambda f: lambda x: lax.while_loop(lambda c: c[0] < 50, f, x),
    "cond": lambda f: lambda x: lax.cond(x[0] < 1, f, lambda x: x, x),
    "hessian": lambda f: jax.hessian(lambda x: jnp.sum(f(x) ** 2)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap over the last": lambda f: lambda x: jax.vmap(f, 1, 1)(jnp.stack([x, 2 * x], axis=1)),
    "two in a row": lambda f: lambda x: f(jnp.sin(f(x))),
    "custom_vjp": _custom_vjp,
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", ""])
@pytest.mark.parametrize("around", _AROUND)
def test_inside_of_other_functions_it_gives_the_numbers_of_vmap(around, jit):
    ours, theirs = (jit(_AROUND[around](f))(_X) for f in (jax_dist.pmap(_share, "i"), _VMAPPED))

    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_under_a_vmap_that_has_a_name():
    summed = jax_dist.pmap(lambda x: lax.psum(x, ("batch", "i")), "i")
    without = jax_dist.pmap(lambda x: x * 2, "i")  # collectives, so the names may be the same

    assert jax.vmap(summed, axis_name="batch")(_TWO).tolist() == [[64.0] * 8] * 2
    np.testing.assert_array_equal(jax.vmap(without, axis_name="i")(_TWO), 2 * _TWO)
