"""pmap inside jit, scan, cond, grad and vmap, and under a mesh that the user has set."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist

pytestmark = pytest.mark.mapping

_EIGHT = np.arange(8.0, dtype=np.float32)


def _step(x):
    return lax.psum(x, "i") / 8 + x


_mapped = jax_dist.pmap(_step, "i")
_vmapped = jax.vmap(_step, axis_name="i")  # the same numbers, on one device

_WAYS = {
    "jit": lambda f: jax.jit(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=3),
    "jit(scan)": lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]),
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 3, lambda _, c: f(c), x),
    "while_loop": lambda f: lambda x: lax.while_loop(lambda c: c[0] < 50, f, x),
    "cond": lambda f: lambda x: lax.cond(x[0] < 1, f, lambda x: x, x),
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)),
    "jit(grad)": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2))),
    "hessian": lambda f: jax.hessian(lambda x: jnp.sum(f(x) ** 3)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "checkpoint": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap over the last": lambda f: lambda x: jax.vmap(f, 1, 1)(jnp.stack([x, 2 * x], axis=1)),
    "two in a row": lambda f: jax.jit(lambda x: f(jnp.sin(f(x)))),
    "custom_vjp": lambda f: jax.grad(lambda x: jnp.sum(_clipped(f)(x))),
}


def _clipped(f):
    @jax.custom_vjp
    def clipped(x):
        return f(x)

    clipped.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.clip(ct * x, 0, 3),))
    return clipped


@pytest.mark.parametrize("way", _WAYS)
def test_the_numbers_of_vmap(way):
    chex.assert_trees_all_close(
        _WAYS[way](_mapped)(_EIGHT), _WAYS[way](_vmapped)(_EIGHT), rtol=1e-5
    )


def test_jit_of_pmap_runs_on_all_devices_with_one_all_reduce():
    jitted = jax.jit(_mapped)

    text = jitted.lower(_EIGHT).compile().as_text()

    assert text.count(" all-reduce(") == 1
    assert "all-gather" not in text
    assert len(jitted(_EIGHT).sharding.device_set) == 8


def test_custom_rules_of_the_body_are_kept():
    @jax.custom_jvp
    def odd(x):
        return jnp.sin(x)

    odd.defjvp(lambda primals, tangents: (odd(*primals), 100 * tangents[0]))

    gradient = jax.grad(lambda x: jnp.sum(jax_dist.pmap(odd)(x)))(_EIGHT)

    assert gradient.tolist() == [100.0] * 8


def test_collectives_over_a_vmap_outside():
    x = np.arange(16.0, dtype=np.float32).reshape(2, 8)

    result = jax.vmap(jax_dist.pmap(lambda x: lax.psum(x, ("batch", "i")), "i"), axis_name="batch")(
        x
    )

    np.testing.assert_array_equal(result, np.full((2, 8), 120.0))
