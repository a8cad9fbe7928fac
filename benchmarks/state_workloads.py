"""Steps with a state, as they were written for pmap: what `global_view.py` measures.

Each is a function of one device: a state that all devices start with, a part of the batch, and
collectives over "i". `N` is 8, the number of devices; a batch is `[N, ...]`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax import lax

DEVICES = 8
Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step, what it starts with, and its two halves where FSDP is written by hand."""

    step: Callable[..., tuple[Tree, Tree]]
    state: Tree
    batch: tuple[Tree, ...]  # `[N, ...]`
    out_axes: int | None = None  # of the second result
    gradient: Callable[..., tuple[Tree, Tree]] | None = None  # of one device, and what update needs
    update: Callable[..., tuple[Tree, Tree]] | None = None  # of all: state, mean gradient, rest


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Of the size of 1 after a product with something of the size of 1."""
    width = shape[-2] if len(shape) > 1 else 1
    return (random.normal(size=shape) / np.sqrt(width)).astype(np.float32)


def _zeros(params: Tree) -> Tree:
    return jax.tree.map(np.zeros_like, params)


def _momentum(state: Tree, gradient: Tree) -> Tree:
    """The constants are powers of two: whether `a * b + c` rounds once or twice is the same."""
    moment = jax.tree.map(lambda m, g: 0.5 * m + g, state["moment"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.0625 * m, state["params"], moment)
    return {"params": params, "moment": moment}


def _with_adam(params: Tree) -> Tree:
    return {
        "params": params,
        "mean": _zeros(params),
        "square": _zeros(params),
        "turn": np.float32(0),
    }


def _adam(state: Tree, gradient: Tree) -> Tree:
    turn = state["turn"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], gradient)
    of_mean, of_square = 1 - 0.9**turn, 1 - 0.99**turn
    params = jax.tree.map(
        lambda p, m, s: p - 1e-3 * (m / of_mean) / (jnp.sqrt(s / of_square) + 1e-8),
        state["params"],
        mean,
        square,
    )
    return {"params": params, "mean": mean, "square": square, "turn": turn}


def _data_parallel(
    state: Tree, batch: tuple[Tree, ...], gradient: Callable, update: Callable
) -> Workload:
    """A step that takes the mean of the gradients of all devices."""

    def step(state: Tree, *own: Tree) -> tuple[Tree, Tree]:
        gradients, rest = gradient(state, *own)
        return update(state, lax.pmean(gradients, "i"), lax.pmean(rest, "i"))

    return Workload(step, state, batch, gradient=gradient, update=update)


# ---- three layers with momentum


def mlp() -> Workload:
    random = np.random.default_rng(0)
    sizes = {"a": (256, 1024), "b": (1024, 1024), "c": (1024, 256)}
    params = {name: _normal(random, *shape) for name, shape in sizes.items()}
    batch = (_normal(random, DEVICES, 16, 256), _normal(random, DEVICES, 16, 256))

    def loss_of(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(jax.nn.relu(x @ params["a"]) @ params["b"])
        return jnp.mean((hidden @ params["c"] - y) ** 2)

    def gradient(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x, y)
        return gradients, loss

    def update(state: Tree, gradients: Tree, loss: jax.Array) -> tuple[Tree, Tree]:
        return _momentum(state, gradients), loss

    return _data_parallel({"params": params, "moment": _zeros(params)}, batch, gradient, update)


# ---- residual blocks with batch norm, whose running statistics are averaged


def resnet() -> Workload:
    random = np.random.default_rng(0)
    wide, classes = 64, 16
    kernel = lambda ins: (random.normal(size=(3, 3, ins, wide)) / np.sqrt(9 * ins)).astype("f4")
    scale = lambda: {"scale": np.ones(wide, np.float32), "shift": np.zeros(wide, np.float32)}
    block = lambda: {"one": kernel(wide), "two": kernel(wide), "norm": [scale(), scale()]}
    params = {
        "stem": kernel(3),
        "blocks": [block() for _ in range(3)],
        "head": _normal(random, wide, classes),
    }
    running = lambda: {"mean": np.zeros(wide, np.float32), "var": np.ones(wide, np.float32)}
    state = {
        "params": params,
        "moment": _zeros(params),
        "running": [[running(), running()] for _ in range(3)],
    }
    labels = random.integers(0, classes, (DEVICES, 8)).astype(np.int32)
    batch = (_normal(random, DEVICES, 8, 16, 16, 3), labels)

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def normalized(x: jax.Array, by: Tree, running: Tree) -> tuple[jax.Array, Tree]:
        mean = x.mean((0, 1, 2))
        var = (x * x).mean((0, 1, 2)) - mean * mean
        found = {"mean": mean, "var": var}
        new = jax.tree.map(lambda old, now: 0.5 * old + 0.5 * now, running, found)
        return (x - mean) * lax.rsqrt(var + 1e-5) * by["scale"] + by["shift"], new

    def loss_of(
        params: Tree, running: Tree, x: jax.Array, y: jax.Array
    ) -> tuple[jax.Array, list[Tree]]:
        hidden, new = convolved(x, params["stem"]), []
        for part, old in zip(params["blocks"], running, strict=True):
            inner, first = normalized(convolved(hidden, part["one"]), part["norm"][0], old[0])
            inner = convolved(jax.nn.relu(inner), part["two"])
            inner, second = normalized(inner, part["norm"][1], old[1])
            hidden = jax.nn.relu(hidden + inner)
            new.append([first, second])
        logits = hidden.mean((1, 2)) @ params["head"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1)
        return -jnp.mean(chosen), new

    def gradient(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree]:
        derivative = jax.value_and_grad(loss_of, has_aux=True)
        (loss, running), gradients = derivative(state["params"], state["running"], x, y)
        return gradients, (loss, running)

    def update(state: Tree, gradients: Tree, rest: Tree) -> tuple[Tree, Tree]:
        loss, running = rest
        return {**_momentum(state, gradients), "running": running}, loss

    return _data_parallel(state, batch, gradient, update)


# ---- a transformer with Adam, and with dropout from a key of each device


def transformer() -> Workload:
    random = np.random.default_rng(0)
    wide, letters, length, heads = 256, 512, 64, 4
    layer = lambda: {
        "qkv": _normal(random, wide, 3 * wide),
        "out": _normal(random, wide, wide),
        "up": _normal(random, wide, 4 * wide),
        "down": _normal(random, 4 * wide, wide),
        "norm": [np.ones(wide, np.float32), np.ones(wide, np.float32)],
    }
    params = {"embedding": _normal(random, letters, wide), "layers": [layer(), layer()]}
    text = random.integers(0, letters, (2, DEVICES, 2, length)).astype(np.int32)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), DEVICES)))

    def normalized(x: jax.Array, by: jax.Array) -> jax.Array:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * by

    def attended(x: jax.Array, part: Tree) -> jax.Array:
        rows = x.shape[0]
        q, k, v = (
            each.reshape(rows, length, heads, wide // heads)
            for each in jnp.split(x @ part["qkv"], 3, -1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return mixed.reshape(rows, length, wide) @ part["out"]

    def loss_of(params: Tree, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        hidden = params["embedding"][x]
        for number, part in enumerate(params["layers"]):
            hidden = hidden + attended(normalized(hidden, part["norm"][0]), part)
            inner = jax.nn.gelu(normalized(hidden, part["norm"][1]) @ part["up"])
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, inner.shape)
            hidden = hidden + (inner * kept / 0.9) @ part["down"]
        logits = hidden @ params["embedding"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))

    def gradient(state: Tree, x: jax.Array, y: jax.Array, data: jax.Array) -> tuple[Tree, Tree]:
        key = jax.random.wrap_key_data(data)
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x, y, key)
        return gradients, loss

    def update(state: Tree, gradients: Tree, loss: jax.Array) -> tuple[Tree, Tree]:
        return _adam(state, gradients), loss

    return _data_parallel(_with_adam(params), (*text, keys), gradient, update)


# ---- an evolution strategy: ranks over all devices, noise made again


def es() -> Workload:
    random = np.random.default_rng(0)
    pairs = {"a": (32, 256), "b": (256, 256), "c": (256, 8)}
    params = {name: _normal(random, *shape) for name, shape in pairs.items()}
    x, y = _normal(random, 64, 32), _normal(random, 64, 8)
    own, scale = 8, 0.0625
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), DEVICES)))

    def noise_of(key: jax.Array) -> Tree:
        leaves, tree = jax.tree.flatten(params)
        parts = zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        return jax.tree.unflatten(tree, [jax.random.normal(k, leaf.shape) for k, leaf in parts])

    def fitness(params: Tree, key: jax.Array) -> jax.Array:
        moved = jax.tree.map(lambda p, e: p + scale * e, params, noise_of(key))
        hidden = jnp.tanh(jnp.tanh(x @ moved["a"]) @ moved["b"])
        return -jnp.mean((hidden @ moved["c"] - y) ** 2)

    def step(state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
        keys = jax.random.split(jax.random.wrap_key_data(data), own)
        mine = jax.vmap(fitness, (None, 0))(state["params"], keys)
        everyone = lax.all_gather(mine, "i").reshape(-1)
        ranks = jnp.sum(everyone[None] < mine[:, None], 1) / everyone.size - 0.5
        gradients = jax.tree.map(jnp.zeros_like, params)  # traced: a captured one would be lifted
        for number in range(own):
            noise = noise_of(keys[number])
            gradients = jax.tree.map(lambda g, e, r=ranks[number]: g - r * e, gradients, noise)
        gradients = lax.psum(gradients, "i")
        gradients = jax.tree.map(lambda g: g / (own * DEVICES * scale), gradients)
        return _adam(state, gradients), jnp.mean(everyone)

    return Workload(step, _with_adam(params), (keys,))


# ---- PPO: games in a scan, and epochs of small batches in two more


def ppo() -> Workload:
    random = np.random.default_rng(0)
    sizes = {"a": (16, 256), "b": (256, 256), "policy": (256, 4), "value": (256, 1)}
    params = {name: _normal(random, *shape) for name, shape in sizes.items()}
    physics = 0.5 * _normal(random, 16, 16)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), DEVICES)))
    batch = (_normal(random, DEVICES, 8, 16), keys)

    def net(params: Tree, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(jnp.tanh(seen @ params["a"]) @ params["b"])
        return hidden @ params["policy"], (hidden @ params["value"])[..., 0]

    def played(params: Tree, start: jax.Array, key: jax.Array) -> tuple[jax.Array, Tree]:
        def turn(seen: jax.Array, key: jax.Array) -> tuple[jax.Array, Tree]:
            logits, value = net(params, seen)
            action = jax.random.categorical(key, logits)
            chance = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            new = jnp.tanh(seen @ physics + 0.1 * action[:, None])
            return new, (seen, action, chance, value, -jnp.mean(new**2, -1))

        last, (seen, action, chance, value, reward) = lax.scan(
            turn, start, jax.random.split(key, 16)
        )

        def summed(later: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (total := reward + 0.95 * later), total

        _, gain = lax.scan(summed, jnp.zeros(8), reward, reverse=True)
        kept = seen, action, chance, gain, gain - value
        return last, jax.tree.map(lambda leaf: leaf.reshape(128, *leaf.shape[2:]), kept)

    def loss_of(params: Tree, rows: Tree) -> jax.Array:
        seen, action, chance, gain, better = rows
        logits, value = net(params, seen)
        now = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        mean, var = lax.pmean((better.mean(), better.var()), "i")
        better = (better - mean) / (jnp.sqrt(var) + 1e-8)
        ratio = jnp.exp(now - chance)
        gained = jnp.minimum(ratio * better, jnp.clip(ratio, 0.8, 1.2) * better)
        return jnp.mean((value - gain) ** 2) / 2 - jnp.mean(gained)

    def step(state: Tree, start: jax.Array, data: jax.Array) -> tuple[Tree, Tree]:
        key = jax.random.wrap_key_data(data)
        last, rows = played(state["params"], start, key)

        def update(state: Tree, rows: Tree) -> tuple[Tree, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(state["params"], rows)
            return _adam(state, lax.pmean(gradients, "i")), lax.pmean(loss, "i")

        def epoch(state: Tree, key: jax.Array) -> tuple[Tree, jax.Array]:
            order = jax.random.permutation(key, 128)
            small = jax.tree.map(lambda x: x[order].reshape(4, 32, *x.shape[1:]), rows)
            return lax.scan(update, state, small)

        state, _ = lax.scan(epoch, state, jax.random.split(jax.random.fold_in(key, 1), 2))
        return state, last

    return Workload(step, _with_adam(params), batch, out_axes=0)


# ---- a flax trainer: AdamW, dropout, and batch norm whose statistics are of each device


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


class _State(train_state.TrainState):
    batch_stats: Any


def flax_trainer() -> Workload:
    model = _Net()
    variables = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)), train=False)
    state = _State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adamw(1e-3),
    )
    random = np.random.default_rng(0)
    batch = {
        "image": random.normal(size=(DEVICES, 8, 8, 8, 3)).astype(np.float32),
        "label": random.integers(0, 10, (DEVICES, 8)).astype(np.int32),
    }
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), DEVICES)))

    def step(state: Any, batch: Tree, data: jax.Array) -> tuple[Tree, Tree]:
        key = jax.random.fold_in(jax.random.wrap_key_data(data), state.step)

        def loss_of(params: Tree) -> tuple[jax.Array, Tree]:
            logits, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), new

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        gradients = lax.pmean(gradients, "i")
        state = state.apply_gradients(grads=gradients, batch_stats=new["batch_stats"])
        return state, lax.pmean(loss, "i")

    return Workload(step, jax.tree.map(np.asarray, state), (batch, keys))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "resnet": resnet,
    "transformer": transformer,
    "es": es,
    "ppo": ppo,
    "flax": flax_trainer,
}
