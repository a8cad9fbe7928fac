"""Calls whose results must be those of jax.pmap, on 8 devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def rows(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def as_plain(tree: Any) -> Any:
    """Values, and how each lies on which devices."""

    def plain(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        shards = [(shard.device.id, str(shard.index)) for shard in x.addressable_shards]
        values = np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)
        return values.tolist(), str(x.dtype), x.shape, sorted(shards), x.weak_type

    return jax.tree.map(plain, tree)


def _donating(pmap: Callable) -> Any:
    step = pmap(lambda x, y: x + y, donate_argnums=0)
    x = pmap(lambda x: x)(rows(8, 3))
    out = step(x, rows(8, 3))
    assert x.is_deleted()
    return out


def _in_a_loop(pmap: Callable) -> Any:
    step = pmap(lambda x, n: (x * 2, n + 1), "i", in_axes=(0, None), out_axes=(0, None))
    x, n = rows(8, 3), 0
    for _ in range(3):
        x, n = step(x, n)
    return x, n


def _placed(pmap: Callable, x: Any) -> Any:
    return pmap(lambda x, y: x * y, in_axes=(0, None))(rows(8, 3), x)


def _gradient(pmap: Callable) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(pmap(lambda w, x: jnp.sum(w * x) ** 2, in_axes=(None, 0))(w, x))

    return jax.grad(loss)(jnp.arange(3.0), rows(8, 3))


def _inside_gradient(pmap: Callable) -> Any:
    @functools.partial(pmap, axis_name="i")
    def step(w: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(lambda w: jnp.sum((w - x) ** 2))(w), "i")

    return step(rows(8, 3), rows(8, 3) ** 2)


class Model:
    def __init__(self, scale: float):
        self.scale = scale

    def apply(self, x: Any) -> Any:
        return x * self.scale


CASES: dict[str, Callable[[Callable], Any]] = {
    "numpy": lambda pmap: pmap(lambda x: x * 2)(rows(8, 2)),
    "jax arrays": lambda pmap: pmap(lambda x: x * 2)(jnp.arange(8)),
    "a collective": lambda pmap: pmap(lambda x: lax.psum(x, "i"), axis_name="i")(rows(8, 2)),
    "a name by position": lambda pmap: pmap(lambda x: lax.axis_index("i") + x, "i")(rows(8, 2)),
    "no name": lambda pmap: pmap(lambda x: x + 1)(rows(8)),
    "fewer devices": lambda pmap: pmap(lambda x: lax.pmax(x, "i"), "i")(rows(3, 2)),
    "one device": lambda pmap: pmap(lambda x: lax.psum(x, "i"), "i")(rows(1, 2)),
    "another dimension": lambda pmap: pmap(lambda x, y: x + y, in_axes=(1, 0))(
        rows(3, 8), rows(8, 3)
    ),
    "a dimension for all": lambda pmap: pmap(lambda x, y: x + y, in_axes=1)(rows(3, 8), rows(3, 8)),
    "shared": lambda pmap: pmap(lambda x, y: x * y, in_axes=(0, None))(rows(8, 2), 3.0),
    "a shared tree": lambda pmap: pmap(lambda w, x: w["a"] * x, in_axes=(None, 0))(
        {"a": np.ones(2), "b": 1}, rows(8, 2)
    ),
    "a tree of axes": lambda pmap: pmap(
        lambda t, x: t["a"] * t["b"][0] + x, in_axes=({"a": 0, "b": (None, 1)}, 0)
    )({"a": rows(8, 2), "b": (2.0, rows(2, 8))}, rows(8, 2)),
    "out of another dimension": lambda pmap: pmap(lambda x: x, out_axes=1)(rows(8, 2, 3)),
    "results of several kinds": lambda pmap: pmap(
        lambda x: (lax.psum(x, "i"), {"y": x}), "i", out_axes=(None, 1)
    )(rows(8, 2)),
    "a tree of results": lambda pmap: pmap(lambda x: {"a": (x, [x + 1]), "b": None})(rows(8, 2)),
    "a constant result": lambda pmap: pmap(lambda x: (3.0, jnp.zeros(2)))(rows(8)),
    "keywords": lambda pmap: pmap(lambda x, *, y: x + y)(rows(8), y=rows(8)),
    "keywords for positions": lambda pmap: pmap(lambda x, y: x + y, in_axes=(0, 0))(
        rows(8), rows(8)
    ),
    "None": lambda pmap: pmap(lambda x, y: (x, y))(rows(8), None),
    "lists": lambda pmap: pmap(lambda xs: xs[0] + xs[1])([rows(8), rows(8)]),
    "static": lambda pmap: pmap(lambda x, n, f: f(x) * n, static_broadcasted_argnums=(1, 2))(
        rows(8), 3, jnp.sin
    ),
    "static in the middle": lambda pmap: pmap(
        lambda x, n, y: x * n + y, static_broadcasted_argnums=1, in_axes=(0, None, 0)
    )(rows(8), 3, rows(8)),
    "axes without those of what is static": lambda pmap: pmap(
        lambda w, x, n: x + w * n, static_broadcasted_argnums=(2,), in_axes=(None, 0)
    )(2.0, rows(8), 3),
    "axes of some of what is static": lambda pmap: pmap(
        lambda x, n, f: f(x) * n, static_broadcasted_argnums=(1, 2), in_axes=(0, None)
    )(rows(8), 3, jnp.sin),
    "donated": _donating,
    "in a loop": _in_a_loop,
    "devices": lambda pmap: pmap(lambda x: x + 1, devices=jax.devices()[4:])(rows(4)),
    "devices backwards": lambda pmap: pmap(
        lambda x: lax.axis_index("i") + x, "i", devices=jax.devices()[::-1]
    )(rows(8)),
    "devices that are None": lambda pmap: pmap(lambda x: x + 1, devices=None)(rows(8)),
    "a backend": lambda pmap: pmap(lambda x: x + 1, backend="cpu")(rows(8)),
    "a size": lambda pmap: pmap(lambda x: x + 1, axis_size=4)(rows(4)),
    "bfloat16": lambda pmap: pmap(lambda x: x + 1)(jnp.ones((8, 2), jnp.bfloat16)),
    "keys": lambda pmap: pmap(lambda key: jax.random.normal(key, (2,)))(
        jax.random.split(jax.random.key(0), 8)
    ),
    "keys of old": lambda pmap: pmap(lambda key: jax.random.split(key))(
        jax.random.split(jax.random.PRNGKey(0), 8)
    ),
    "Python numbers in arrays": lambda pmap: pmap(lambda x, y: x + y, in_axes=(0, None))(
        rows(8), 7
    ),
    "what lies on one device": lambda pmap: _placed(
        pmap, jax.device_put(np.ones(3), jax.devices()[5])
    ),
    "what was sliced from a result": lambda pmap: _placed(pmap, pmap(lambda x: x)(rows(8, 3))[0]),
    "what lies on other devices": lambda pmap: pmap(lambda x: x + 1)(
        pmap(lambda x: x, devices=jax.devices()[4:])(rows(4))
    ),
    "what lies in another order": lambda pmap: pmap(lambda x: x + 1)(
        pmap(lambda x: x, devices=jax.devices()[::-1])(rows(8))
    ),
    "in jit": lambda pmap: jax.jit(lambda x: pmap(lambda x: lax.psum(x, "i"), "i")(x) + 1)(
        rows(8, 2)
    ),
    "over jit": lambda pmap: pmap(jax.jit(lambda x: x * 2))(rows(8)),
    "over vmap": lambda pmap: pmap(jax.vmap(lambda x: lax.psum(x, ("i", "j")), axis_name="j"), "i")(
        rows(8, 3)
    ),
    "in vmap": lambda pmap: jax.vmap(pmap(lambda x: x * 2))(rows(3, 8)),
    "in scan": lambda pmap: lax.scan(
        lambda x, y: (pmap(lambda x, y: x + y)(x, y), y), jnp.zeros((8, 2)), rows(3, 8, 2)
    ),
    "its gradient": _gradient,
    "a gradient in it": _inside_gradient,
    "a method": lambda pmap: pmap(Model(2.0).apply)(rows(8)),
    "a partial": lambda pmap: pmap(functools.partial(lambda s, x: x * s, 3.0))(rows(8)),
    "an object that is called": lambda pmap: pmap(jnp.sin)(rows(8)),
    "nothing but keywords": lambda pmap: pmap(lambda *, x: x + 1)(x=rows(8)),
    "values it closes over": lambda pmap: pmap(functools.partial(jnp.add, jnp.ones(3)))(rows(8, 3)),
}
