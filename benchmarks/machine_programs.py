"""Programs under pmap that `machines.py` compiles for TPUs and GPUs: small ones, and a transformer.

Each is the function of one device, with the arguments of one device as types. `N` is the number of
devices; the mapped axis is "i".
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

Types = Any  # a tree of jax.ShapeDtypeStruct


class Program(NamedTuple):
    """A function of one device, what one device gives it, and how it is mapped."""

    fun: Callable[..., Any]
    args: tuple[Types, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  # of pmap; never written to

    def mapped_types(self, devices: int) -> tuple[Types, ...]:
        """The arguments as pmap takes them."""
        axes = self.options.get("in_axes", (0,) * len(self.args))
        axes = axes if isinstance(axes, tuple) else (axes,) * len(self.args)
        return tuple(map(functools.partial(stacked, devices), axes, self.args))


def stacked(devices: int, axis: int | None, tree: Types) -> Types:
    """`[*s] -> [N, *s]` (for axis 0)."""

    def stack(leaf: Any) -> Any:
        shape = list(leaf.shape)
        if axis is not None:
            shape.insert(axis, devices)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(stack, tree)


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- steps


def mlp_loss(params: dict, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["last"]) ** 2)


def sgd(params: dict, x: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradient = jax.value_and_grad(mlp_loss)(params, x)
    gradient, loss = lax.pmean((gradient, loss), "i")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


def conv_loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
    mean = lax.pmean(out.mean((0, 1, 2)), "i")  # batch norm over all devices
    square = lax.pmean((out * out).mean((0, 1, 2)), "i")
    return jnp.mean(jax.nn.relu((out - mean) * lax.rsqrt(square - mean * mean + 1e-5)) ** 2)


def conv_step(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return kernel - 0.1 * lax.pmean(jax.grad(conv_loss)(kernel, x), "i")


def noise(key: jax.Array, x: jax.Array) -> jax.Array:
    own = jax.random.fold_in(key, lax.axis_index("i"))
    return lax.pmean(x + jax.random.normal(own, x.shape), "i")


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    sent = lax.all_to_all(x, "i", 0, 0, tiled=True)
    return lax.all_to_all(jax.nn.gelu(sent @ w), "i", 0, 0, tiled=True)


def until_small(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: lax.pmax(jnp.max(x), "i") > 1, lambda x: x * 0.5, x)


def branches(x: jax.Array) -> jax.Array:
    return lax.cond(lax.psum(jnp.sum(x), "i") > 0, jnp.sin, jnp.cos, x)


def clipped(params: dict, x: jax.Array) -> dict:
    gradient = lax.pmean(jax.grad(mlp_loss)(params, x), "i")
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)))
    scale = jnp.minimum(1.0, 1.0 / norm)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradient)


def accumulated(params: dict, x: jax.Array) -> dict:
    def add(total: dict, part: jax.Array) -> tuple[dict, None]:
        return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(params, part)), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(4, -1, x.shape[-1]))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(total, "i"))


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


def transformer(sizes: Sizes) -> Program:
    step = functools.partial(transformer_step, heads=sizes.heads)
    tokens = of(sizes.batch, sizes.tokens, dtype=jnp.int32)
    return Program(step, (transformer_state(sizes), tokens), {"donate_argnums": 0})


# ---- the list: the program of jax_dist.pmap is that of jax.pmap, instruction for instruction

_X = of(128, 128)
_MLP = {"first": of(128, 256), "bias": of(256), "last": of(256, 128)}
_ROWS = of(32, 128)


def same_programs(devices: int) -> dict[str, Program]:
    """Twenty programs for so many devices."""
    ring = [(place, (place + 1) % devices) for place in range(devices)]
    halves = [[*range(devices // 2)], [*range(devices // 2, devices)]]
    mapped: dict[str, tuple[Callable, Any, dict]] = {
        "psum": (lambda x: lax.psum(x, "i"), (_X,), {}),
        "psum of bfloat16": (
            lambda x: lax.psum(x @ x, "i"), (of(128, 128, dtype=jnp.bfloat16),), {}),
        "psum in two groups": (lambda x: lax.psum(x, "i", axis_index_groups=halves), (_X,), {}),
        "pmax": (lambda x: lax.pmax(x, "i"), (_X,), {}),
        "psum_scatter": (
            lambda x: lax.psum_scatter(x, "i", tiled=True), (of(16 * devices, 128),), {}),
        "all_gather": (lambda x: jnp.sin(lax.all_gather(x, "i", tiled=True)), (_X,), {}),
        "ppermute": (lambda x: lax.ppermute(x, "i", ring), (_X,), {}),
        "all_to_all twice": (experts, (of(devices, 8, 128), _X), {}),
        "axis_index": (lambda x: x * lax.axis_index("i"), (_X,), {}),
        "pmean in a scan": (
            lambda x: lax.scan(lambda c, _: (lax.pmean(c @ c, "i"), None), x, None, length=4)[0],
            (_X,), {}),
        "pmax in the condition of a while": (until_small, (_X,), {}),
        "cond on a psum": (branches, (_X,), {}),
        "random numbers of each device": (noise, (of(2, dtype=jnp.uint32), _X),
                                          {"in_axes": (None, 0)}),
        "axes 1 in and out": (
            lambda x: x - lax.pmean(x, "i"), (_X,), {"in_axes": 1, "out_axes": 1}),
        "a shared result": (lambda x: lax.pmean(x @ x, "i"), (_X,), {"out_axes": None}),
        "SGD": (sgd, (_MLP, _ROWS), {}),
        "SGD, donated": (sgd, (_MLP, _ROWS), {"donate_argnums": 0}),
        "SGD with clipping": (clipped, (_MLP, _ROWS), {"donate_argnums": 0}),
        "accumulated gradients": (accumulated, (_MLP, _ROWS), {"donate_argnums": 0}),
        "convolution with batch norm": (
            conv_step, (of(3, 3, 16, 16), of(2, 16, 16, 16)), {"donate_argnums": 0}),
    }  # fmt: skip
    return {name: Program(*each) for name, each in mapped.items()}


def better_programs() -> dict[str, Program]:
    """Those of which jax_dist.pmap makes another program: a sum in place of a gather."""
    return {
        "all_gather, then mean": Program(lambda x: lax.all_gather(x, "i").mean(0), (_X,)),
        "all_gather, then sum of squares": Program(
            lambda x: (lax.all_gather(x, "i") ** 2).sum(0), (_X,)
        ),
    }
