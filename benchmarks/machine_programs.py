"""A transformer's training step under pmap: the function of one device; the mapped axis is "i"."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

Types = Any  # a tree of jax.ShapeDtypeStruct


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- a transformer, as people train it under pmap: bfloat16 in the layers, adamw in float32


class Sizes(NamedTuple):
    layers: int
    width: int
    vocabulary: int
    heads: int
    tokens: int
    batch: int  # of one device


SMALL = Sizes(2, 256, 1024, 8, 129, 4)
LARGE = Sizes(8, 512, 8192, 8, 1025, 8)  # 29 million parameters
GIANT = Sizes(32, 4096, 32768, 32, 2049, 1)  # 6.6 thousand million
OPTIMISER = optax.adamw(1e-3)


def transformer_state(sizes: Sizes) -> Types:
    layers, width, words = sizes[:3]
    blocks = {
        "norm1": of(layers, width),
        "norm2": of(layers, width),
        "qkv": of(layers, width, 3 * width),
        "out": of(layers, width, width),
        "up": of(layers, width, 4 * width),
        "down": of(layers, 4 * width, width),
    }
    params = {
        "words": of(words, width),
        "places": of(4096, width),
        "norm": of(width),
        "blocks": blocks,
    }
    return params, jax.eval_shape(OPTIMISER.init, params)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def transformer_loss(
    params: dict,
    tokens: jax.Array,
    heads: int,
    lay: Callable[[jax.Array], jax.Array] = lambda x: x,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """`lay` says how what goes from layer to layer lies, where that is written by hand."""
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    read, wanted = tokens[:, :-1], tokens[:, 1:]
    length = read.shape[1]
    past = jnp.tril(jnp.ones((length, length), bool))

    def split(x: jax.Array) -> jax.Array:  # [b, t, d] -> [b, h, t, d / h]
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    def block(x: jax.Array, own: dict) -> tuple[jax.Array, None]:
        q, k, v = map(split, jnp.split(_norm(x, own["norm1"]) @ own["qkv"], 3, -1))
        scores = (q @ k.transpose(0, 1, 3, 2)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(past, scores, -1e9).astype(jnp.float32))
        attended = (weights.astype(x.dtype) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + attended @ own["out"]
        return lay(x + jax.nn.gelu(_norm(x, own["norm2"]) @ own["up"]) @ own["down"]), None

    x = lay(half["words"][read] + half["places"][:length])
    x, _ = lax.scan(jax.checkpoint(block), x, half["blocks"])
    scores = (_norm(x, half["norm"]) @ half["words"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()


def transformer_step(
    state: Any, tokens: jax.Array, heads: int = 8, lay: Callable[..., jax.Array] = lambda x: x
) -> tuple[Any, jax.Array]:
    params, optimiser = state
    loss, gradient = jax.value_and_grad(transformer_loss)(params, tokens, heads, lay)
    gradient, loss = lax.pmean((gradient, loss), "i")
    updates, optimiser = OPTIMISER.update(gradient, optimiser, params)
    return (optax.apply_updates(params, updates), optimiser), loss
